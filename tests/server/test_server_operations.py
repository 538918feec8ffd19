"""Drain, scale, engine versions and events, with fake agents; what survives a new server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from domain_views import READY as ENGINE_READY
from domain_views import node, status
from server_fakes import LLAMA, FakeAgent, FakeClock, Plane

from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaState, ReplicaStatus
from llmgw.domain.report import NodeReport
from llmgw.server.events import KEPT, Event, Events
from llmgw.server.state import open_state

QWEN = Profile("qwen", "/m.gguf")
READY, FAILED = ReplicaState.READY, ReplicaState.FAILED


def report(*replicas: ReplicaStatus, **more: object) -> NodeReport:
    made = node(replicas=replicas, **more).report  # type: ignore[arg-type]
    assert made is not None
    return made


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    yield made
    made.close()


def serving(plane: Plane, node_id: str = "n1") -> FakeAgent:
    """qwen#0 is ready on a node."""
    agent = plane.join(node_id)
    plane.fleet.reported(node_id, report())
    plane.deploy.apply(QWEN)
    plane.deploy.pass_once()
    plane.fleet.reported(node_id, report(status("qwen#0", 1, READY)))
    plane.deploy.pass_once()
    return agent


def told(plane: Plane) -> list[str]:
    return [f"{item.subject} {item.words}" for item in plane.events.since(0)]


