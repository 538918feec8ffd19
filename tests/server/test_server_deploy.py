"""The reconciler with fake agents: what each is told, what the gateway is told, and what survives a new server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from domain_views import engine, node, status
from server_fakes import LLAMA, FakeAgent, Plane, eventually

from llmgw.domain.engines import EngineSpec, EngineState
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaState, ReplicaStatus
from llmgw.domain.report import NodeReport
from llmgw.errors import UsageError

QWEN = Profile("qwen", "/m.gguf")
READY = ReplicaState.READY


def report(*replicas: ReplicaStatus, **more: object) -> NodeReport:
    made = node(replicas=replicas, **more).report  # type: ignore[arg-type]
    assert made is not None
    return made


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    yield made
    made.close()


def settled(plane: Plane) -> None:
    """Past the time in which a new server moves nothing."""
    plane.pass_time(16)


def test_an_agent_is_told_everything_upon_admission_and_again_only_when_it_changes(plane: Plane) -> None:
    agent = plane.join("n1")
    plane.deploy.pass_once()
    assert [(item.engines, item.replicas) for item in agent.sent] == [((LLAMA,), ())]
    plane.deploy.pass_once()
    assert len(agent.sent) == 1
    again = plane.join("n1", instance_id="i2")
    plane.deploy.pass_once()
    assert len(again.sent) == 1
    assert again.sent[0].generation > agent.sent[0].generation
    assert again.sent[0].epoch == plane.state.epoch


def test_an_engine_for_some_nodes_goes_to_those_only(tmp_path: Path) -> None:
    plane = Plane(tmp_path, engines=(LLAMA, EngineSpec("vllm", "1", {"gpu": "yes"})))
    one, two = plane.join("n1"), plane.join("n2")
    labelled = node(labels={"gpu": "yes"}).facts
    plane.fleet.reported("n1", evolve(report(), facts=labelled))
    plane.deploy.pass_once()
    assert [spec.name for spec in one.sent[-1].engines] == ["llama.cpp", "vllm"]
    assert [spec.name for spec in two.sent[-1].engines] == ["llama.cpp"]
    plane.close()


def test_a_refused_replica_is_placed_with_the_very_report_that_makes_it_possible(plane: Plane) -> None:
    agent = plane.join("n1")
    words = "installing: 5 MB of 30 MB"
    plane.fleet.reported("n1", report(engines=(engine(EngineState.INSTALLING, words),)))
    plane.deploy.apply(QWEN)
    stands = plane.deploy.pass_once().standings[0]
    assert stands.state == "refused"
    assert stands.refusal is not None
    assert stands.refusal.lines() == ("no node can run `qwen`: its only node refuses", f"n1: {words}")
    assert plane.tables[-1].models[0].refusal == stands.refusal.lines()
    plane.wake.clear()
    plane.fleet.reported("n1", report())
    assert plane.wake.is_set()
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#0", 1)]
    spec = agent.sent[-1].replicas[0]
    assert (spec.model, spec.engine_version, spec.model_name) == ("/m.gguf", "b1", "qwen")
    assert len(spec.api_key) > 20


def test_a_ready_replica_becomes_a_route_and_its_death_the_models_words(plane: Plane) -> None:
    plane.join("n1")
    plane.fleet.reported("n1", report())
    plane.deploy.apply(QWEN)
    plane.deploy.pass_once()
    assert plane.tables[-1].models[0].state == "loading"
    plane.fleet.reported("n1", report(status("qwen#0", 1, READY, port=9009)))
    plane.deploy.pass_once()
    model = plane.tables[-1].models[0]
    assert (model.state, model.endpoints) == ("ready", ("/v1/chat/completions",))
    assert [(item.port, item.ready) for item in model.replicas] == [(9009, True)]
    count = len(plane.tables)
    plane.deploy.pass_once()
    assert len(plane.tables) == count
    plane.fleet.reported("n1", report(status("qwen#0", 1, ReplicaState.FAILED, "was killed by SIGKILL")))
    plane.deploy.pass_once()
    model = plane.tables[-1].models[0]
    assert (model.state, model.words) == ("failed", "replica qwen#0 on node n1: was killed by SIGKILL")
    assert not any(item.ready for item in model.replicas)


def test_a_lost_nodes_replica_is_placed_elsewhere_under_a_higher_epoch_and_the_old_node_drops_it(plane: Plane) -> None:
    one = plane.join("n1")
    plane.fleet.reported("n1", report())
    plane.deploy.apply(QWEN)
    plane.deploy.pass_once()
    two, three = plane.join("n2"), plane.join("n3")
    others = (("n2", report()), ("n3", report()))
    plane.pass_time(14, *others)
    assert two.replicas() == []
    plane.pass_time(8, *others)
    assert [two.replicas(), three.replicas()] == [[("qwen#0", 2)], []]
    plane.fleet.reported("n1", report(status("qwen#0", 1, READY)))
    plane.deploy.pass_once()
    assert one.replicas() == []
    assert [item.ready for item in plane.tables[-1].models[0].replicas] == []


def test_nothing_moves_in_the_first_beats_of_a_server(plane: Plane) -> None:
    plane.join("n1")
    plane.fleet.reported("n1", report())
    plane.deploy.apply(QWEN)
    plane.deploy.pass_once()
    plane.fleet.left("n1", "i1", "gone")
    plane.join("n2")
    plane.clock.pass_time(4)
    plane.pass_time(10, ("n2", report()))
    assert plane.deploy.outlook().standings[0].replicas[0].assignment.node_id == "n1"


def test_nothing_moves_after_the_server_itself_stood_still(plane: Plane) -> None:
    plane.join("n1")
    two = plane.join("n2")
    for name in ("n1", "n2"):
        plane.fleet.reported(name, report())
    plane.deploy.apply(QWEN)
    settled(plane)
    plane.pass_time(3, ("n1", report()), ("n2", report()))
    plane.clock.pass_time(60)
    plane.fleet.reported("n2", report())
    plane.deploy.pass_once()
    assert two.replicas() == []
    plane.pass_time(40, ("n2", report()))
    assert two.replicas() == []
    words = plane.deploy.outlook().standings[0].replicas[0].own_words
    assert words.startswith("stale: no report since this server stood still, 40s ago")
    assert any(item.words.startswith("stood still for 1m") for item in plane.events.since(0))
    plane.pass_time(6, ("n2", report()))
    assert two.replicas() == [("qwen#0", 2)]


def test_most_of_the_fleet_silent_at_once_moves_nothing(plane: Plane) -> None:
    names = ["n1", "n2", "n3"]
    agents = {name: plane.join(name) for name in names}
    everyone = [(name, report()) for name in names]
    plane.deploy.apply(evolve(QWEN, replicas=2))
    plane.pass_time(20, *everyone)
    plane.pass_time(30, ("n3", report()))
    assert agents["n3"].replicas() == []
    assert "2 of 3 nodes are silent at once" in plane.deploy.outlook().standings[0].note


def test_a_changed_profile_rolls_one_replica_at_a_time(plane: Plane) -> None:
    agent = plane.join("n1")
    plane.fleet.reported("n1", report())
    plane.deploy.apply(evolve(QWEN, replicas=2))
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#0", 1), ("qwen#1", 2)]
    plane.fleet.reported("n1", report(status("qwen#0", 1, READY), status("qwen#1", 2, READY, port=9001)))
    plane.deploy.apply(evolve(QWEN, replicas=2, context=8192))
    plane.deploy.pass_once()
    plane.deploy.pass_once()
    both = (status("qwen#0", 1, READY), status("qwen#1", 2, READY, port=9001))
    assert agent.replicas() == [("qwen#0", 1), ("qwen#1", 2), ("qwen#2", 3)]
    plane.fleet.reported("n1", report(*both, status("qwen#2", 3, ReplicaState.LOADING)))
    plane.deploy.pass_once()
    assert len(agent.replicas()) == 3
    plane.fleet.reported("n1", report(*both, status("qwen#2", 3, READY, port=9002)))
    plane.deploy.pass_once()
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#1", 2), ("qwen#2", 3)]
    assert "is replaced when qwen#0 on node n1 has stopped" in plane.deploy.outlook().standings[0].note
    plane.fleet.reported("n1", report(both[1], status("qwen#2", 3, READY, port=9002)))
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#0", 4), ("qwen#1", 2), ("qwen#2", 3)]
    plane.fleet.reported("n1", report(status("qwen#0", 4, READY), both[1], status("qwen#2", 3, READY, port=9002)))
    plane.deploy.pass_once()
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#0", 4), ("qwen#2", 3)]
    assert plane.state.assignments() == tuple(plane.deploy._assignments[name] for name in ("qwen#0", "qwen#2"))


def test_scaling_down_and_deleting_take_replicas_back(plane: Plane) -> None:
    agent = plane.join("n1")
    plane.fleet.reported("n1", report())
    plane.deploy.apply(evolve(QWEN, replicas=2))
    plane.deploy.pass_once()
    plane.deploy.apply(QWEN)
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#0", 1)]
    assert plane.deploy.delete("qwen") is True
    assert plane.deploy.delete("qwen") is False
    plane.deploy.pass_once()
    assert agent.replicas() == []
    assert plane.tables[-1].models == ()
    assert plane.state.assignments() == ()


def test_a_new_server_keeps_assignments_keys_and_routes_under_a_higher_fencing_epoch(tmp_path: Path) -> None:
    before = Plane(tmp_path)
    agent = before.join("n1")
    before.fleet.reported("n1", report())
    before.deploy.apply(QWEN)
    before.deploy.pass_once()
    before.fleet.reported("n1", report(status("qwen#0", 1, READY, port=9009)))
    before.deploy.pass_once()
    before.close()

    after = Plane(tmp_path)
    after.deploy.pass_once()
    assert [(item.port, item.ready) for item in after.tables[0].models[0].replicas] == [(9009, True)]
    again = after.join("n1")
    after.deploy.pass_once()
    assert again.sent[0].replicas == agent.sent[-1].replicas
    assert again.sent[0].epoch == agent.sent[-1].epoch + 1
    after.close()


def test_a_name_or_alias_in_use_is_refused(plane: Plane) -> None:
    plane.deploy.apply(evolve(QWEN, aliases=("q",)))
    with pytest.raises(UsageError, match="profile `qwen` is called `q` already"):
        plane.deploy.apply(Profile("q", "m"))
    with pytest.raises(UsageError):
        plane.deploy.apply(Profile("other", "m", aliases=("qwen",)))
    assert plane.deploy.apply(evolve(QWEN, aliases=("q",))) is False


def test_the_thread_reconciles_when_it_is_woken_and_settle_waits_for_it(plane: Plane) -> None:
    plane.deploy.start()
    agent = plane.join("n1")
    plane.fleet.reported("n1", report())
    plane.deploy.apply(QWEN)
    assert plane.deploy.settle()
    eventually(lambda: agent.sent and agent.replicas() == [("qwen#0", 1)], "the replica to be sent")


def test_an_agent_that_cannot_be_told_is_told_again(plane: Plane) -> None:
    class Deaf(FakeAgent):
        def send_desired(self, desired: object) -> None:
            raise UsageError("too long")

    plane.join("n1", Deaf())
    plane.deploy.pass_once()
    agent = plane.join("n1")
    plane.deploy.pass_once()
    assert len(agent.sent) == 1


def test_a_heartbeat_never_reaches_the_database(plane: Plane) -> None:
    plane.join("n1")
    plane.fleet.reported("n1", report())
    plane.deploy.apply(QWEN)
    plane.deploy.pass_once()
    plane.fleet.reported("n1", report(status("qwen#0", 1, READY)))
    plane.deploy.pass_once()
    statements: list[str] = []
    plane.state._db.set_trace_callback(statements.append)
    for seq in range(5):
        plane.fleet.reported("n1", evolve(report(status("qwen#0", 1, READY)), seq=seq))
        plane.deploy.pass_once()
    plane.state._db.set_trace_callback(None)
    assert statements == []
