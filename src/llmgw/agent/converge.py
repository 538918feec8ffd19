"""The owner of this node's engines: one thread compares what is wanted with what is there and acts, one step at a time.

Public methods post into its mailbox or read the last published snapshot; none of them waits for a running installation.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Protocol

import attrs

from llmgw.agent.engine_status import Board, failed, first_words, ready_words
from llmgw.domain import drift
from llmgw.domain.drift import Held, Key, Named, Retry
from llmgw.domain.engines import (
    EngineSpec,
    EngineState,
    EngineStatus,
    InstalledEngine,
    NamedEngine,
    NamedProbe,
    Progress,
)
from llmgw.domain.facts import NodeFacts
from llmgw.errors import LlmgwError, ProviderError
from llmgw.install.named import Seen
from llmgw.install.pipeline import Pipeline
from llmgw.providers.registry import Registry
from llmgw.system.clock import Clock

_LOG = logging.getLogger(__name__)
_LONGEST_WAIT_S = 5.0
_LOOK: Key = ("", "")


class SeeNamed(Protocol):
    """Runs a named engine's checks."""

    def __call__(self, probe: NamedProbe, *, quick: bool) -> Seen: ...


class Converge:
    """Brings the node's engines to what the server wants, and says in words how far that is.

    Args:
        named: engines the agent's configuration names; they are probed and never installed.
        registry: providers, and why others did not load.
        pipeline: installs, re-checks and removes.
        see_named: runs a named engine's checks.
        facts: the node's facts, None before they are known.
        in_use: (name, version) of engines that replicas run.
        clock: dates and waits.
        on_change: called, from any thread, whenever a status changed.
        jitter: 0 to 1, drawn per retry.
        recheck_s: seconds between two looks at an installed or named engine.
    """

    def __init__(
        self,
        named: tuple[NamedEngine, ...],
        registry: Registry,
        pipeline: Pipeline,
        see_named: SeeNamed,
        facts: Callable[[], NodeFacts | None],
        in_use: Callable[[], AbstractSet[Key]],
        clock: Clock,
        on_change: Callable[[], None],
        jitter: Callable[[], float] = random.random,
        recheck_s: float = drift.RECHECK_S,
    ) -> None:
        self._registry = registry
        self._pipeline = pipeline
        self._see_named = see_named
        self._facts = facts
        self._in_use = in_use
        self._clock = clock
        self._board = Board(on_change)
        self._jitter = jitter
        self._recheck_s = recheck_s
        self._began = clock.now()
        self._named_engines = {each.name: each for each in named}
        # owned by the thread
        self._named = {each.name: Named(each.name) for each in named}
        self._found: dict[str, InstalledEngine] = {}
        self._held: dict[tuple[str, str, str], Held] = {}
        self._retries: dict[Key, Retry] = {}
        self._looked = False
        self._driver: str | None = None
        # shared, under the lock
        self._lock = threading.Lock()
        self._desired: tuple[EngineSpec, ...] | None = None
        self._running: EngineSpec | None = None
        self._stop_step = threading.Event()
        self._mailbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # public: any thread

    def start(self) -> None:
        """Begin: what is installed is looked at again before anything is said to be ready."""
        self._thread = threading.Thread(target=self._loop, name="converge", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the running step where it can be ended, and the thread. Engines in use are left alone."""
        self._stopping.set()
        self._stop_step.set()
        self._mailbox.put("stop")
        if self._thread is not None:
            self._thread.join(timeout_s)

    def set_desired(self, specs: tuple[EngineSpec, ...]) -> None:
        """Take the full set the server wants on this node; a running installation of something else is ended."""
        with self._lock:
            if specs == self._desired:
                return
            self._desired = specs
            if self._running is not None and self._running not in specs:
                self._stop_step.set()
        self._mailbox.put("desired")

    def recheck_now(self) -> None:
        """Look at everything again, and try again what failed, without waiting for its time."""
        self._mailbox.put("recheck")

    def try_again(self) -> None:
        """Try what failed now: what it failed for may have come."""
        self._mailbox.put("again")

    def wake(self) -> None:
        """Facts or use changed: decide again."""
        self._mailbox.put("wake")

    def statuses(self) -> tuple[EngineStatus, ...]:
        """Each named, wanted or installed engine; `unprobed` until it was looked at."""
        with self._lock:
            desired = self._desired or ()
        keys: dict[Key, str | None] = {(name, ""): None for name in self._named_engines}
        keys |= {(each.name, each.version): each.version for each in desired if each.name not in self._named_engines}
        first = {key: first_words(key[0], self._began, version) for key, version in keys.items()}
        known = {**first, **self._board.all()}
        return tuple(known[key] for key in sorted(known))

    def engine(self, name: str, version: str) -> InstalledEngine | None:
        """The engine to launch, None when it is not there or was not seen to run. A named one answers for its name."""
        if name not in self._named_engines:
            return self._board.usable((name, version))
        found = self._board.usable((name, ""))
        return found if found is not None and version in ("", found.version) else None

    # the owner thread

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                acted = self._step()
            except Exception:  # a bug in one step must not leave the node without its engines' owner
                _LOG.exception("engines: a step failed, trying again")
                acted = False
            if not acted:
                self._wait()
            while True:
                try:
                    self._take(self._mailbox.get_nowait())
                except queue.Empty:
                    break

    def _wait(self) -> None:
        now = self._clock.now()
        due = drift.next_due(
            tuple(self._held.values()), tuple(self._named.values()), self._retries, now, self._recheck_s
        )
        wait_s = _LONGEST_WAIT_S if due is None else min(_LONGEST_WAIT_S, max(0.1, due))
        with contextlib.suppress(queue.Empty):
            self._take(self._mailbox.get(timeout=wait_s))

    def _take(self, message: str) -> None:
        self._retries.pop(_LOOK, None)
        if message in ("recheck", "again"):
            self._retries.clear()
        if message == "recheck":
            # whoever asks for a look wants all of it: a moment long ago makes the comparison of every byte due
            self._held = {
                key: attrs.evolve(each, checked_at=None, hashed_at=float("-inf")) for key, each in self._held.items()
            }
            self._named = {key: attrs.evolve(each, checked_at=None) for key, each in self._named.items()}

    def _step(self) -> bool:
        """Do the first thing that is to be done; False when there is none."""
        if not self._looked and not self._look():
            return False
        self._watch_driver()
        now = self._clock.now()
        with self._lock:
            desired = self._desired
        in_use = self._in_use()
        self._held = {
            key: attrs.evolve(each, unused_since=drift.unused(each, desired, in_use, now))
            for key, each in self._held.items()
        }
        self._forget(desired)
        held, named = tuple(self._held.values()), tuple(self._named.values())
        actions = drift.drift(desired, held, named, self._retries, in_use, now, self._recheck_s)
        for action in actions:
            if isinstance(action, drift.Collect):
                self._collect(action.engine)
            elif isinstance(action, drift.Recheck):
                self._recheck(action.engine, action.full)
            elif isinstance(action, drift.ProbeNamed):
                self._probe_named(action.name)
            elif not self._install(action.spec):
                continue
            return True
        return False

    def _watch_driver(self) -> None:
        """Another driver: what was seen to run on the old one is looked at again."""
        facts = self._facts()
        version = None if facts is None else facts.nvidia.version
        if version is not None and self._driver not in (None, version):
            self._take("recheck")
        self._driver = version or self._driver

    def _look(self) -> bool:
        """Read what is installed; on failure say so on every wanted engine and try again later."""
        now = self._clock.now()
        before = self._retries.get(_LOOK)
        if before is not None and now < before.at:
            return False
        try:
            records = self._pipeline.records()
        except LlmgwError as error:
            with self._lock:
                desired = self._desired or ()
            for spec in desired:
                self._fail(spec, error)
            self._retries[_LOOK] = drift.next_retry(before, now, self._jitter())
            return False
        self._retries.clear()
        for record in records:
            engine = self._pipeline.store.engine(record)
            self._held[engine.name, engine.version, engine.build] = Held(engine)
        self._looked = True
        return True

    def _forget(self, desired: tuple[EngineSpec, ...] | None) -> None:
        """Drop what is neither wanted, installed nor named any more."""
        keep = {(name, "") for name in self._named} | {(spec.name, spec.version) for spec in desired or ()}
        keep |= {(name, version) for name, version, _ in self._held}
        self._retries = {key: retry for key, retry in self._retries.items() if key in keep}
        self._board.keep(keep)

    def _recheck(self, engine: InstalledEngine, full: bool) -> None:
        key = (engine.name, engine.version, engine.build)
        wrong = self._pipeline.recheck(engine, full=full)
        now = self._clock.now()
        before = self._held[key]
        hashed_at = now if full else before.hashed_at
        self._held[key] = attrs.evolve(before, checked_at=now, broken=wrong is not None, hashed_at=hashed_at)
        with self._lock:
            wanted = [spec for spec in self._desired or () if (spec.name, spec.version) == key[:2]]
        if wanted and not any(drift.serves(engine, spec) for spec in wanted):
            return  # another build of it is wanted: that one's words are shown
        if wrong is None:
            self._publish(engine, EngineState.READY, ready_words(engine), usable=engine)
            return
        if self._pipeline.store.find(engine.name, engine.version, engine.build) is None:
            del self._held[key]
        # repair is tried at once, then with the usual pauses
        self._publish(engine, EngineState.BROKEN, f"broken: {wrong}")

    def _collect(self, engine: InstalledEngine) -> None:
        key = (engine.name, engine.version, engine.build)
        self._board.withdraw(key[:2])
        try:
            self._pipeline.collect(engine)
        except LlmgwError as error:
            _LOG.warning("engines: %s %s is not removed: %s", engine.name, engine.version, error.words())
            self._held[key] = attrs.evolve(self._held[key], unused_since=self._clock.now())
            return
        del self._held[key]
        _LOG.info("engines: removed %s %s (%s): nothing wants it", *key)

    def _probe_named(self, name: str) -> None:
        key = (name, "")
        settings = self._named_engines[name]
        now = self._clock.now()
        try:
            probe = self._registry.get(name).named(settings)
            known = self._found.get(name)
            seen = self._see_named(probe, quick=known is not None)
        except LlmgwError as error:
            self._retries[key] = drift.next_retry(self._retries.get(key), now, self._jitter())
            self._named[name] = Named(name, now, usable=False)
            self._found.pop(name, None)
            self._board.put(key, failed(name, None, error, now, self._retries[key].at, EngineState.NAMED))
            return
        self._retries.pop(key, None)
        self._named[name] = Named(name, self._clock.now(), usable=True)
        version = seen.version or (known.version if known is not None else "")
        engine = InstalledEngine(name, version, "named", "", probe.binary, dict(settings.settings))
        self._found[name] = engine
        words = f"named in agent.yaml: `{probe.binary}`, version {version or 'not told'}, seen to run"
        status = EngineStatus(name, version or None, None, EngineState.NAMED, words, now, usable=True)
        self._board.put(key, status, engine)

    def _install(self, spec: EngineSpec) -> bool:
        """Try to install; False when it cannot even begin now."""
        now = self._clock.now()
        try:
            provider = self._registry.get(spec.name)
            if not provider.capabilities.installable:
                raise ProviderError(
                    f"llmgw does not install {spec.name}", hint=f"name it in agent.yaml: `engines.{spec.name}`"
                )
        except LlmgwError as error:
            self._fail(spec, error)
            return True
        facts = self._facts()
        if facts is None:
            words = "absent: waits until this node's hardware and system are known"
            status = EngineStatus(spec.name, spec.version, None, EngineState.ABSENT, words, now)
            self._board.put((spec.name, spec.version), status)
            return False
        with self._lock:
            if self._desired is None or spec not in self._desired:
                return True
            self._running = spec
            self._stop_step.clear()
        if self._stopping.is_set():
            return True
        key = (spec.name, spec.version)

        repair = self._broken_words(spec)

        def told(words: str, progress: Progress | None) -> None:
            state = EngineState.INSTALLING
            if repair:
                state, words = EngineState.BROKEN, f"{repair}; repairing: {words.removeprefix('installing: ')}"
            status = EngineStatus(spec.name, spec.version, None, state, words, self._clock.now(), progress)
            self._board.put(key, status)

        try:
            engine = self._pipeline.install(spec, provider, facts, told, self._stop_step)
        except LlmgwError as error:
            if not self._stop_step.is_set():
                self._fail(spec, error)
            return True
        finally:
            with self._lock:
                self._running = None
        self._retries.pop(key, None)
        seen = self._clock.now()
        self._held[engine.name, engine.version, engine.build] = Held(engine, checked_at=seen, hashed_at=seen)
        self._publish(engine, EngineState.READY, ready_words(engine), usable=engine)
        return True

    def _broken_words(self, spec: EngineSpec) -> str:
        """What is wrong with the engine that is about to be repaired, "" when none is."""
        if not any(each.broken and drift.serves(each.engine, spec) for each in self._held.values()):
            return ""
        status = self._board.get((spec.name, spec.version))
        if status is None or status.state is not EngineState.BROKEN:
            return "broken"
        return status.words.partition("; repairing: ")[0].partition("; next try at ")[0]

    def _fail(self, spec: EngineSpec, error: LlmgwError) -> None:
        key = (spec.name, spec.version)
        now = self._clock.now()
        asked = getattr(error, "retry_after_s", None)
        retry = drift.next_retry(self._retries.get(key), now, self._jitter(), asked)
        self._retries[key] = retry
        broken = any(each.broken and drift.serves(each.engine, spec) for each in self._held.values())
        state = EngineState.BROKEN if broken else EngineState.FAILED
        self._board.put(key, failed(spec.name, spec.version, error, now, retry.at, state))

    def _publish(
        self, engine: InstalledEngine, state: EngineState, words: str, usable: InstalledEngine | None = None
    ) -> None:
        status = EngineStatus(
            engine.name,
            engine.version,
            engine.build,
            state,
            words,
            self._clock.now(),
            usable=usable is not None,
            passed_over=engine.passed_over,
        )
        self._board.put((engine.name, engine.version), status, usable)
