"""New ready before old leaves; a drained node is emptied; an engine version that fails is rolled back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve
from domain_views import GIB, QWEN, READY, SPEC, gpu, node, status

from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaSpec, ReplicaState, ReplicaStatus
from llmgw.domain.report import NodeView, Presence
from llmgw.domain.rollout import Assignment, Plan, Rollback, plan, wanted_digest
from llmgw.domain.standing import drain_words, drained, judge

B2 = evolve(SPEC, version="b2")
BOTH = (READY, evolve(READY, version="b2"))
SERVES, FAILED, LOADING = ReplicaState.READY, ReplicaState.FAILED, ReplicaState.LOADING


def given(profile: Profile, index: int, node_id: str, epoch: int, version: str = "b1", **more: Any) -> Assignment:
    spec = ReplicaSpec(
        f"{profile.name}#{index}", epoch, profile.name, profile.name, profile.model, "llama.cpp", version, 1, 1,
        more.pop("gpus", ()), digest=wanted_digest(profile),
    )  # fmt: skip
    return Assignment(index, node_id, spec, **more)


def planned(
    profile: Profile,
    fleet: list[NodeView],
    assigned: list[Assignment],
    *,
    spec: Any = SPEC,
    held: str = "",
    rollbacks: Mapping[str, Rollback] | None = None,
) -> Plan:
    return plan([profile], {"llama.cpp": spec}, fleet, assigned, held=held, formats={}, rollbacks=rollbacks)


def did(made: Plan) -> tuple[list[tuple[str, str]], list[str]]:
    starts = [(f"{item.profile.name}#{item.index}", item.placement.node_id) for item in made.starts]
    return starts, [item.assignment.spec.replica_id for item in made.stops]


def up(replica: str, epoch: int, state: ReplicaState = SERVES, **more: Any) -> ReplicaStatus:
    return status(replica, epoch, state, **more)


def test_a_draining_nodes_replica_leaves_when_its_replacement_elsewhere_is_ready() -> None:
    old = given(QWEN, 0, "a", 1)
    leaving = node("a", draining=True, replicas=(up("qwen#0", 1),))
    made = planned(QWEN, [leaving, node("b")], [old])
    assert did(made) == ([("qwen#1", "b")], [])
    assert made.starts[0].words == "node a is draining; qwen#0 serves until it is ready"
    new = given(QWEN, 1, "b", 2)
    loading = node("b", replicas=(up("qwen#1", 2, LOADING),))
    assert did(planned(QWEN, [leaving, loading], [old, new])) == ([], [])
    ready = node("b", replicas=(up("qwen#1", 2),))
    made = planned(QWEN, [leaving, ready], [old, new])
    assert did(made) == ([], ["qwen#0"])
    assert made.stops[0].words == "node a is draining; another replica serves in its place"
    assert did(planned(QWEN, [leaving, ready], [new])) == ([], [])


def test_a_draining_node_keeps_what_no_other_node_takes_and_says_so() -> None:
    leaving = node("a", draining=True, replicas=(up("qwen#0", 1),))
    made = planned(QWEN, [leaving, node("b", probed=False)], [given(QWEN, 0, "a", 1)])
    assert did(made) == ([], [])
    assert made.notes["qwen"] == "replica qwen#0 stays on draining node a: no other node takes it"
    assert [item.code for item in made.refusals["qwen"].nodes] == ["draining", "not-probed"]


def test_how_far_draining_is_stands_in_one_sentence() -> None:
    held = node("a", draining=True, replicas=(up("qwen#0", 1),))
    assigned = [given(QWEN, 0, "a", 1)]
    assert drain_words(node("a"), assigned) == ""
    assert drain_words(held, assigned) == "draining: 1 replica to move: qwen#0"
    assert drain_words(held, []) == "draining: nothing is assigned to it any more, qwen#0 still stops"
    empty = node("a", draining=True, replicas=(up("qwen#0", 1, ReplicaState.STOPPED),))
    assert drain_words(empty, []).startswith("drained: nothing of llmgw serves here")
    assert (drained(held, assigned), drained(held, []), drained(empty, [])) == (False, False, True)


def test_where_there_is_no_room_for_both_the_old_one_leaves_first() -> None:
    changed = evolve(QWEN, gpus=1)
    one = node("a", gpus=(gpu("g0"),), gpu_free={"g0": 20 * GIB}, engines=(evolve(READY, build="cuda"),),
               replicas=(up("qwen#0", 1),))  # fmt: skip
    made = planned(changed, [one], [given(QWEN, 0, "a", 1, gpus=("g0",))])
    assert did(made) == ([("qwen#0", "a")], [])
    assert made.starts[0].replaces is not None
    assert made.starts[0].words == "`qwen` was changed; no room for both, so the old one stops first"
    assert made.refusals == {}


def test_the_next_replica_waits_until_the_one_before_has_stopped() -> None:
    changed = evolve(QWEN, replicas=2, context=999)
    before = evolve(QWEN, replicas=2)
    fleet = [
        node("a", replicas=(up("qwen#0", 1, ReplicaState.DRAINING), up("qwen#2", 3))),
        node("b", replicas=(up("qwen#1", 2),)),
    ]
    made = planned(changed, fleet, [given(before, 1, "b", 2), given(changed, 2, "a", 3)])
    assert did(made) == ([], [])
    assert made.notes["qwen"] == "the next replica of `qwen` is replaced when qwen#0 on node a has stopped"


def test_scaling_down_takes_lost_and_idle_replicas_first_and_the_last_ones_then() -> None:
    fleet = [
        node("a", replicas=(up("qwen#0", 1), up("qwen#2", 3))),
        node("b", replicas=(up("qwen#1", 2, LOADING),)),
        node("c", presence=Presence.LOST, words="lost"),
    ]
    assigned = [given(QWEN, at, where, at + 1) for at, where in enumerate("abac")]
    assert did(planned(evolve(QWEN, replicas=3), fleet, assigned))[1] == ["qwen#3"]
    assert did(planned(evolve(QWEN, replicas=2), fleet, assigned))[1] == ["qwen#3", "qwen#1"]
    assert did(planned(QWEN, fleet, assigned))[1] == ["qwen#3", "qwen#1", "qwen#2"]
    assert did(planned(evolve(QWEN, replicas=0), fleet, assigned))[1] == ["qwen#3", "qwen#1", "qwen#2", "qwen#0"]


def test_a_replacement_on_its_way_is_not_taken_for_surplus_and_the_old_one_is_counted_once() -> None:
    changed = evolve(QWEN, context=999)
    fleet = [node("a", replicas=(up("qwen#0", 1),)), node("b", replicas=(up("qwen#1", 2),))]
    assigned = [given(QWEN, 0, "a", 1), given(changed, 1, "b", 2)]
    stands = judge(changed, assigned, {item.node_id: item for item in fleet}, None)
    assert (stands.ready, stands.words) == (1, "1 of 1 replica ready")


def upgrade(new: ReplicaStatus | None, rollbacks: Mapping[str, Rollback] | None = None) -> Plan:
    """`b2` is wanted; qwen#0 serves on `b1`, qwen#1 was started on `b2`."""
    assigned = [given(QWEN, 0, "a", 1)]
    here: Sequence[ReplicaStatus] = (up("qwen#0", 1),)
    if new is not None:
        assigned.append(given(QWEN, 1, "a", 2, "b2", before="b1"))
        here = (*here, new)
    return planned(QWEN, [node("a", engines=BOTH, replicas=tuple(here))], assigned, spec=B2, rollbacks=rollbacks)


