"""The sentences of engines on this node."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime

import attrs

from llmgw.domain.drift import Key
from llmgw.domain.engines import EngineState, EngineStatus, InstalledEngine
from llmgw.errors import LlmgwError

_LOG = logging.getLogger(__name__)
_BUILDS = {"cpu": "CPU", "cuda": "CUDA", "vulkan": "Vulkan"}


class Board:
    """The published statuses and the engines that may be launched: written by one thread, read by any.

    Args:
        on_change: called by the writing thread, outside the lock, whenever a status changed.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._statuses: dict[Key, EngineStatus] = {}
        self._usable: dict[Key, InstalledEngine] = {}

    def put(self, key: Key, status: EngineStatus, usable: InstalledEngine | None = None) -> None:
        """Publish a status; the engine can be launched when `usable` is given, and only then."""
        with self._lock:
            before = self._statuses.get(key)
            if before is not None and before.state == status.state:
                status = attrs.evolve(status, since=before.since)
            self._statuses[key] = status
            if usable is None:
                self._usable.pop(key, None)
            else:
                self._usable[key] = usable
        if before is None or before.state != status.state:
            _LOG.info("engines: %s %s: %s", key[0], key[1], status.words)
        if before != status:
            self._on_change()

    def get(self, key: Key) -> EngineStatus | None:
        """The published status, None when there is none."""
        with self._lock:
            return self._statuses.get(key)

    def all(self) -> dict[Key, EngineStatus]:
        """Every published status."""
        with self._lock:
            return dict(self._statuses)

    def usable(self, key: Key) -> InstalledEngine | None:
        """The engine to launch, None when it was not seen to run."""
        with self._lock:
            return self._usable.get(key)

    def withdraw(self, key: Key) -> None:
        """Let it not be launched any more; its status stays."""
        with self._lock:
            self._usable.pop(key, None)

    def keep(self, keys: AbstractSet[Key]) -> None:
        """Forget all others."""
        with self._lock:
            gone = [key for key in self._statuses if key not in keys]
            for key in gone:
                del self._statuses[key]
                self._usable.pop(key, None)
        if gone:
            self._on_change()


def first_words(name: str, now: float, version: str | None = None) -> EngineStatus:
    """Before anything was looked at: not known, which is not absent."""
    return EngineStatus(name, version, None, EngineState.UNPROBED, "unprobed: not looked at yet", now)


def ready_words(engine: InstalledEngine) -> str:
    """`ready: CPU build, seen to run`, and why a better build was passed over."""
    kind, _, label = engine.build.partition("-")
    shown = f"{_BUILDS.get(kind, kind)} {label}".strip()
    words = f"ready: {shown} build, seen to run"
    return f"{words} ({engine.passed_over})" if engine.passed_over else words


def failed(
    name: str, version: str | None, error: LlmgwError, now: float, next_try: float, state: EngineState
) -> EngineStatus:
    """A failure in words: what, why, what to do, and when it is tried again."""
    lead = {EngineState.BROKEN: "broken", EngineState.NAMED: "named in agent.yaml, not usable"}.get(state, "failed")
    hint = f" ({error.hint})" if error.hint else ""
    # a moment and not a distance: the sentence is shown, unchanged, long after it was made
    at = datetime.fromtimestamp(next_try, UTC).strftime("%H:%M:%S UTC")
    words = f"{lead}: {error.words()}{hint}; next try at {at}"
    return EngineStatus(name, version, None, state, words, now, next_try=next_try)
