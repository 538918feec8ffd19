"""Ending an engine so that nothing of it is left: TERM, again where that helps, KILL, sweep, reap."""

from __future__ import annotations

import signal

from llmgw.agent.child import Child, Ended
from llmgw.units import format_duration

_GRACE_S = 5.0
_KILL_AGAIN_S = 0.1
_UNKILLABLE_S = 10.0


class Stopping:
    """One engine on its way out; `step` is called until it returns how the engine ended.

    Args:
        now: monotonic seconds.
        stop_timeout_s: from the first SIGTERM to SIGKILL.
        term_twice: a second SIGTERM makes the engine leave at once, its open requests notwithstanding. It is sent after
            a short grace: sent together with the first it would cut answers that are nearly done.
    """

    def __init__(self, child: Child, now: float, stop_timeout_s: float, term_twice: bool) -> None:
        self._child = child
        self._began = now
        self._second_at = now + min(_GRACE_S, stop_timeout_s / 2) if term_twice else None
        self._kill_at = now + stop_timeout_s
        self._killed_since: float | None = None
        self._next_kill = now
        self.words = "stopping"
        if child.ended() is None:
            child.signal_group(signal.SIGTERM)

    def step(self, now: float) -> Ended | None:
        """Go on; None while anything of the engine is alive."""
        ended = self._child.ended()
        if ended is None and now < self._kill_at:
            if self._second_at is not None and now >= self._second_at:
                self._second_at = None
                self._child.signal_group(signal.SIGTERM)
            return None
        if now < self._next_kill:
            return None
        if ended is not None and not self._child.members():
            self._child.reap()
            return ended
        self._kill(now, outstayed=ended is None)
        return None

    def _kill(self, now: float, *, outstayed: bool) -> None:
        """SIGKILL to all of it, again and again: a process may have been forked while the list was made."""
        self._next_kill = now + _KILL_AGAIN_S
        if self._killed_since is None:
            self._killed_since = now
            what = "it did not stop within " + format_duration(now - self._began) if outstayed else "it left processes"
            self.words = f"killing: {what}"
        self._child.signal_all(signal.SIGKILL)
        if now - self._killed_since >= _UNKILLABLE_S:
            pids = ", ".join(str(stat.pid) for stat in self._child.members())
            self.words = (
                f"cannot be killed: process {pids} is in the kernel (a hung disk or GPU); its memory stays in use "
                "until it returns or the node is restarted"
            )