def test_a_new_engine_version_rolls_beside_the_old_and_remembers_it() -> None:
    made = upgrade(None)
    assert did(made) == ([("qwen#1", "a")], [])
    assert (made.starts[0].placement.engine_version, made.starts[0].before) == ("b2", "b1")
    assert did(upgrade(up("qwen#1", 2, LOADING))) == ([], [])
    assert did(upgrade(up("qwen#1", 2))) == ([], ["qwen#0"])


def test_a_version_that_failed_once_is_tried_again_and_twice_is_rolled_back_in_words() -> None:
    once = upgrade(up("qwen#1", 2, FAILED, words="exited 1", restarts=1, next_try=9.0))
    assert (did(once), once.rollbacks) == (([], []), ())
    twice = upgrade(up("qwen#1", 2, FAILED, words="exited 1: bad model", restarts=2, next_try=9.0))
    assert did(twice) == ([], ["qwen#1"])
    back = twice.rollbacks[0]
    assert (back.bad, back.good) == ("b2", "b1")
    assert back.words.startswith(
        "engine `llama.cpp` b2 did not become ready for `qwen`, which stays with b1: replica qwen#1 on node a: "
        "exited 1: bad model"
    )
    assert twice.notes["qwen"] == back.words


def test_a_rollback_holds_until_version_or_profile_changes() -> None:
    back = Rollback("qwen", "llama.cpp", "b2", "b1", wanted_digest(QWEN), "rolled back")
    made = upgrade(None, {"qwen": back})
    assert (did(made), made.notes) == (([], []), {"qwen": "rolled back"})
    fleet = [node("a", engines=(*BOTH, evolve(READY, version="b3")), replicas=(up("qwen#0", 1),))]
    made = planned(QWEN, fleet, [given(QWEN, 0, "a", 1)], spec=evolve(SPEC, version="b3"), rollbacks={"qwen": back})
    assert made.starts[0].placement.engine_version == "b3"
    changed = evolve(QWEN, context=999)
    made = planned(changed, fleet, [given(QWEN, 0, "a", 1)], spec=B2, rollbacks={"qwen": back})
    assert made.starts[0].placement.engine_version == "b2"


def test_without_room_for_both_a_failed_version_is_replaced_by_the_one_before() -> None:
    failed = up("qwen#0", 2, FAILED, words="exited 1", restarts=2)
    fleet = [node("a", engines=BOTH, replicas=(failed,))]
    made = planned(QWEN, fleet, [given(QWEN, 0, "a", 2, "b2", before="b1")], spec=B2)
    assert did(made) == ([("qwen#0", "a")], [])
    assert made.starts[0].placement.engine_version == "b1"
    assert len(made.rollbacks) == 1


def test_a_lost_replica_that_others_make_up_for_is_given_up_instead_of_moved() -> None:
    changed = evolve(QWEN, context=999)
    fleet = [node("a", presence=Presence.LOST, words="lost"), node("b", replicas=(up("qwen#1", 2),))]
    assert did(planned(changed, fleet, [given(QWEN, 0, "a", 1), given(changed, 1, "b", 2)])) == ([], ["qwen#0"])
