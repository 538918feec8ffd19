"""The rule of the balance: fewest in flight by slots, turns on ties, no replica twice, the last never ejected."""

from __future__ import annotations

from random import Random

import pytest

from llmgw.domain.routing import PickReason, PickWhy, RouteModel, RouteReplica, choose, pick, rows_of, usual


def replica(name: str, slots: int = 4, ready: bool = True) -> RouteReplica:
    return RouteReplica(name, f"node-{name}", "127.0.0.1", 1, slots, ready)


def model(*replicas: RouteReplica) -> RouteModel:
    return RouteModel("m", (), "llama.cpp", "ready", "", None, (), replicas)


A, B, C = replica("a"), replica("b"), replica("c")


@pytest.mark.parametrize(
    ("replicas", "in_flight", "tried", "ejected", "chosen"),
    [
        ((A, B), {"a": 2, "b": 1}, (), (), "b"),
        ((A, B), {"a": 1}, (), (), "b"),
        ((replica("a", 8), replica("b", 2)), {"a": 3, "b": 1}, (), (), "a"),
        ((replica("a", 8), replica("b", 2)), {"a": 5, "b": 1}, (), (), "b"),
        ((A, replica("b", ready=False)), {"a": 3}, (), (), "a"),
        ((A, B), {"b": 3}, ("a",), (), "b"),
        ((A, B), {"b": 3}, (), ("a",), "b"),
        ((A, B), {}, ("b",), ("a",), "a"),
        ((A,), {}, (), ("a",), "a"),
        ((A, B, C), {"a": 1, "b": 1, "c": 1}, (), ("a", "b", "c"), "b"),
        ((replica("a", 0),), {}, (), (), "a"),
    ],
)
def test_the_least_loaded_usable_replica_is_chosen(replicas, in_flight, tried, ejected, chosen):
    picked = pick(model(*replicas), in_flight, tried, ejected, turn=1)
    assert picked.replica is not None
    assert (picked.replica.replica_id, picked.why) == (chosen, PickWhy.CHOSEN)


@pytest.mark.parametrize(
    ("replicas", "in_flight", "tried", "why"),
    [
        ((), {}, (), PickWhy.NONE_READY),
        ((replica("a", ready=False),), {}, (), PickWhy.NONE_READY),
        ((A, B), {"a": 4, "b": 4}, (), PickWhy.BUSY),
        ((A, B), {"a": 9, "b": 4}, (), PickWhy.BUSY),
        ((replica("a", 0),), {"a": 1}, (), PickWhy.BUSY),
        ((A, B), {}, ("a", "b"), PickWhy.ALL_TRIED),
        ((A, replica("b", ready=False)), {}, ("a",), PickWhy.ALL_TRIED),
        ((A, B), {"b": 4}, ("a",), PickWhy.BUSY),
    ],
)
def test_nobody_is_chosen_and_it_says_why(replicas, in_flight, tried, why):
    picked = pick(model(*replicas), in_flight, tried)
    assert (picked.replica, picked.why) == (None, why)


def test_an_ejected_replica_is_not_used_while_a_sound_one_is_merely_busy():
    assert pick(model(A, B), {"b": 4}, ejected=("a",)).why is PickWhy.BUSY


def test_equal_replicas_take_turns():
    chosen = [pick(model(A, B, C), {}, turn=turn).replica for turn in range(6)]
    assert [replica.replica_id for replica in chosen if replica] == ["a", "b", "c", "a", "b", "c"]


def test_a_load_of_many_requests_spreads_by_slots():
    replicas, counts = (replica("big", 12), replica("small", 4)), {}
    for turn in range(12):
        picked = pick(model(*replicas), counts, turn=turn).replica
        assert picked is not None
        counts[picked.replica_id] = counts.get(picked.replica_id, 0) + 1
    assert counts == {"big": 9, "small": 3}


def test_the_short_way_for_the_usual_case_chooses_what_the_rule_chooses():
    random = Random(7)
    reasons = set()
    for _ in range(3000):
        replicas = [replica(f"m#{at}", random.choice((0, 1, 4, 16)), random.random() < 0.9) for at in range(20)]
        replicas = replicas[: random.choice((1, 2, 2, 3, 5, 16, 17, 20))]
        rows = rows_of(model(*replicas))
        if not rows[0]:
            continue
        loads = {each.replica_id: random.randrange((each.slots or 1) + 1) for each in replicas}
        prefix, turn = random.choice((b"", random.randbytes(8))), random.randrange(9)
        chosen, _, reason = choose(model(*replicas), loads, turn=turn, prefix=prefix)
        some = {name: load for name, load in loads.items() if load or random.random() < 0.5}
        assert usual(rows, some, turn, prefix) == (None if chosen is None else (chosen, reason))
        reasons.add(reason)
    assert reasons == {None, *PickReason}
