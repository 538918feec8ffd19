"""When an engine that ended is started again, and when that is given up."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from llmgw.units import format_duration


@frozen
class EngineExit:
    """One end of an engine that nobody asked for.

    Args:
        at: when, seconds on the clock of `now`.
        ready_s: how long it had been ready before, 0 when it never was.
        words: how it ended, such as `exited 1`.
    """

    at: float
    ready_s: float
    words: str


@frozen
class RestartPolicy:
    """How patient restarts are.

    Args:
        first_s: delay after the first exit; it doubles with each one that follows.
        longest_s: the delay grows no further.
        budget: exits in a row after which no further start is tried.
        quiet_s: an engine that was ready this long starts the count anew.
    """

    first_s: float = 1.0
    longest_s: float = 300.0
    budget: int = 12
    quiet_s: float = 600.0


@frozen
class Restart:
    """Start again at `at` (seconds on the clock of `now`)."""

    at: float
    words: str


@frozen
class GiveUp:
    """Start no more until a person or the server changes something."""

    words: str


def decide_restart(
    exits: Sequence[EngineExit], now: float, jitter: float, policy: RestartPolicy | None = None
) -> Restart | GiveUp:
    """Decide what follows the last of `exits` (oldest first).

    Args:
        now: seconds, on the clock of the exits.
        jitter: 0 to 1, drawn by the caller; the delay is 75 % to 125 % of its nominal value, so that engines which
            fell together do not rise together.

    Returns:
        Restart, or GiveUp when the budget of exits in a row is spent.
    """
    rules = policy or RestartPolicy()
    streak = _streak(exits, rules.quiet_s)
    if not streak:
        return Restart(now, "starting now")
    if len(streak) >= rules.budget:
        span = format_duration(max(1.0, streak[-1].at - streak[0].at))
        return GiveUp(
            f"gave up after {len(streak)} failed starts within {span}; change the profile, or restart the agent, "
            "to try again"
        )
    nominal = min(rules.longest_s, rules.first_s * 2.0 ** (len(streak) - 1))
    delay = nominal * (0.75 + 0.5 * min(1.0, max(0.0, jitter)))
    return Restart(max(now, streak[-1].at + delay), f"exit {len(streak)} of {rules.budget}, then it is given up")


def _streak(exits: Sequence[EngineExit], quiet_s: float) -> list[EngineExit]:
    """The exits in a row since the engine was last quietly ready."""
    streak: list[EngineExit] = []
    for each in reversed(exits):
        streak.append(each)
        if each.ready_s >= quiet_s:
            break
    return streak[::-1]
