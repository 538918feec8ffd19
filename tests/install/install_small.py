"""A small engine for the pipeline: a real ELF program of this machine in a release archive, and its provider."""

from __future__ import annotations

import shutil
from pathlib import Path

import install_archives as archives
from install_fakes import Shelf, StepClock

from llmgw.domain.engines import Asset, Capabilities, Check, EngineSpec, Origin, Recipe
from llmgw.domain.facts import NodeFacts
from llmgw.errors import NoBuild
from llmgw.install.packages import Packages
from llmgw.install.pipeline import Pipeline
from llmgw.install.prove import Prover
from llmgw.install.store import Store
from llmgw.system.clock import Clock
from llmgw.system.commands import RealRunner

PROGRAM = Path(shutil.which("env") or "/usr/bin/env").resolve()


def release(directory: Path, version: str = "b1", binary: str = "engine") -> Path:
    directory.mkdir(exist_ok=True)
    data = archives.tar_gz(
        [
            archives.entry(f"top/{binary}", PROGRAM.read_bytes(), 0o755),
            archives.entry("top/libx.so.0.1", b"library"),
            archives.link("top/libx.so", "libx.so.0.1"),
        ]
    )
    return archives.write(directory / f"engine-{version}.tar.gz", data)


class Small:
    """A provider of that engine; `says` is what its `--version` must print."""

    name = "small"
    capabilities = Capabilities(True, ("gguf",), False, ())

    def __init__(self, says: str = r"^env \(.*$") -> None:
        self.says = says

    def origin(self, version: str) -> Origin:
        return Origin("someone/small", version)

    def recipe(self, spec: EngineSpec, facts: NodeFacts, assets: tuple[Asset, ...]) -> Recipe:
        found = tuple(asset for asset in assets if asset.name == f"engine-{spec.version}.tar.gz")
        if not found:
            raise NoBuild(f"small {spec.version} has no build there")
        return Recipe(
            name=self.name,
            version=spec.version,
            build="cpu",
            assets=found,
            binary="engine",
            expected_files=("libx.so*",),
            checks=(Check("--version", ("{dir}/engine", "--version"), stdout=self.says, quick=True),),
        )


class NoPackages:
    """A node whose libraries are all there; being asked is a failure."""

    def provide(self, missing, allowed, system, say, stop):  # type: ignore[no-untyped-def]
        raise AssertionError(f"asked for {missing}")


def pipeline(
    root: Path, shelf: Shelf, prover: Prover | None = None, packages: Packages | None = None, clock: Clock | None = None
) -> Pipeline:
    clock = clock or StepClock()
    return Pipeline(
        Store(root, clock),
        lambda _: shelf,
        shelf.fetch,
        packages or NoPackages(),
        prover or Prover(RealRunner(), None, clock),  # type: ignore[arg-type]
        clock,
    )
