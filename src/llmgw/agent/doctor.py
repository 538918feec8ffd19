"""`llmgw doctor`: every probe and every proof of this node, one line each, with what to do where something is wrong."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

from attrs import frozen

from llmgw.domain.engines import NamedEngine, Recipe
from llmgw.domain.facts import NodeFacts, NodeWarning, OsFacts, Truth
from llmgw.errors import LlmgwError
from llmgw.install.packages import MANAGERS
from llmgw.install.prove import Prover
from llmgw.install.store import Record, Store
from llmgw.providers.registry import Registry
from llmgw.system.files import free_space
from llmgw.units import format_size

_LOW_BYTES = 2 << 30


class Mark(StrEnum):
    """How a line stands: `note` is neither good nor bad, `?` is not known."""

    OK = "ok"
    NOTE = "-"
    WARN = "warn"
    UNKNOWN = "?"
    BAD = "BAD"


@frozen
class Line:
    """One thing that was looked at: `words` is what was seen, `fix` what to do about it ("" when nothing)."""

    mark: Mark
    what: str
    words: str
    fix: str = ""

    def text(self) -> str:
        """The whole line, as it is printed."""
        return f"{self.mark:<5}{self.what}: {self.words}" + (f" -> {self.fix}" if self.fix else "")


def node_lines(facts: NodeFacts, warnings: Sequence[NodeWarning]) -> Iterator[Line]:
    """What the probes found out: system, packages, processor, memory, GPUs, fabrics, and their warnings."""
    system = facts.os
    named = f"{system.name or system.id}, kernel {system.kernel or 'unknown'}, {facts.cpu.arch}"
    yield Line(Mark.OK, "system", named)
    if system.glibc is None:
        musl = system.family == "alpine"
        words = "this node has musl, llama.cpp builds need glibc" if musl else "its version is not known"
        fix = "name a binary of your own in agent.yaml" if musl else ""
        yield Line(Mark.BAD if musl else Mark.UNKNOWN, "C library", words, fix)
    else:
        cxx = f"libstdc++ with GLIBCXX_{system.libstdcxx}" if system.libstdcxx else "libstdc++ not known"
        yield Line(Mark.OK, "C library", f"glibc {system.glibc}, {cxx}")
    yield _packages(system)
    cpu = facts.cpu
    words = f"{cpu.name or 'unknown model'}, {cpu.cores or '?'} cores"
    if cpu.flags is not None and cpu.arch == "x86_64" and "avx2" not in cpu.flags:
        fix = "give this virtual machine the host's CPU type" if cpu.virtual else ""
        yield Line(Mark.WARN, "processor", f"{words}, without AVX2: llama.cpp runs about five times slower", fix)
    else:
        yield Line(Mark.OK, "processor", words)
    total = facts.memory.total_bytes
    limit = facts.memory.limit_bytes
    limited = f", limited to {format_size(limit)} by a cgroup" if limit is not None else ""
    known = Mark.UNKNOWN if total is None else Mark.OK
    yield Line(known, "memory", (format_size(total) if total is not None else "its size is not known") + limited)
    driver = facts.nvidia.driver
    mark = {Truth.YES: Mark.OK, Truth.NO: Mark.NOTE, Truth.UNKNOWN: Mark.UNKNOWN}[driver.value]
    yield Line(mark, "NVIDIA driver", driver.words)
    for gpu in facts.gpus or ():
        size = format_size(gpu.memory_total_bytes) if gpu.memory_total_bytes else "memory not known"
        name = f"GPU {gpu.index if gpu.index is not None else gpu.uuid}"
        words = f"{gpu.name or 'unknown model'}, {size}, compute capability {gpu.compute_cap or 'not known'}"
        fix = "look at `dmesg` for its Xid, then reset it or restart the machine" if gpu.faulty else ""
        yield Line(Mark.BAD if gpu.faulty else Mark.OK, name, f"{words}: {gpu.faulty}" if gpu.faulty else words, fix)
    for fabric in facts.fabrics:
        mark = {Truth.YES: Mark.OK, Truth.NO: Mark.BAD, Truth.UNKNOWN: Mark.UNKNOWN}[fabric.usable.value]
        yield Line(mark, f"fabric {fabric.name}", fabric.usable.words)
    for warning in warnings:
        yield Line(Mark.WARN, warning.code, warning.words)


def _packages(system: OsFacts) -> Line:
    manager = None if system.immutable or system.family is None else MANAGERS.get(system.family)
    if manager is None:
        words = f"{system.name or system.id} takes no packages from llmgw"
        return Line(Mark.NOTE, "packages", words, "add missing libraries to the image of this node")
    if os.geteuid() != 0:
        return Line(
            Mark.WARN,
            "packages",
            f"`{manager.program}` can be used by root only",
            "run the agent as root, or install missing libraries by hand",
        )
    return Line(Mark.OK, "packages", f"missing libraries come by `{manager.program}`")


def directory_line(what: str, path: Path) -> Line:
    """Whether a directory can be written, and the room on its file system."""
    probe = path
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    try:
        with tempfile.TemporaryFile(dir=probe if probe.is_dir() else None):
            pass
        space = free_space(path)
    except (OSError, LlmgwError) as error:
        cause = error.words() if isinstance(error, LlmgwError) else error.strerror or str(error)
        return Line(Mark.BAD, what, f"`{path}` cannot be written: {cause}", "name another directory in agent.yaml")
    words = f"`{path}`, {format_size(space.free_bytes)} of {format_size(space.total_bytes)} free"
    low = space.free_bytes < _LOW_BYTES
    return Line(Mark.WARN if low else Mark.OK, what, words, "free some space" if low else "")


class EngineDoctor:
    """Looks at the engines of a node.

    Args:
        store: where they are installed.
        prover: runs their checks.
        registry: providers, for the named ones.
    """

    def __init__(self, store: Store, prover: Prover, registry: Registry) -> None:
        self._store = store
        self._prover = prover
        self._registry = registry

    def lines(self, facts: NodeFacts, named: Sequence[NamedEngine]) -> Iterator[Line]:
        """Every proof of every installed and named engine, whole files included."""
        for problem in self._registry.problems:
            yield Line(Mark.BAD, "providers", problem.words(), "repair or remove that distribution")
        records = self._store.installed()
        for record in records:
            yield from self._record(record, facts)
        for engine in named:
            yield from self._named(engine)
        if not records and not named:
            yield Line(Mark.NOTE, "engines", f"none is installed below `{self._store.root}`")

    def _record(self, record: Record, facts: NodeFacts) -> Iterator[Line]:
        recipe = record.recipe
        name = f"{recipe.name} {recipe.version} {recipe.build}"
        directory = self._store.tree(recipe.name, recipe.version, recipe.build)
        wrong = self._store.verify(record, full=True)
        repair = "the agent installs it again at its next look; `llmgw ctl engines recheck` makes that now"
        yield Line(
            Mark.BAD if wrong else Mark.OK,
            f"{name}, files",
            wrong or f"{len(record.files)} files are as they were proven",
            repair if wrong else "",
        )
        if recipe.passed_over:
            yield Line(Mark.WARN, f"{name}, choice", recipe.passed_over)

        def asks() -> str:
            self._prover.check_files(directory, recipe, facts)
            return "this node has what they ask for"

        yield _try(f"{name}, needs of its files", asks)
        yield self._libraries(f"{name}, libraries", directory, recipe, facts.os)
        for check in recipe.checks:
            yield from self._prove(f"{name}, {check.title}", directory, (check,))

    def _libraries(self, what: str, directory: Path, recipe: Recipe, system: OsFacts) -> Line:
        try:
            found = self._prover.libraries(directory, recipe)
            self._prover.check_versions(found, system)
        except LlmgwError as error:
            return Line(Mark.BAD, what, error.words(), error.hint)
        if not found.missing:
            return Line(Mark.OK, what, "all are there")
        lacking = f"{', '.join(found.missing)} {'is' if len(found.missing) == 1 else 'are'} missing"
        manager = MANAGERS.get(system.family or "")
        known = [recipe.os_packages.get(each, {}).get(system.family or "") for each in found.missing]
        if manager is None or None in known:
            return Line(Mark.BAD, what, lacking, f"install {' and '.join(found.missing)} by hand")
        command = " ".join((*manager.by_hand, *dict.fromkeys(each for each in known if each)))
        return Line(Mark.BAD, what, lacking, f"run `{command}` as root")

    def _named(self, engine: NamedEngine) -> Iterator[Line]:
        try:
            probe = self._registry.get(engine.name).named(engine)
        except LlmgwError as error:
            yield Line(Mark.BAD, f"{engine.name}, named", error.words(), error.hint)
            return
        if not os.access(probe.binary, os.X_OK):
            yield Line(
                Mark.BAD,
                f"{engine.name}, named",
                f"`{probe.binary}` is not there or not executable",
                "correct the path in agent.yaml",
            )
            return
        for check in probe.checks:
            yield from self._prove(f"{engine.name}, named, {check.title}", None, (check,))

    def _prove(self, what: str, directory: Path | None, checks: tuple) -> Iterator[Line]:  # type: ignore[type-arg]
        try:
            with tempfile.TemporaryDirectory(prefix="llmgw-doctor-", ignore_cleanup_errors=True) as scratch:
                seen = self._prover.prove(directory, checks, Path(scratch), lambda _: None, threading.Event())
        except LlmgwError as error:
            yield Line(Mark.BAD, what, error.words(), error.hint)
            return
        for proof in seen:
            yield Line(Mark.OK, what, proof.words)


def _try(what: str, look: Callable[[], str]) -> Line:
    try:
        return Line(Mark.OK, what, look())
    except LlmgwError as error:
        return Line(Mark.BAD, what, error.words(), error.hint)
