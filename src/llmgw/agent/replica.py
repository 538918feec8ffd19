"""The life of one replica on this node: a state machine the supervisor steps; nothing in it waits.

pending -> fetching -> starting -> loading -> ready <-> unresponsive -> draining -> stopped | failed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

from attrs import evolve

from llmgw.agent import logs, procs
from llmgw.agent.adopt import Gone, Survivor
from llmgw.agent.child import Child, Ended
from llmgw.agent.handles import Handle
from llmgw.agent.health import Check, Health, Watch, silence_words
from llmgw.agent.run import MISSES, Run
from llmgw.agent.starting import Tools, forget, save, start_engine
from llmgw.agent.weights import Where, is_missing
from llmgw.domain.engines import Progress
from llmgw.domain.replicas import ReplicaSpec, ReplicaState, ReplicaStatus
from llmgw.domain.restarts import EngineExit, GiveUp, decide_restart
from llmgw.errors import LlmgwError
from llmgw.units import format_duration

_LOG = logging.getLogger("llmgw.agent.replica")
_LOOK_AGAIN_S = 0.25
_FETCHING_LOOK_S = 1.0
_TELLING_LINES = 400
_REPORT_LINES = 20


class Replica:
    """One replica: what is wanted of it, the engine that runs, and the sentence about it.

    Args:
        post: where health watches post to, from their threads.
        blocked: asked before a start; words when it must wait (its GPU is still being left by another).
    """

    def __init__(
        self,
        replica_id: str,
        tools: Tools,
        post: Callable[[Watch, Check], None],
        blocked: Callable[[Replica, ReplicaSpec], str],
    ) -> None:
        self.replica_id = replica_id
        self.spec: ReplicaSpec | None = None
        self.run: Run | None = None
        self.changed = True
        self.stopped_at: float | None = None
        self._tools = tools
        self._post = post
        self._blocked = blocked
        self._told = False
        self._last: Handle | None = None
        self._exits: list[EngineExit] = []
        self._next_at = 0.0
        self._look_at = 0.0
        self._gave_up = ""
        self._restarts = 0
        self._exit_words = ""
        self._last_log: tuple[str, ...] = ()
        self._anew = ""
        self._progress: Progress | None = None
        self._state = ReplicaState.PENDING
        self._words = "not looked at yet"
        self._since = tools.clock.now()

    # -- what others tell it

    def want(self, spec: ReplicaSpec | None) -> None:
        """Take the server's word: this spec, or None for "not here". A word with an older epoch changes nothing."""
        self._told = True
        held = max(self.spec.epoch if self.spec else -1, self.run.handle.epoch if self.run else -1)
        if spec is not None and spec.epoch < held:
            _LOG.warning("`%s`: epoch %d is older than %d: ignored", self.replica_id, spec.epoch, held)
            return
        if spec is not None and (self.spec is None or not _same(spec, self.spec)):
            self._exits.clear()
            self._gave_up, self._next_at = "", 0.0
            if self.spec is not None:
                self._restarts, self._exit_words = 0, ""
        if spec != self.spec:
            self._look_at = 0.0
        self.spec = spec
        if spec is not None:
            self.stopped_at = None

    def look_again(self) -> None:
        """What it waits for may have come."""
        self._look_at = 0.0

    def adopt(self, found: Survivor) -> None:
        """Take over an engine that an earlier agent started. It counts as ready when the watch has proved it."""
        self._last, self._restarts = found.handle, found.handle.restarts
        self._tools.ports.adopt(found.handle.port)
        self._begin(found.handle, found.child, adopted=True)
        if found.handle.ready:
            self._say(ReplicaState.LOADING, f"adopted (pid {found.child.pid}): asking whether it still answers")
        else:
            self._say(ReplicaState.STARTING, f"adopted (pid {found.child.pid}) while it starts")

    def note_gone(self, gone: Gone) -> None:
        """Note that the engine an earlier agent started has ended."""
        self._last, self._restarts = gone.handle, gone.handle.restarts + 1
        self._exit_words = gone.words
        lines = logs.tail(Path(gone.handle.dir) / logs.CURRENT, _TELLING_LINES)
        self._last_log = tuple(lines[-_REPORT_LINES:])
        forget(gone.handle)
        if gone.handle.boot_id == procs.boot_id():
            self._tools.devices.note_left(self.replica_id, gone.handle.gpu_free)
        said = logs.telling(lines, was_ready=gone.handle.ready)
        self._say(ReplicaState.FAILED, f"{gone.words}: {said}" if said else gone.words)

    def heard(self, watch: Watch, check: Check) -> None:
        """Take an answer of the health watch; one of an engine that is gone is dropped."""
        run = self.run
        if run is None or run.watch is not watch or run.stopping is not None:
            return
        was_proven = run.proven
        run.note_check(check, self._tools.clock.monotonic())
        if check.health is Health.READY:
            if not was_proven:
                self._note_ready(run)
            self._say(ReplicaState.READY, run.ready_words())
        elif run.proven or run.handle.ready:
            if check.health is Health.LOADING:
                self._say(ReplicaState.LOADING, f"not ready any more: {check.words}")
            elif run.misses >= MISSES:
                words = silence_words(run.handle, run.misses, check.words, run.child.pid)
                self._say(ReplicaState.UNRESPONSIVE, words, keep=self._state is ReplicaState.UNRESPONSIVE)
        elif check.health is Health.LOADING:
            self._say(ReplicaState.LOADING, f"loading on {run.address} ({check.words})")
        elif check.health is not Health.SILENT:
            self._say(ReplicaState.STARTING, f"starting on {run.address}: {check.words}")

    # -- going on

    def step(self) -> None:
        """Do what is due now."""
        now = self._tools.clock.monotonic()
        run = self.run
        if run is None:
            self._rest(now)
            return
        if run.stopping is None:
            self._judge(run, now)
        if run.stopping is not None:
            ended = run.stopping.step(now)
            if ended is not None:
                self._finish(run, ended, now)
            else:
                self._say_stopping(run)

    def broke(self, error: Exception) -> None:
        """A step failed in a way nobody thought of: say so, and try again later like after a crash."""
        words = error.words() if isinstance(error, LlmgwError) else f"internal error: {type(error).__name__}: {error}"
        hint = f" ({error.hint})" if isinstance(error, LlmgwError) and error.hint else ""
        self._fail(words + hint, 0.0)

    def let_go(self) -> None:
        """Leave the engine running, unwatched."""
        if self.run is not None:
            self.run.let_go()

    def status(self) -> ReplicaStatus:
        """What is to be said of it now."""
        now, monotonic = self._tools.clock.now(), self._tools.clock.monotonic()
        about: ReplicaSpec | Handle | None = self.run.handle if self.run else (self.spec or self._last)
        handle = self.run.handle if self.run else None
        words, next_try = self._words, None
        if self._state is ReplicaState.FAILED and self.run is None and self.spec is not None:
            if self._gave_up:
                words += f"; {self._gave_up}"
            elif math.isfinite(self._next_at):
                left = max(0.0, self._next_at - monotonic)
                next_try = now + left
                words += f"; next try in {format_duration(math.ceil(left))}" if left > 0 else "; trying again now"
        return ReplicaStatus(
            replica_id=self.replica_id,
            epoch=about.epoch if about else 0,
            profile=about.profile if about else "",
            state=self._state,
            words=words,
            since=self._since,
            engine=about.engine if about else "",
            engine_version=about.engine_version if about else "",
            host=handle.host if handle else None,
            port=handle.port if handle else None,
            pid=handle.pid if handle else None,
            slots=about.slots if about else None,
            context=(self.run.context if self.run else None) or (about.context if about else None),
            restarts=self._restarts,
            exit_words=self._exit_words,
            last_log=self._last_log,
            next_try=next_try,
            progress=self._progress,
            digest=about.digest if about else "",
        )

    # -- without an engine

    def _rest(self, now: float) -> None:
        spec = self.spec
        if spec is None:
            if self._told and self.stopped_at is None:
                self.stopped_at = now
                if self._state is not ReplicaState.STOPPED:
                    self._say(ReplicaState.STOPPED, "stopped: no longer wanted here")
            return
        if self._gave_up or now < max(self._next_at, self._look_at):
            return
        self._look_at = now + _LOOK_AGAIN_S
        waiting = self._blocked(self, spec)
        if waiting:
            self._say(ReplicaState.PENDING, waiting)
            return
        if spec.engine not in self._tools.providers:
            self._next_at = math.inf
            self._say(ReplicaState.FAILED, f"this node has no provider `{spec.engine}`")
            return
        engine = self._tools.engine(spec.engine, spec.engine_version)
        if engine is None:
            self._say(ReplicaState.PENDING, self._tools.engine_words(spec.engine))
            return
        model = self._tools.weights.resolve(spec.model)
        if model.where is Where.FETCHING:
            self._look_at = now + _FETCHING_LOOK_S
            self._say(ReplicaState.FETCHING, model.words, progress=model.progress)
            return
        if model.where is Where.FAILED:
            self._next_at = model.retry_at if model.retry_at is not None else now
            self._say(ReplicaState.FAILED, model.words)
            return
        before = f" (before: {self._exit_words})" if self._exit_words else ""
        waiting = self._tools.devices.waiting(spec.gpus)
        if waiting:
            self._say(ReplicaState.PENDING, waiting + before)
            return
        doubt = self._tools.devices.taken(spec.gpus)
        handle, child = start_engine(self._tools, spec, engine, model.path, self._restarts)
        self._tools.devices.note_entered(spec.gpus)
        run = self._begin(handle, child, adopted=False)
        run.doubt, run.model = doubt, model.path
        if doubt:
            _LOG.warning("`%s`: started all the same: %s", self.replica_id, doubt)
            before += f"; {doubt}"
        self._say(ReplicaState.STARTING, f"starting on {handle.host}:{handle.port}{before}")

    def _begin(self, handle: Handle, child: Child, *, adopted: bool) -> Run:
        tools = self._tools
        self._anew = ""
        self.stopped_at = None
        self._last = handle
        run = self.run = Run(
            handle,
            child,
            tools.http,
            tools.clock,
            tools.settings.health_interval_s,
            self._post,
            adopted=adopted,
            log_limit_bytes=tools.settings.log_limit_bytes,
        )
        run.watch.start()
        return run

    # -- with an engine

    def _judge(self, run: Run, now: float) -> None:
        """Look whether the engine has ended, must end, or gives no sign of progress."""
        if run.child.ended() is not None:
            run.failure = "ended"
            run.begin_stop(now, self._tools.settings.stop_timeout_s)
            return
        self._anew = self._why_stop(run)
        if self._anew:
            run.begin_stop(now, self._tools.settings.stop_timeout_s)
            return
        run.look(now)
        deadline = run.handle.start_deadline_s or self._tools.settings.start_deadline_s
        if not run.proven and not run.handle.ready and now - run.last_progress > deadline:
            run.failure = (
                f"no sign of progress for {format_duration(deadline)} while starting (no log line, no growing memory, "
                "no health answer)"
            )
            run.begin_stop(now, self._tools.settings.stop_timeout_s)
            return
        hang_s = self._tools.settings.hang_timeout_s
        if run.proven and run.misses >= MISSES and run.watched_work and now - run.last_work > hang_s:
            run.failure = (
                f"hung: no health answer, no log line and next to no CPU time for {format_duration(hang_s)} "
                f"(`supervisor.hang_timeout`); last: {run.last_words}"
            )
            run.begin_stop(now, self._tools.settings.stop_timeout_s)

    def _why_stop(self, run: Run) -> str:
        """Why the engine must go, in words; "" when it may stay. Before the server's first word everything stays."""
        if not self._told:
            return ""
        if self.spec is None:
            return "no longer wanted here"
        if run.handle.epoch != self.spec.epoch:
            return f"replaced by epoch {self.spec.epoch}"
        if not run.handle.serves(self.spec):
            return "replaced: its settings changed"
        if run.key != self.spec.api_key:
            return "replaced: its API key changed"
        return f"replaced: {run.unfit}" if run.unfit and run.adopted else ""

    def _say_stopping(self, run: Run) -> None:
        assert run.stopping is not None
        if run.failure and run.failure != "ended":
            self._say(ReplicaState.FAILED, f"{run.failure}; {run.stopping.words}")
        elif run.failure:
            self._say(ReplicaState.FAILED, f"the engine ended; {run.stopping.words}")
        else:
            self._say(ReplicaState.DRAINING, f"{run.stopping.words} ({self._anew})")

    def _note_ready(self, run: Run) -> None:
        self._last_log = ()
        run.handle = evolve(run.handle, ready=True, exe=procs.read_exe(run.child.pid) or run.handle.exe)
        self._last = run.handle
        save(run.handle)

    def _finish(self, run: Run, ended: Ended, now: float) -> None:
        """The engine and all of it is gone."""
        run.let_go()
        self.run = None
        forget(run.handle)
        self._tools.ports.give_back(run.handle.port)
        self._tools.devices.note_left(self.replica_id, run.handle.gpu_free)
        exit_words = ended.words()
        self._exit_words = exit_words
        lines = logs.tail(run.log, _TELLING_LINES)
        self._last_log = tuple(lines[-_REPORT_LINES:])
        if not run.failure:
            self._restarts, self._look_at = 0, 0.0
            if self.spec is None:
                self._say(ReplicaState.STOPPED, f"stopped ({exit_words}): {self._anew}")
            else:
                self._say(ReplicaState.PENDING, f"starting anew ({self._anew})")
            self._exit_words = "" if self.spec else exit_words
            return
        self._restarts += 1
        if run.failure != "ended":
            words = run.failure
        else:
            said = logs.telling(lines, was_ready=run.proven)
            if not run.proven and run.model not in said and is_missing(run.model):
                # an engine may lose its last lines when it ends
                said = f"the model `{run.model}` is not on this node"
            words = f"{exit_words}: {said}" if said else exit_words
            if run.proven:
                words = f"ended after {format_duration(run.ready_for_s(now))} of being ready: {words}"
        if run.doubt and not run.proven:
            words += f"; before it was started, {run.doubt}"
        self._fail(words, run.ready_for_s(now), exit_words)

    def _fail(self, words: str, ready_s: float, exit_words: str = "") -> None:
        now = self._tools.clock.monotonic()
        self._exits.append(EngineExit(now, ready_s, exit_words or words))
        decision = decide_restart(self._exits, now, self._tools.random.random(), self._tools.settings.restarts)
        if isinstance(decision, GiveUp):
            self._gave_up = decision.words
        else:
            self._next_at = decision.at
        del self._exits[: -self._tools.settings.restarts.budget]
        self._say(ReplicaState.FAILED, words)

    def _say(self, state: ReplicaState, words: str, progress: Progress | None = None, *, keep: bool = False) -> None:
        """Say it; `keep`: the state goes on, its first sentence stands."""
        if keep and state is self._state:
            return
        if (state, words, progress) == (self._state, self._words, self._progress):
            return
        if state is not self._state:
            self._since = self._tools.clock.now()
            _LOG.info("`%s`: %s: %s", self.replica_id, state.value, words)
        self._state, self._words, self._progress = state, words, progress
        self.changed = True


def _same(one: ReplicaSpec, other: ReplicaSpec) -> bool:
    """Whether two specs ask for the same engine."""
    return (one.epoch, one.digest, one.api_key) == (other.epoch, other.digest, other.api_key)
