"""The supervisor: one thread owns all replicas of this node; everybody else posts to its mailbox.

Engines outlive it: `detach` leaves them running, and the next supervisor adopts them. See design.md.
"""

from __future__ import annotations

import logging
import queue
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmgw.agent import adopt, handles, litter, logs, procs
from llmgw.agent.adopt import Gone
from llmgw.agent.child import signal_if_same
from llmgw.agent.devices import Devices, GpuFree
from llmgw.agent.health import Check, Watch
from llmgw.agent.logs import Piece
from llmgw.agent.ports import Ports
from llmgw.agent.replica import Replica
from llmgw.agent.starting import SupervisorSettings, Tools
from llmgw.agent.weights import Weights
from llmgw.domain.engines import InstalledEngine
from llmgw.domain.replicas import ReplicaSpec, ReplicaStatus
from llmgw.errors import LlmgwError, ReplicaError
from llmgw.providers.base import Provider
from llmgw.system.clock import Clock
from llmgw.system.http import Http

__all__ = ["Supervisor", "SupervisorSettings"]

_LOG = logging.getLogger("llmgw.agent.supervisor")
_TICK_S = 0.1
_BUSY_TICK_S = 0.02
_KEEP_STOPPED_S = 60.0
_FIRST_ANSWERS_S = 2.0
_COLLECT_EVERY_S = 3600.0

Message = Callable[[], None]


