"""What the fleet's engines are made of: each version asked for once, its digests pinned at first sight, in words.

One thread asks. The reconciler reads what is known and sends it to agents with their desired sets.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from attrs import define, evolve, field, frozen

from llmgw.domain.engines import Asset, EngineSpec, Origin, Release
from llmgw.errors import InstallError, LlmgwError, UsageError
from llmgw.server.state import State, StoredRelease
from llmgw.sources.server import TEXT, asset_path
from llmgw.system.clock import Clock

log = logging.getLogger(__name__)

IMPORTED = "import"
_REFRESH_S = 6 * 3600.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 15.0, 900.0
_LOOK_S = 30.0
_ARCHES = {"pypi": ("x86_64", "aarch64")}
_DEFAULT = ("github",)
_MOST_ASSETS = 2000

Key = tuple[str, str]


class Source(Protocol):
    """Lists what a version publishes."""

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]: ...


@frozen
class Known:
    """One version as the admin API lists it. `asked` is when its sources were asked last, None for an import."""

    release: Release
    assets: tuple[Asset, ...]
    asked: float | None


@define
class _Entry:
    """Owned by the book's lock."""

    assets: tuple[Asset, ...] = ()
    words: str = ""
    asked: float | None = None
    due: float = 0.0
    failures: int = 0
    retry_after_s: float | None = None
    asking: bool = True
    imported: bool = False
    told: Release | None = field(default=None)