def test_draining_moves_replicas_new_ready_before_old_leaves_and_survives_the_server(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    one = serving(plane)
    two = plane.join("n2")
    plane.fleet.reported("n2", report())
    assert plane.deploy.drain("n1", True) is True
    assert plane.deploy.drain("nobody", True) is False
    plane.deploy.pass_once()
    assert (one.replicas(), two.replicas()) == ([("qwen#0", 1)], [("qwen#1", 2)])
    ready = [item.ready for item in plane.tables[-1].models[0].replicas]
    assert ready == [True]
    plane.fleet.reported("n2", report(status("qwen#1", 2, READY)))
    plane.deploy.pass_once()
    assert (one.replicas(), two.replicas()) == ([], [("qwen#1", 2)])
    plane.fleet.reported("n1", report())
    plane.deploy.pass_once()
    assert "n1 is drained: nothing of llmgw serves there any more" in told(plane)
    plane.close()

    again = Plane(tmp_path)
    assert [view.draining for view in again.fleet.views()] == [True, False]
    assert again.deploy.drain("n1", False) is True
    again.close()
    assert open_and_close(tmp_path) == {}


def open_and_close(directory: Path) -> dict[str, float]:
    state = open_state(str(directory / "state.db"))
    draining = state.draining()
    state.close()
    return draining


def test_an_engine_version_is_installed_beside_the_old_rolled_and_rolled_back_for_good(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    serving(plane)
    plane.close()

    newer = evolve(LLAMA, version="b2")
    plane = Plane(tmp_path, engines=(newer,))
    agent = plane.join("n1")
    old, engines = status("qwen#0", 1, READY), (ENGINE_READY, evolve(ENGINE_READY, version="b2"))
    plane.fleet.reported("n1", report(old))
    plane.pass_time(16, ("n1", report(old)))
    assert [spec.version for spec in agent.sent[-1].engines] == ["b2", "b1"]
    assert agent.replicas() == [("qwen#0", 1)], "nothing rolls before the new version was seen to run"
    plane.fleet.reported("n1", report(old, engines=engines))
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#0", 1), ("qwen#1", 2)]
    failed = status("qwen#1", 2, FAILED, "exited 1", restarts=2, port=None)
    plane.fleet.reported("n1", report(old, failed, engines=engines))
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#0", 1)]
    words = "engine `llama.cpp` b2 did not become ready for `qwen`, which stays with b1"
    assert plane.deploy.outlook().standings[0].note.startswith(words)
    assert [item for item in told(plane) if words in item]
    plane.close()

    plane = Plane(tmp_path, engines=(newer,))
    agent = plane.join("n1")
    plane.fleet.reported("n1", report(old, engines=engines))
    plane.pass_time(17, ("n1", report(old, engines=engines)))
    assert agent.replicas() == [("qwen#0", 1)]
    assert [spec.version for spec in agent.sent[-1].engines] == ["b2", "b1"]
    plane.close()


def test_repeated_and_late_reports_change_nothing(plane: Plane) -> None:
    agent = serving(plane)
    sent, tables, last = len(agent.sent), len(plane.tables), plane.events.since(0)[-1].seq
    late = report(status("qwen#0", 1, ReplicaState.LOADING))
    for said in (report(status("qwen#0", 1, READY)),) * 3:
        plane.fleet.reported("n1", said)
        plane.deploy.pass_once()
    assert (len(agent.sent), len(plane.tables), plane.events.since(last)) == (sent, tables, ())
    plane.fleet.reported("n1", late)
    plane.deploy.pass_once()
    plane.fleet.reported("n1", report(status("qwen#0", 7, READY, port=1)))
    plane.deploy.pass_once()
    assert [item.port for item in plane.tables[-1].models[0].replicas] == [], "an epoch nobody gave is not routed to"
    plane.fleet.reported("n1", report(status("qwen#0", 1, READY)))
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#0", 1)]
    assert len(agent.sent) == sent


def test_scaling_changes_the_count_by_name_or_alias_and_restarts_nothing(plane: Plane) -> None:
    agent = serving(plane)
    plane.deploy.apply(evolve(QWEN, aliases=("q",)))
    scaled = plane.deploy.scale("q", 2)
    assert scaled is not None
    assert scaled.replicas == 2
    plane.deploy.pass_once()
    assert agent.replicas() == [("qwen#0", 1), ("qwen#1", 2)]
    assert plane.deploy.scale("nobody", 2) is None
    plane.deploy.scale("qwen", 0)
    plane.deploy.pass_once()
    assert agent.replicas() == []
    standing = plane.deploy.outlook().standings[0]
    # nothing is wrong with it, so it must not look like a refusal
    assert (standing.state, standing.words) == ("off", "`qwen` is scaled to `replicas: 0`")


def test_when_only_time_passes_nothing_is_planned_again(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    serving(plane)
    planned: list[int] = []
    real = plane.deploy._plan
    monkeypatch.setattr(plane.deploy, "_plan", lambda *given: planned.append(1) or real(*given))
    for _ in range(5):
        plane.clock.pass_time(1)
        plane.fleet.reported("n1", evolve(report(status("qwen#0", 1, READY)), seq=9))
        assert plane.deploy.pass_once(woken=False).nodes[0].presence.value == "connected"
    assert planned == []
    plane.pass_time(15, ("n1", report(status("qwen#0", 1, READY))))  # the first beats are over, which is a change
    planned.clear()
    for _ in range(8):
        plane.clock.pass_time(2)
        plane.deploy.pass_once(woken=False)
    assert planned, "a node that falls silent is looked at by the clock alone"
    assert plane.deploy.outlook().nodes[0].presence.value == "lost"


def test_a_new_server_gives_its_nodes_time_to_come_back(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    serving(plane)
    plane.close()
    plane = Plane(tmp_path)
    two = plane.join("n2")
    plane.pass_time(44, ("n2", report()))
    assert two.replicas() == []
    plane.pass_time(3, ("n2", report()))
    assert two.replicas() == [("qwen#0", 2)]
    plane.close()


def test_events_are_kept_over_servers_and_their_numbers_never_go_back(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    serving(plane)
    kinds = [(item.kind, item.subject) for item in plane.events.since(0)]
    assert kinds[0] == ("node", "n1")
    assert ("replica", "qwen#0") in kinds
    assert any(item.startswith("qwen#0 goes to node n1, epoch 1") for item in told(plane))
    assert any(item.startswith("qwen#0 ready on node n1") for item in told(plane))
    last = plane.events.since(0)[-1]
    plane.close()
    plane = Plane(tmp_path)
    assert plane.events.since(0)[-1] == last
    plane.events.record("server", "", "x")
    assert plane.events.since(last.seq)[0].seq > last.seq
    plane.close()


def test_only_the_last_events_are_kept_in_memory_and_on_disk(tmp_path: Path) -> None:
    events = Events(FakeClock())
    for number in range(KEPT + 5):
        events.record("node", "n", str(number))
    assert len(events.since(0)) == KEPT
    assert [item.words for item in events.since(0, 2)] == [str(KEPT + 3), str(KEPT + 4)]
    state = open_state(str(tmp_path / "state.db"))
    state.add_events([Event(number, 1.0, "node", "n", "w") for number in range(1, 30)], 10)
    assert [item.seq for item in state.events()] == list(range(20, 30))
    state.close()


def test_who_waits_for_events_gets_the_next_one_at_once() -> None:
    events = Events(FakeClock())
    events.record("node", "n", "first")
    got: list[tuple[Event, ...]] = []
    waiting = threading.Thread(target=lambda: got.append(events.wait(1, 30.0)))
    waiting.start()
    began = time.monotonic()
    events.record("node", "n", "second")
    waiting.join(10)
    assert [item.words for item in got[0]] == ["second"]
    assert time.monotonic() - began < 10
    assert events.wait(99, 0.01) == ()


def test_a_replica_that_leaves_gets_no_new_requests_and_finishes_those_it_has(tmp_path: Path) -> None:
    busy: dict[str, int] = {"qwen#0": 2}
    plane = Plane(tmp_path, in_flight=lambda: busy)
    one = serving(plane)
    two = plane.join("n2")
    here, there = report(status("qwen#0", 1, READY)), report(status("qwen#1", 2, READY))
    plane.fleet.reported("n2", report())
    plane.deploy.drain("n1", True)
    plane.deploy.pass_once()
    plane.fleet.reported("n2", there)
    plane.pass_time(20, ("n1", here), ("n2", there))
    assert one.replicas() == [("qwen#0", 1)]
    assert {item.node_id: item.ready for item in plane.tables[-1].models[0].replicas} == {"n1": False, "n2": True}
    assert plane.deploy.outlook().standings[0].note == "replica qwen#0 on node n1 finishes 2 requests before it leaves"
    busy.clear()
    plane.pass_time(1, ("n1", here), ("n2", there))
    assert one.replicas() == []
    assert two.replicas() == [("qwen#1", 2)]
    plane.close()


def test_a_request_that_never_ends_holds_a_replica_two_minutes_at_most(tmp_path: Path) -> None:
    plane = Plane(tmp_path, in_flight=lambda: {"qwen#0": 1})
    agent, said = serving(plane), report(status("qwen#0", 1, READY))
    plane.deploy.scale("qwen", 0)
    plane.pass_time(118, ("n1", said))
    assert agent.replicas() == [("qwen#0", 1)]
    plane.pass_time(4, ("n1", said))
    assert agent.replicas() == []
    plane.close()
