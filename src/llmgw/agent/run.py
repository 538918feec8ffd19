"""One running engine: its process, its health watch, and when it last gave a sign of progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmgw.agent import handles, logs, procs, rotation
from llmgw.agent.child import Child
from llmgw.agent.handles import Handle
from llmgw.agent.health import Check, Health, Watch
from llmgw.agent.stopping import Stopping
from llmgw.system.clock import Clock
from llmgw.system.http import Http

_RSS_STEP = 1 << 20
_LOOK_EVERY_S = 0.5
_BUSY_SHARE = 0.02
MISSES = 3


class Run:
    """What the supervisor knows of one engine process. Only its owner thread touches it.

    Args:
        adopted: it was started by an earlier agent.
    """

    def __init__(
        self,
        handle: Handle,
        child: Child,
        http: Http,
        clock: Clock,
        health_interval_s: float,
        post: Callable[[Watch, Check], None],
        *,
        adopted: bool,
        log_limit_bytes: int,
    ) -> None:
        self.handle = handle
        self.child = child
        self.adopted = adopted
        self.where = Path(handle.dir)
        self.key = handles.read_key(self.where)
        self.watch = Watch(http, handle, child, self.key, clock, health_interval_s, post)
        self.stopping: Stopping | None = None
        self.failure = ""
        self.unfit = ""
        self.doubt = ""
        self.model = ""
        self.proven = False
        self.context: int | None = None
        self.ready_since: float | None = None
        self.misses = 0
        self.last_words = ""
        now = clock.monotonic()
        self.last_progress = now
        self._next_look = now
        self._log_size = logs.size(self.log)
        self._log_limit = log_limit_bytes
        self._rss = 0
        self._cpu: tuple[float, int] | None = None
        self.last_work = now

    @property
    def log(self) -> Path:
        return self.where / logs.CURRENT

    @property
    def address(self) -> str:
        return f"{self.handle.host}:{self.handle.port}"

    def note_check(self, check: Check, now: float) -> None:
        """Count misses and progress; the supervisor makes the words."""
        if check.health in (Health.READY, Health.LOADING):
            self.misses = 0
            self.last_progress = self.last_work = now
        else:
            self.misses += 1
            self.last_words = check.words
        if check.health is Health.READY:
            self.proven, self.unfit = True, ""
            self.context = check.context or self.context
            if self.ready_since is None:
                self.ready_since = now
        elif check.health is Health.NOT_OURS:
            self.unfit = check.words

    def ready_words(self) -> str:
        """What is said of it while it is ready."""
        wanted = self.handle.context
        if self.context is None or self.context >= wanted:
            return f"ready on {self.address}"
        return (
            f"ready on {self.address}; a request gets {self.context} tokens of context, not the {wanted} of the "
            "profile: the engine gives no more, probably since the model is made for no more"
        )

    def look(self, now: float) -> None:
        """Look for signs of progress that need no answer: a growing log, growing memory, work. Rotates the log."""
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        size = logs.size(self.log)
        if size != self._log_size:
            self._log_size, self.last_progress, self.last_work = size, now, now
        rss = procs.read_rss(self.child.pid) or 0
        if rss >= self._rss + _RSS_STEP:
            self._rss, self.last_progress = rss, now
        self._look_for_work(now)
        if rotation.rotate(self.log, self._log_limit):
            self._log_size = logs.size(self.log)

    def _look_for_work(self, now: float) -> None:
        """An engine whose processes use a CPU is at work, whether or not it answers: that is never called dead.

        A long prompt on a small machine, or a kernel being compiled, keeps an engine from answering for minutes.
        """
        if self.misses == 0:
            self._cpu = None
            return
        ticks = sum(procs.read_cpu_ticks(stat.pid) or 0 for stat in self.child.members())
        if self._cpu is None or (ticks - self._cpu[1]) / procs.TICKS_PER_S > _BUSY_SHARE * (
            now - self._cpu[0]
        ):  # what has not been looked at is not idle
            self.last_work = now
        self._cpu = (now, ticks)

    @property
    def watched_work(self) -> bool:
        """Whether its CPU time has been looked at since it began to miss answers."""
        return self._cpu is not None

    def begin_stop(self, now: float, stop_timeout_s: float) -> None:
        """Send it away; go on with `stopping.step`."""
        self.watch.stop()
        self.stopping = Stopping(self.child, now, stop_timeout_s, self.handle.term_twice)

    def ready_for_s(self, now: float) -> float:
        """How long it has been ready, 0 when it never was."""
        return 0.0 if self.ready_since is None else now - self.ready_since

    def let_go(self) -> None:
        """Stop watching and leave the engine alone."""
        self.watch.stop()
        self.child.close()