class ReleaseBook:
    """Knows each wanted version's files.

    Args:
        origin: engine and version -> where its provider publishes it; may raise LlmgwError.
        make_source: source text -> Source; may raise LlmgwError.
        on_change: called, from any thread, when agents have to be told anew.
    """

    def __init__(
        self,
        state: State,
        origin: Callable[[str, str], Origin],
        make_source: Callable[[str], Source],
        clock: Clock,
        on_change: Callable[[], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._state = state
        self._origin = origin
        self._make_source = make_source
        self._clock = clock
        self._on_change = on_change
        self._jitter = jitter
        self._lock = threading.Lock()
        self._wanted: dict[Key, EngineSpec] = {}
        self._entries: dict[Key, _Entry] = {}
        self._by_digest: dict[tuple[str, str], Asset] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="releases", daemon=True)
        for stored in state.releases():
            self._keep(stored)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a question under way is left behind."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def releases(self, specs: Sequence[EngineSpec]) -> tuple[Release, ...]:
        """What agents are told about those of `specs` that are fetched from the server. Never blocks."""
        asked = [spec for spec in specs if TEXT in spec.sources]
        told, new = [], False
        with self._lock:
            for spec in asked:
                key = (spec.name, spec.version)
                new = new or self._wanted.get(key) != spec
                self._wanted[key] = spec
                entry = self._entries.setdefault(key, _Entry())
                told.append(self._told(key, entry, spec.sha256))
        if new:
            self._wake.set()
        return tuple(told)

    def find(self, sha256: str, name: str) -> Asset | None:
        """The file with exactly this digest and name, as its source listed it; None when no release has it."""
        with self._lock:
            return self._by_digest.get((sha256, name))

    def imported_digests(self) -> frozenset[str]:
        """Digests of files that cannot be fetched again."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.imported]
            return frozenset(asset.sha256 for entry in entries for asset in entry.assets if asset.sha256)

    def listing(self) -> tuple[Known, ...]:
        """Every known version, for the admin API."""
        with self._lock:
            return tuple(
                Known(self._told(key, entry, {}), entry.assets, entry.asked)
                for key, entry in sorted(self._entries.items())
            )

    def take_in(self, engine: str, version: str, assets: Sequence[Asset]) -> bool:
        """Keep an imported version; its sources are not asked any more.

        Returns:
            False when all of it was known already.

        Raises:
            UsageError: a file is pinned with another digest already.
            StateError: it could not be kept.
        """
        mine = tuple(evolve(asset, url="", source=IMPORTED) for asset in assets)
        with self._lock:
            before = self._entries.get((engine, version), _Entry())
            merged, problems = pin(before.assets, mine)
            if problems:
                raise UsageError(
                    f"{engine} `{version}` is not imported",
                    cause="; ".join(problems),
                    hint="find out which of the two files is the genuine one; nothing was changed",
                    code="digest-mismatch",
                )
            if before.imported and merged == before.assets:
                return False
            stored = StoredRelease(engine, version, merged, self._clock.now(), imported=True)
            self._state.put_release(stored)
            self._keep(stored)
        self._on_change()
        return True

    # the thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            for key, spec in self._due():
                if self._stopping:
                    return
                try:
                    self._ask(key, spec)
                except Exception as error:  # one version's fault must not keep the others from being asked for
                    log.exception("asking for %s %s failed", *key)
                    told = InstallError("a fault inside the server", cause=type(error).__name__)
                    self._failed(key, told)
            self._clock.wait(self._wake, self._pause())

    def _pause(self) -> float:
        now = self._clock.monotonic()
        with self._lock:
            due = [self._entries[key].due - now for key in self._wanted if not self._entries[key].imported]
        return max(0.05, min([*due, _LOOK_S]))

    def _due(self) -> list[tuple[Key, EngineSpec]]:
        now = self._clock.monotonic()
        with self._lock:
            entries = ((key, spec, self._entries[key]) for key, spec in self._wanted.items())
            return [(key, spec) for key, spec, entry in entries if not entry.imported and entry.due <= now]

    def _ask(self, key: Key, spec: EngineSpec) -> None:
        texts = tuple(text for text in spec.sources if text != TEXT) or _DEFAULT
        refusals: list[tuple[str, LlmgwError]] = []
        found: tuple[Asset, ...] = ()
        for text in texts:
            try:
                found = self._listed(text, spec)
                break
            except LlmgwError as error:
                refusals.append((text, error))
        if not found:
            self._failed(key, _combined(refusals))
            return
        with self._lock:
            entry = self._entries[key]
        if entry.imported:
            return
        merged, problems = pin(entry.assets, found)
        stored = StoredRelease(*key, merged, self._clock.now())
        try:
            self._state.put_release(stored)
        except LlmgwError as error:
            # digests that are not pinned are not handed out: the next server would believe others
            self._failed(key, error)
            return
        with self._lock:
            self._keep(stored)
            self._entries[key].words = "; ".join(problems)
        for words in problems:
            log.error("%s %s: %s", *key, words)
        log.info("%s %s: %d files", *key, len(merged))
        self._on_change()

    def _listed(self, text: str, spec: EngineSpec) -> tuple[Asset, ...]:
        origin = self._origin(spec.name, spec.version)
        source = self._make_source(text)
        found: dict[str, Asset] = {}
        refusal: LlmgwError | None = None
        for arch in _ARCHES.get(text, ("x86_64",)):
            try:
                for asset in source.assets(origin, spec, arch)[:_MOST_ASSETS]:
                    found[asset.name] = asset
            except LlmgwError as error:
                refusal = error
        if not found:
            raise refusal or InstallError(f"{text} lists no file of {spec.name} `{spec.version}`")
        return tuple(found.values())

    def _failed(self, key: Key, error: LlmgwError) -> None:
        asked = getattr(error, "retry_after_s", None)
        words = f"{error.words()} ({error.hint})" if error.hint else error.words()
        with self._lock:
            entry = self._entries[key]
            entry.failures += 1
            usual = min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2.0 ** (entry.failures - 1)) * (0.75 + self._jitter() / 2)
            pause = usual if asked is None else min(3600.0, max(asked, 1.0))
            entry.due = self._clock.monotonic() + pause
            changed = entry.asking or (not entry.assets and entry.words != words)
            entry.asking = False
            entry.words = words if not entry.assets else entry.words
            entry.retry_after_s = round(pause, 1)
        log.warning("%s %s cannot be resolved: %s; next try in %.0f s", *key, words, pause)
        if changed:
            self._on_change()

    # under the lock

    def _keep(self, stored: StoredRelease) -> None:
        key = (stored.engine, stored.version)
        age = max(0.0, self._clock.now() - stored.resolved)
        asked = None if stored.imported else stored.resolved
        due = self._clock.monotonic() + max(0.0, _REFRESH_S - age)
        self._entries[key] = _Entry(stored.assets, asked=asked, due=due, asking=False, imported=stored.imported)
        for asset in stored.assets:
            if asset.sha256:
                self._by_digest[asset.sha256, asset.name] = asset

    def _told(self, key: Key, entry: _Entry, pins: Mapping[str, str]) -> Release:
        for name, sha256 in pins.items():
            for asset in entry.assets:
                if asset.name == name and asset.sha256 is None:
                    self._by_digest[sha256, name] = evolve(asset, sha256=sha256)
        assets = tuple(_handed_on(asset, pins) for asset in entry.assets)
        made = Release(*key, assets, entry.words, entry.asking, None if assets else entry.retry_after_s)
        if made != entry.told:
            entry.told = made
        return entry.told


def pin(before: Iterable[Asset], found: Iterable[Asset]) -> tuple[tuple[Asset, ...], list[str]]:
    """What a version is made of when `before` was seen first and `found` is listed now: the first digest stays.

    Returns:
        The files by name, and a sentence for each one that was replaced at its source.
    """
    merged = {asset.name: asset for asset in before}
    problems = []
    for asset in found:
        old = merged.get(asset.name)
        if old is None or old.sha256 is None or asset.sha256 is None or old.sha256 == asset.sha256:
            digest = asset.sha256 or (old.sha256 if old is not None else None)
            merged[asset.name] = evolve(asset, sha256=digest)
            continue
        problems.append(
            f"`{asset.name}` was replaced at {asset.source} after it was pinned: pinned is sha256 {old.sha256[:16]}…, "
            f"now it is {asset.sha256[:16]}…; the pinned one stays, the new one is refused"
        )
    return tuple(merged[name] for name in sorted(merged)), problems


def _handed_on(asset: Asset, pins: Mapping[str, str]) -> Asset:
    sha256 = asset.sha256 or pins.get(asset.name)
    url = asset_path(sha256, asset.name) if sha256 else ""
    return Asset(asset.name, url, asset.size_bytes, sha256)


def _combined(refusals: Sequence[tuple[str, LlmgwError]]) -> LlmgwError:
    if len(refusals) == 1:
        return refusals[0][1]
    waits = [after for _, error in refusals if (after := getattr(error, "retry_after_s", None)) is not None]
    words = "; ".join(f"{text}: {error.words()}" for text, error in refusals)
    hint = next((error.hint for _, error in refusals if error.hint), "")
    return InstallError(words, hint=hint, retry_after_s=min(waits, default=None))
