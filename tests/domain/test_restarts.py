"""When an engine is started again: tables."""

from __future__ import annotations

import pytest

from llmgw.domain.restarts import EngineExit, GiveUp, Restart, RestartPolicy, decide_restart

POLICY = RestartPolicy(first_s=1.0, longest_s=60.0, budget=10, quiet_s=600.0)


def exits(*ready_s: float, every_s: float = 10.0) -> list[EngineExit]:
    return [EngineExit(at=i * every_s, ready_s=each, words="exited 1") for i, each in enumerate(ready_s)]


@pytest.mark.parametrize(("count", "delay_s"), [(1, 1.0), (2, 2.0), (3, 4.0), (6, 32.0), (7, 60.0), (9, 60.0)])
def test_the_delay_doubles_to_a_limit(count: int, delay_s: float) -> None:
    seen = exits(*[0.0] * count)
    decision = decide_restart(seen, seen[-1].at, 0.5, POLICY)
    assert decision == Restart(seen[-1].at + delay_s, f"exit {count} of 10, then it is given up")


@pytest.mark.parametrize(("jitter", "delay_s"), [(-1.0, 3.0), (0.0, 3.0), (0.5, 4.0), (1.0, 5.0), (9.0, 5.0)])
def test_jitter_spreads_by_a_quarter(jitter: float, delay_s: float) -> None:
    seen = exits(0.0, 0.0, 0.0)
    assert decide_restart(seen, 20.0, jitter, POLICY).at == 20.0 + delay_s


def test_a_delay_that_has_passed_means_now() -> None:
    assert decide_restart(exits(0.0), 1000.0, 0.5, POLICY).at == 1000.0


def test_the_budget_is_of_exits_in_a_row() -> None:
    decision = decide_restart(exits(*[0.0] * 10), 90.0, 0.5, POLICY)
    assert isinstance(decision, GiveUp)
    assert decision.words == (
        "gave up after 10 failed starts within 1m30s; change the profile, or restart the agent, to try again"
    )


def test_short_work_does_not_reset_the_count() -> None:
    assert isinstance(decide_restart(exits(*[599.0] * 10), 90.0, 0.5, POLICY), GiveUp)


def test_quiet_work_starts_the_count_anew() -> None:
    seen = exits(*[0.0] * 9, 600.0)
    assert decide_restart(seen, seen[-1].at, 0.5, POLICY).at == seen[-1].at + 1.0
    seen = exits(*[0.0] * 9, 600.0, 0.0)
    assert decide_restart(seen, seen[-1].at, 0.5, POLICY).at == seen[-1].at + 2.0


def test_no_exit_means_now() -> None:
    assert decide_restart([], 5.0, 0.5).at == 5.0