class Supervisor:
    """Runs this node's replicas.

    Args:
        providers: by name; they say how an engine is launched.
        engine: the engine of that name and version when it is ready here, else None.
        engine_words: the engine's own sentence; it becomes the words of a replica that waits for it.
        weights: resolves models; its `on_change` is taken over.
        http: asks engines for their health. It must use no proxy: engines listen on this node.
        on_change: called from the supervisor's thread when any status changed; must not block.
        gpu_free: memory of this node's GPUs by uuid as last read, None while unknown: then a GPU counts as free when
            its engine is gone. Called from the supervisor's thread; must not block.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        providers: Mapping[str, Provider],
        engine: Callable[[str, str], InstalledEngine | None],
        engine_words: Callable[[str], str],
        weights: Weights,
        http: Http,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
        chooser: random.Random | None = None,
        gpu_free: GpuFree = lambda: None,
    ) -> None:
        dice = chooser or random.Random()
        self._settings = settings
        self._clock = clock
        self._weights = weights
        self._on_change = on_change
        devices = Devices(gpu_free, clock, settings.gpu_wait_s)
        ports = Ports(clock, dice)
        self._tools = Tools(settings, providers, engine, engine_words, weights, http, clock, ports, dice, devices)
        self._mailbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._replicas: dict[str, Replica] = {}
        self._leftovers: list[str] = []
        self._awaited: list[tuple[Callable[[], bool], threading.Event]] = []
        self._snapshot: tuple[ReplicaStatus, ...] = ()
        self._epoch = -1
        self._closing = False
        self._next_collection = 0.0
        self._end = threading.Event()
        self._adopted = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._own, name="supervisor", daemon=True)
        weights.on_change = self.poke

    # -- what others call

    def start(self) -> None:
        """Adopt what an earlier agent left, then go to work. Returns when the adopted engines have had their say.

        Raises:
            FileError: the work directory cannot be used.
            ReplicaError: it cannot be known what runs already.
        """
        handles.make_replica_dir(self._settings.work_dir / "replicas")
        self._thread.start()
        self._clock.wait(self._adopted, 60.0)
        if self._failure is not None:
            raise ReplicaError(
                "cannot look for the engines an earlier agent left",
                cause=f"{type(self._failure).__name__}: {self._failure}",
                hint="nothing is started before that is known: a second engine could be started for one replica",
            ) from self._failure

    def set_desired(self, replicas: Sequence[ReplicaSpec], epoch: int) -> None:
        """Take the full desired set; returns at once. A set with an older epoch than one seen before is ignored."""
        wanted = tuple(replicas)
        self._mailbox.put(lambda: self._desire(wanted, epoch))

    def poke(self) -> None:
        """Look again now: an engine or a model may have become ready."""
        self._mailbox.put(self._look_again)

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """What is to be said of each replica, as of a moment ago."""
        return self._snapshot

    def logs(self, replica_id: str, lines: int, previous: bool = False) -> list[str]:
        """The last lines of a replica's log, or of its previous run's.

        Raises:
            ReplicaError: this node has no such log.
        """
        return logs.tail(self._log(replica_id, previous), min(lines, self._settings.log_lines))

    def follow(self, replica_id: str, lines: int, cursor: str = "") -> Piece:
        """The last lines of a replica's log and a cursor; with a cursor, what has been written since.

        Raises:
            ReplicaError: this node has no such log.
        """
        path = self._log(replica_id, previous=False)
        if cursor:
            return logs.follow(path.parent, cursor)
        return logs.tail_with_cursor(path, min(lines, self._settings.log_lines))

    def _log(self, replica_id: str, previous: bool) -> Path:
        path = handles.replica_dir(self._settings.work_dir, replica_id) / (logs.PREVIOUS if previous else logs.CURRENT)
        if not path.exists():
            run = "previous run" if previous else "run"
            raise ReplicaError(f"this node has no log of a {run} of `{replica_id}`")
        return path

    def stop_all(self) -> tuple[str, ...]:
        """Stop every engine, and start none any more. Waits for it.

        Returns:
            Words about each engine that could not be stopped; empty when all are gone.
        """
        gone = threading.Event()
        self._mailbox.put(lambda: self._close(gone))
        self._clock.wait(gone, self._settings.stop_timeout_s + 15.0)
        left = [each for each in self._snapshot if each.pid is not None]
        return tuple(f"`{each.replica_id}`: {each.words}" for each in left)

    def detach(self) -> None:
        """End the threads and leave the engines running: the next supervisor of this work directory adopts them."""
        self._end.set()
        self.poke()
        if self._thread.ident is not None:
            self._thread.join(30.0)
        self._weights.stop()

    # -- the owner thread

    def _own(self) -> None:
        try:
            self._adopt()
        except Exception as error:
            self._failure = error
            self._adopted.set()
            return
        due = 0.0
        while not self._end.is_set():
            try:
                busy = any(replica.run is not None and replica.run.stopping for replica in self._replicas.values())
                message = self._mailbox.get(timeout=_BUSY_TICK_S if busy else _TICK_S)
            except queue.Empty:
                message = None
            if message is not None:
                self._guard(message)
            # a mailbox that never empties must not keep the replicas from being looked at
            if self._mailbox.empty() or self._clock.monotonic() >= due:
                self._step_all()
                due = self._clock.monotonic() + _TICK_S
        watches = [replica.run.watch for replica in self._replicas.values() if replica.run is not None]
        for replica in self._replicas.values():
            replica.let_go()
        for watch in watches:
            watch.join(10.0)

    def _guard(self, message: Message) -> None:
        try:
            message()
        except Exception:  # the thread that owns every engine must not end; the next full set says it all again
            _LOG.exception("a message to the supervisor, or its call back, failed")

    def _step_all(self) -> None:
        self._sweep_leftovers()
        # removals first: they free what the others wait for
        for replica in sorted(self._replicas.values(), key=lambda each: each.spec is not None):
            try:
                replica.step()
            except LlmgwError as error:
                replica.broke(error)
            except Exception as error:
                _LOG.exception("`%s`: a step failed", replica.replica_id)
                replica.broke(error)
        now = self._clock.monotonic()
        if self._epoch >= 0 and now >= self._next_collection:  # before the server's word everything may be wanted
            self._next_collection = now + _COLLECT_EVERY_S
            litter.collect(self._settings.work_dir, self._replicas, self._clock.now())
        for replica_id, replica in list(self._replicas.items()):
            if replica.run is None and replica.stopped_at is not None and now - replica.stopped_at > _KEEP_STOPPED_S:
                del self._replicas[replica_id]
        changed = [replica for replica in self._replicas.values() if replica.changed]
        before = len(self._snapshot)
        self._snapshot = tuple(replica.status() for _, replica in sorted(self._replicas.items()))
        for replica in changed:
            replica.changed = False
        if changed or len(self._snapshot) != before:
            self._guard(self._on_change)
        for condition, event in list(self._awaited):
            if condition():
                self._awaited.remove((condition, event))
                event.set()

    def _desire(self, wanted: Sequence[ReplicaSpec], epoch: int) -> None:
        if self._closing:
            return
        if epoch < self._epoch:
            _LOG.warning("a desired set of epoch %d came after one of %d: ignored", epoch, self._epoch)
            return
        self._epoch = epoch
        newest: dict[str, ReplicaSpec] = {}
        for spec in wanted:
            held = newest.get(spec.replica_id)
            if held is None or spec.epoch > held.epoch:
                newest[spec.replica_id] = spec
        for replica_id, replica in self._replicas.items():
            if replica_id not in newest:
                replica.want(None)
        for replica_id, spec in newest.items():
            self._replica(replica_id).want(spec)

    def _look_again(self) -> None:
        for replica in self._replicas.values():
            replica.look_again()

    def _close(self, gone: threading.Event) -> None:
        self._closing = True
        for replica in self._replicas.values():
            replica.want(None)
        self._awaited.append((lambda: all(each.run is None for each in self._replicas.values()), gone))

    def _adopt(self) -> None:
        found = adopt.find(self._settings.work_dir)
        self._leftovers.extend(found.orphans)
        waiting: set[str] = set()
        for engine in sorted(found.survivors, key=lambda each: -each.handle.epoch):
            replica = self._replica(engine.handle.replica_id)
            if replica.run is None:
                replica.adopt(engine)
                waiting.add(engine.handle.replica_id)
            else:  # two engines of one replica: the higher epoch stays; the other carries our marker
                self._leftovers.append(engine.handle.marker)
                engine.child.close()
        for each in found.gone:
            self._note_gone(each)
        until = self._clock.monotonic() + _FIRST_ANSWERS_S
        self._awaited.append((lambda: self._clock.monotonic() >= until or not self._silent(waiting), self._adopted))

    def _silent(self, replica_ids: set[str]) -> list[str]:
        """Which of the adopted engines that were ready have not been heard of yet."""
        runs = ((name, self._replicas[name].run) for name in replica_ids)
        return [name for name, run in runs if run and run.handle.ready and not (run.proven or run.misses)]

    def _note_gone(self, gone: Gone) -> None:
        _LOG.warning("`%s`: %s", gone.handle.replica_id, gone.words)
        if gone.leftovers:
            self._leftovers.append(gone.handle.marker)
        replica = self._replica(gone.handle.replica_id)
        if replica.run is None:
            replica.note_gone(gone)

    def _sweep_leftovers(self) -> None:
        """End processes of engines whose leader is gone: they carry our marker and hold a GPU for nothing."""
        for marker in list(self._leftovers):
            found = procs.find_marked(marker)
            if not found:
                self._leftovers.remove(marker)
            for stat in found:
                signal_if_same(stat, signal.SIGKILL)

    def _replica(self, replica_id: str) -> Replica:
        if replica_id not in self._replicas:
            self._replicas[replica_id] = Replica(replica_id, self._tools, self._heard, self._blocked)
        return self._replicas[replica_id]

    def _heard(self, watch: Watch, check: Check) -> None:
        def tell() -> None:
            for replica in self._replicas.values():
                replica.heard(watch, check)

        self._mailbox.put(tell)

    def _blocked(self, asking: Replica, spec: ReplicaSpec) -> str:
        """Words when one of the GPUs is still being left by another replica's engine."""
        for other in self._replicas.values():
            if other is asking or other.run is None:
                continue
            leaving = other.run.stopping is not None or other.spec is None
            if leaving and set(other.run.handle.gpus) & set(spec.gpus):
                return f"waiting until `{other.replica_id}` has left its GPU"
        return ""
