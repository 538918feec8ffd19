"""What a plan starts, stops and leaves alone, and how a profile stands."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from domain_views import GIB, QWEN, SPEC, node, status

from llmgw.domain.placement import Refusal
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaSpec, ReplicaState
from llmgw.domain.report import NodeView, Presence
from llmgw.domain.rollout import Assignment, Plan, moves_held, plan, wanted_digest
from llmgw.domain.standing import judge, route

TWO = evolve(QWEN, replicas=2)
READY, FAILED, LOADING = ReplicaState.READY, ReplicaState.FAILED, ReplicaState.LOADING


def given(profile: Profile, index: int, node_id: str, epoch: int = 1, version: str = "b1", **more: Any) -> Assignment:
    spec = ReplicaSpec(
        f"{profile.name}#{index}", epoch, profile.name, profile.name, profile.model, "llama.cpp", version, 1, 1,
        digest=wanted_digest(profile), api_key="secret",
    )  # fmt: skip
    return Assignment(index, node_id, spec, **more)


def planned(profiles: list[Profile], fleet: list[NodeView], given: list[Assignment], held: str = "") -> Plan:
    return plan(profiles, {"llama.cpp": SPEC}, fleet, given, held=held, formats={})


def starts(made: Plan) -> list[tuple[str, int, str]]:
    return [(item.profile.name, item.index, item.placement.node_id) for item in made.starts]


def lost(node_id: str, **more: Any) -> NodeView:
    return node(node_id, presence=Presence.LOST, words="lost: no report for 40 s", **more)


def test_missing_replicas_are_spread_and_a_second_plan_changes_nothing() -> None:
    fleet = [node("a"), node("b")]
    assert starts(planned([TWO], fleet, [])) == [("qwen", 0, "a"), ("qwen", 1, "b")]
    again = planned([TWO], fleet, [given(TWO, 0, "a"), given(TWO, 1, "b")])
    assert (again.starts, again.stops, again.refusals, again.notes) == ((), (), {}, {})


def test_a_refused_replica_keeps_the_refusal_while_the_other_runs() -> None:
    profile = evolve(TWO, memory_bytes=5 * GIB)
    made = planned([profile], [node("a")], [])
    assert starts(made) == [("qwen", 0, "a")]
    assert made.refusals["qwen"].nodes[0].code == "memory"


def test_deleted_profiles_and_surplus_replicas_stop() -> None:
    made = planned([QWEN], [node("a")], [given(TWO, 0, "a"), given(TWO, 1, "a"), given(Profile("old", "m"), 0, "a")])
    assert [stop.words for stop in made.stops] == ["profile `old` was deleted", "`qwen` wants 1 replicas"]
    assert [stop.assignment.spec.replica_id for stop in made.stops] == ["old#0", "qwen#1"]
    assert made.starts == ()


def test_a_replica_of_a_lost_node_moves_unless_moves_are_held() -> None:
    fleet = [lost("a"), node("b"), node("c")]
    made = planned([QWEN], fleet, [given(QWEN, 0, "a")])
    assert starts(made) == [("qwen", 0, "b")]
    made = planned([QWEN], fleet, [given(QWEN, 0, "a")], held="because of the test")
    assert made.starts == ()
    assert made.notes["qwen"] == "replica qwen#0 stays on node a: because of the test"


def test_a_replica_of_a_lost_node_stays_when_nobody_else_takes_it() -> None:
    made = planned([QWEN], [lost("a"), node("b", probed=False)], [given(QWEN, 0, "a")])
    assert (made.starts, made.stops) == ((), ())
    assert made.notes["qwen"] == "replica qwen#0 stays on lost node a: no other node takes it"


def test_a_stale_node_keeps_its_replicas() -> None:
    made = planned([QWEN], [node("a", presence=Presence.STALE, words="stale"), node("b")], [given(QWEN, 0, "a")])
    assert made.starts == ()


def test_nothing_moves_when_most_of_the_fleet_goes_at_once() -> None:
    assigned = [given(QWEN, 0, "a"), given(QWEN, 1, "b")]
    assert moves_held([lost("a"), lost("b"), node("c")], assigned, 0.55).startswith("2 of 3 nodes are silent at once")
    assert moves_held([lost("a"), node("b"), node("c")], assigned, 0.55) == ""
    assert moves_held([lost("x"), lost("y"), node("b"), lost("a"), node("c")], assigned, 0.55) == ""
    stale = node("b", presence=Presence.STALE, words="stale")
    assert moves_held([lost("a"), stale, node("c")], assigned, 0.55) != ""
    assert moves_held([], [], 0.55) == ""


def rolling(old: ReplicaState, new: ReplicaState, words: str = "") -> Plan:
    """Replica 0 was replaced already (epoch 2) and is in state `new`; replica 1 is as before the change."""
    changed = evolve(TWO, context=999)
    fleet = [
        node("a", replicas=(status("qwen#0", 2, new, words),)),
        node("b", replicas=(status("qwen#1", 1, old),)),
    ]
    return planned([changed], fleet, [given(changed, 0, "a", 2), given(TWO, 1, "b")])


def test_a_changed_profile_replaces_serving_replicas_one_at_a_time() -> None:
    changed = evolve(TWO, args=("--x",))
    fleet = [node(name, replicas=(status(f"qwen#{at}", 1, READY),)) for at, name in enumerate("ab")]
    made = planned([changed], fleet, [given(TWO, 0, "a"), given(TWO, 1, "b")])
    assert starts(made) == [("qwen", 2, "a")]
    assert made.starts[0].words == "`qwen` was changed; qwen#0 serves until it is ready"
    assert made.stops == ()
    assert rolling(READY, LOADING).starts == ()
    assert starts(rolling(READY, READY)) == [("qwen", 2, "a")]


def test_a_failed_replacement_holds_the_rest_and_says_so() -> None:
    made = rolling(READY, FAILED, "exited 1: no such model")
    assert made.starts == ()
    assert made.notes["qwen"] == (
        "1 of 2 replicas still run as before, because replica qwen#0 on node a: exited 1: no such model"
    )


def test_replicas_that_serve_nobody_are_replaced_at_once() -> None:
    assert starts(rolling(FAILED, LOADING)) == [("qwen", 1, "b")]


def test_count_aliases_and_memory_need_no_new_process_and_labels_only_where_they_no_longer_match() -> None:
    same = evolve(QWEN, aliases=("q",), memory_bytes=GIB, start_deadline_s=9.0)
    assert wanted_digest(same) == wanted_digest(QWEN)
    assert planned([same], [node("a")], [given(QWEN, 0, "a")]).starts == ()
    labelled = evolve(QWEN, node_selector={"rack": "r1"})
    fleet = [node("a", labels={"rack": "r0"}), node("b", labels={"rack": "r1"})]
    assert starts(planned([labelled], fleet, [given(QWEN, 0, "a")])) == [("qwen", 0, "b")]
    assert planned([labelled], fleet, [given(QWEN, 0, "b")]).starts == ()


def test_a_new_engine_version_waits_until_a_node_has_it() -> None:
    made = planned([QWEN], [node("a", engines=())], [given(QWEN, 0, "a", version="b0")])
    assert made.starts == ()
    assert made.refusals["qwen"].nodes[0].code == "engine-absent"
    assert starts(planned([QWEN], [node("a")], [given(QWEN, 0, "a", version="b0")])) == [("qwen", 0, "a")]


def standing(views: list[NodeView], assigned: list[Assignment], profile: Profile = TWO, refusal: Refusal | None = None):  # type: ignore[no-untyped-def]
    return judge(profile, assigned, {view.node_id: view for view in views}, refusal)


def test_a_failed_replica_is_quoted_word_for_word() -> None:
    view = node("n1", replicas=(status("qwen#0", 1, FAILED, "exited 1: «böse» <tag>"),))
    stands = standing([view], [given(QWEN, 0, "n1")], QWEN)
    assert (stands.state, stands.words) == ("failed", "replica qwen#0 on node n1: exited 1: «böse» <tag>")


def test_words_of_another_epoch_are_not_this_replicas() -> None:
    view = node("n1", replicas=(status("qwen#0", 1, READY),))
    stands = standing([view], [given(QWEN, 0, "n1", 2)], QWEN)
    assert (stands.state, stands.ready) == ("loading", 0)
    assert "sent to the node" in stands.words


def test_ready_counts_and_the_route_carries_address_and_key() -> None:
    views = [node("a", replicas=(status("qwen#0", 1, READY, port=9001, slots=7),)), node("b")]
    stands = standing(views, [given(TWO, 0, "a"), given(TWO, 1, "b")])
    assert (stands.state, stands.words, stands.ready) == ("ready", "1 of 2 replicas ready", 1)
    model = route(stands, ["/v1/chat/completions"], 5)
    assert [(item.host, item.port, item.slots, item.ready, item.key) for item in model.replicas] == [
        ("10.0.0.1", 9001, 7, True, "secret")
    ]


def test_a_refusal_gives_the_model_its_lines() -> None:
    refusal = Refusal("qwen", "no node can run `qwen`: x", ())
    model = route(standing([], [], QWEN, refusal), (), 0)
    assert (model.state, model.words, model.refusal) == ("refused", refusal.words, refusal.lines())


def test_a_replica_on_a_lost_node_is_routed_to_only_when_no_other_serves() -> None:
    gone = lost("a", replicas=(status("qwen#0", 1, READY),))
    there = node("b", replicas=(status("qwen#1", 1, READY),))
    both = route(standing([gone, there], [given(TWO, 0, "a"), given(TWO, 1, "b")]), (), 0)
    assert [item.ready for item in both.replicas] == [False, True]
    alone = standing([gone], [given(QWEN, 0, "a")], QWEN)
    assert [item.ready for item in route(alone, (), 0).replicas] == [True]
    assert alone.ready == 0
    assert alone.words == "replica qwen#0 on node a: lost: no report for 40 s; it said last: ready"


def test_a_new_server_routes_to_where_replicas_served_before_its_nodes_are_back() -> None:
    unseen = NodeView("a", Presence.NEVER, "not seen since this server started 1s ago")
    stands = standing([unseen], [given(QWEN, 0, "a", host="10.0.0.9", port=77)], QWEN)
    assert [(item.host, item.port, item.ready) for item in route(stands, (), 0).replicas] == [("10.0.0.9", 77, True)]
    assert (stands.state, stands.ready) == ("ready", 0)
    assert "not seen since this server started" in stands.words
