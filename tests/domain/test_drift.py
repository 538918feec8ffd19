"""Wanted against there: removals first, looks next, installations last; unknown changes nothing."""

from __future__ import annotations

import attrs
import pytest

from llmgw.domain.drift import (
    COLLECT_AFTER_S,
    FULL_S,
    LONGEST_RETRY_S,
    RECHECK_S,
    Collect,
    Held,
    Install,
    Named,
    ProbeNamed,
    Recheck,
    Retry,
    drift,
    next_due,
    next_retry,
    serves,
    unused,
)
from llmgw.domain.engines import EngineSpec, InstalledEngine

NOW = 1_700_000_000.0
ENGINE = InstalledEngine("llama.cpp", "b1", "cpu", "/e", "/e/llama-server")
OLD = attrs.evolve(ENGINE, version="b0")
SPEC = EngineSpec("llama.cpp", "b1")
FRESH = Held(ENGINE, checked_at=NOW - 1)
KEY = ("llama.cpp", "b1")


def decide(desired=(SPEC,), held=(), named=(), retries=None, in_use=frozenset(), now=NOW):  # type: ignore[no-untyped-def]
    return drift(desired, held, named, retries or {}, in_use, now)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({}, (Install(SPEC),)),
        ({"desired": None}, ()),
        ({"held": (FRESH,)}, ()),
        ({"held": (Held(ENGINE),)}, (Recheck(ENGINE),)),
        ({"held": (Held(ENGINE, checked_at=NOW - RECHECK_S),)}, (Recheck(ENGINE, full=True),)),
        ({"held": (Held(ENGINE, NOW - RECHECK_S, hashed_at=NOW - RECHECK_S),)}, (Recheck(ENGINE),)),
        ({"held": (Held(ENGINE, NOW - RECHECK_S, hashed_at=NOW - FULL_S),)}, (Recheck(ENGINE, full=True),)),
        ({"held": (Held(ENGINE, NOW - 1, broken=True),)}, (Install(SPEC),)),
        ({"held": (Held(ENGINE, NOW - RECHECK_S, broken=True),), "retries": {KEY: Retry(1, NOW + 5)}}, ()),
        ({"retries": {KEY: Retry(3, NOW + 0.1)}}, ()),
        ({"retries": {KEY: Retry(3, NOW)}}, (Install(SPEC),)),
        ({"named": (Named("llama.cpp"),)}, (ProbeNamed("llama.cpp"),)),
        ({"named": (Named("llama.cpp", NOW - 1, usable=True),)}, ()),
        ({"named": (Named("llama.cpp", NOW - RECHECK_S, usable=True),)}, (ProbeNamed("llama.cpp"),)),
        ({"named": (Named("llama.cpp", NOW - RECHECK_S),), "retries": {("llama.cpp", ""): Retry(1, NOW + 1)}}, ()),
        (
            {"named": (Named("llama.cpp", NOW - 1),), "retries": {("llama.cpp", ""): Retry(1, NOW)}},
            (ProbeNamed("llama.cpp"),),
        ),
    ],
)
def test_each_situation_has_its_actions(case: dict[str, object], expected: tuple[object, ...]) -> None:
    assert decide(**case) == expected


def test_removals_come_first_and_spare_what_is_used() -> None:
    held = (Held(OLD, NOW - 1, unused_since=NOW - COLLECT_AFTER_S), Held(ENGINE))
    assert decide(held=held) == (Collect(OLD), Recheck(ENGINE))
    assert decide(held=held, in_use=frozenset({("llama.cpp", "b0")})) == (Recheck(ENGINE),)


def test_an_unused_engine_is_kept_for_a_while() -> None:
    held = (Held(OLD, NOW - 1, unused_since=NOW - COLLECT_AFTER_S + 1), FRESH)
    assert decide(held=held) == ()


def test_another_build_than_the_allowed_ones_does_not_serve() -> None:
    vulkan = attrs.evolve(SPEC, builds=("vulkan",))
    assert not serves(ENGINE, vulkan)
    assert serves(attrs.evolve(ENGINE, build="cuda-13.3"), attrs.evolve(SPEC, builds=("cuda",)))
    assert decide(desired=(vulkan,), held=(FRESH,)) == (Install(vulkan),)


def test_unused_counts_from_the_first_moment_nothing_wanted_it() -> None:
    assert unused(FRESH, (SPEC,), frozenset(), NOW) is None
    assert unused(FRESH, None, frozenset(), NOW) is None
    assert unused(FRESH, (), frozenset({KEY}), NOW) is None
    assert unused(FRESH, (), frozenset(), NOW) == NOW
    assert unused(attrs.evolve(FRESH, unused_since=NOW - 9), (), frozenset(), NOW) == NOW - 9


def test_retries_double_with_jitter_up_to_a_limit() -> None:
    retry = None
    waits = []
    for _ in range(12):
        retry = next_retry(retry, NOW, 1.0)
        waits.append(retry.at - NOW)
    assert waits[:4] == [10.0, 20.0, 40.0, 80.0]
    assert waits[-1] == LONGEST_RETRY_S
    assert next_retry(None, NOW, 0.0).at == NOW + 5.0
    assert next_retry(None, NOW, 0.5, retry_after_s=3000.0).at == NOW + 3000.0


def test_the_next_moment_is_the_earliest_of_all() -> None:
    assert next_due((), (), {}, NOW) is None
    assert next_due((FRESH,), (), {}, NOW) == RECHECK_S - 1
    assert next_due((FRESH,), (Named("vllm", NOW - 100, usable=True),), {KEY: Retry(1, NOW + 3)}, NOW) == 3.0
    assert next_due((), (), {KEY: Retry(1, NOW - 3)}, NOW) == 0.0


def test_the_interval_between_two_looks_is_a_setting() -> None:
    held = (Held(ENGINE, checked_at=NOW - 5, hashed_at=NOW),)
    assert drift((SPEC,), held, (), {}, frozenset(), NOW, recheck_s=5.0) == (Recheck(ENGINE),)
    assert next_due(held, (), {}, NOW - 2, recheck_s=5.0) == 2.0
