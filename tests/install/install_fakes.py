"""Pieces the installer's tests share: a clock that never sleeps, a scripted package manager, a source on disk."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmgw.domain.engines import Asset, EngineSpec, Origin
from llmgw.domain.facts import CpuFacts, Finding, MemoryFacts, NodeFacts, NvidiaFacts, OsFacts, Truth
from llmgw.system.commands import Completed

DEBIAN = OsFacts("debian", "12", "Debian GNU/Linux 12", "debian", "6.1", "2.36", "3.4.30")


def facts(arch: str = "x86_64", system: OsFacts = DEBIAN) -> NodeFacts:
    return NodeFacts(
        hostname="node",
        boot_id="boot",
        os=system,
        cpu=CpuFacts(arch, 2),
        memory=MemoryFacts(8 << 30),
        nvidia=NvidiaFacts(Finding(Truth.NO, "no NVIDIA driver is loaded")),
        gpus=(),
    )


class StepClock:
    """Time that moves only when somebody waits."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self.at = start
        self.waits: list[float] = []

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        self.at += timeout_s
        return event.is_set()


class Scripted:
    """A runner that answers by rule and remembers what it was asked."""

    def __init__(self, answer: Callable[[tuple[str, ...]], Completed]) -> None:
        self._answer = answer
        self.asked: list[tuple[str, ...]] = []
        self.env: Mapping[str, str] = {}

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        output_cap: int = 1 << 20,
        stdin: bytes = b"",
    ) -> Completed:
        self.asked.append(tuple(argv))
        self.env = env or {}
        return self._answer(tuple(argv))


def done(code: int, stdout: str = "", stderr: str = "") -> Completed:
    return Completed(("x",), code, stdout, stderr)


class Shelf:
    """A source that is a directory, and the fetch that goes with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fetched: list[str] = []

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]:
        return tuple(
            Asset(
                path.name, f"file://{path}", path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest(), "shelf"
            )
            for path in sorted(self.directory.glob("*.tar.gz"))
        )

    def fetch(
        self,
        asset: Asset,
        dest_dir: Path,
        *,
        progress: Callable[[int, int | None], None],
        stop: threading.Event,
    ) -> Path:
        self.fetched.append(asset.name)
        dest = dest_dir / f"{asset.sha256}-{asset.name}"
        progress((asset.size_bytes or 0) // 2, asset.size_bytes)
        shutil.copyfile(asset.url.removeprefix("file://"), dest)
        progress(asset.size_bytes or 0, asset.size_bytes)
        return dest
