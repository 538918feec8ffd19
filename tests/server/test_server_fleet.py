"""What the fleet keeps of what nodes say, and how fresh it calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from domain_views import facts, node
from server_fakes import FakeAgent, FakeClock, FakeHello

from llmgw.domain.engines import Progress
from llmgw.domain.report import NodeView, Presence
from llmgw.errors import LinkError, LlmgwError
from llmgw.server.fleet import Fleet

REPORT = node().report
assert REPORT is not None


class Seen:
    """A fleet and what it told."""

    def __init__(self, *known: str) -> None:
        self.clock = FakeClock()
        self.changes = 0
        self.new: list[str] = []
        self.fleet = Fleet(self.clock, known, lost_after=3, on_change=self._changed, on_new=self.new.append)

    def _changed(self) -> None:
        self.changes += 1

    def view(self, node_id: str = "n1") -> NodeView:
        return next(view for view in self.fleet.views() if view.node_id == node_id)


def test_a_report_makes_a_node_connected_and_silence_makes_it_stale_then_lost() -> None:
    seen = Seen()
    seen.fleet.admit("n1", FakeHello(), "a", FakeAgent())
    assert (seen.view().presence, seen.view().presence_words) == (Presence.STALE, "connected, has not reported yet")
    seen.fleet.reported("n1", REPORT)
    assert seen.view().presence is Presence.CONNECTED
    seen.clock.pass_time(10)
    assert seen.view().presence is Presence.STALE
    seen.clock.pass_time(5)
    assert seen.view().presence is Presence.LOST
    assert seen.view().report is REPORT
    assert seen.new == ["n1"]


def test_a_clock_step_of_the_server_makes_nobody_stale() -> None:
    seen = Seen()
    seen.fleet.admit("n1", FakeHello(), "a", FakeAgent())
    seen.fleet.reported("n1", REPORT)
    seen.clock.epoch += 86400
    assert seen.view().presence is Presence.CONNECTED


def test_the_nodes_own_interval_counts() -> None:
    seen = Seen()
    seen.fleet.admit("n1", FakeHello(heartbeat_interval_s=60.0), "a", FakeAgent())
    seen.fleet.reported("n1", REPORT)
    seen.clock.pass_time(70)
    assert seen.view().presence is Presence.CONNECTED


def test_facts_survive_reports_without_them_and_a_reconnect() -> None:
    seen = Seen()
    told = facts(labels={"rack": "r1"})
    seen.fleet.admit("n1", FakeHello(facts=told), "a", FakeAgent())
    seen.fleet.reported("n1", REPORT)
    seen.fleet.left("n1", "i1", "reset by peer")
    seen.fleet.admit("n1", FakeHello(instance_id="i2"), "b", FakeAgent())
    assert seen.view().facts == told
    seen.fleet.reported("n1", evolve(REPORT, facts=facts(labels={"rack": "r2"})))
    seen.fleet.reported("n1", REPORT)
    assert seen.view().facts == facts(labels={"rack": "r2"})


def test_only_what_can_matter_to_placement_wakes_the_reconciler() -> None:
    seen = Seen()
    seen.fleet.admit("n1", FakeHello(), "a", FakeAgent())
    seen.fleet.reported("n1", REPORT)
    before = seen.changes
    engine = REPORT.engines[0]
    assert REPORT.readings is not None
    for same in (
        evolve(REPORT, seq=2, readings=evolve(REPORT.readings, load_1m=3.0)),
        evolve(REPORT, seq=3, engines=(evolve(engine, progress=Progress(5, 10)),)),
    ):
        seen.fleet.reported("n1", same)
    assert seen.changes == before
    seen.fleet.reported("n1", evolve(REPORT, engines=(evolve(engine, words="other words"),)))
    assert seen.changes == before + 1


def test_a_late_goodbye_of_another_instance_changes_nothing() -> None:
    seen = Seen()
    seen.fleet.admit("n1", FakeHello(instance_id="new"), "a", FakeAgent())
    seen.fleet.left("n1", "old", "closed")
    assert list(seen.fleet.agents()) == ["n1"]
    seen.fleet.left("n1", "new", "closed by the peer")
    assert seen.fleet.agents() == {}


def test_a_node_that_left_says_why() -> None:
    seen = Seen()
    seen.fleet.admit("n1", FakeHello(), "a", FakeAgent())
    seen.fleet.reported("n1", REPORT)
    seen.fleet.left("n1", "i1", "certificate expired")
    assert seen.view().presence_words == "stale: disconnected, last report 0 s ago: certificate expired"


def test_nodes_of_an_earlier_server_are_listed_and_count_as_lost_when_they_had_time_to_return() -> None:
    seen = Seen("n1")
    assert seen.view().presence is Presence.NEVER
    assert seen.view().presence_words == "not seen since this server started 0s ago"
    seen.clock.pass_time(44)
    assert seen.view().presence is Presence.NEVER
    seen.clock.pass_time(1)
    assert seen.view().presence is Presence.LOST


def test_clock_and_version_skew_become_warnings_beside_the_nodes_own() -> None:
    seen = Seen()
    seen.fleet.admit("n1", FakeHello(clock=1_000_000.0 - 95, version="9.9.9"), "a", FakeAgent())
    seen.fleet.reported("n1", REPORT)
    report = seen.view().report
    assert report is not None
    assert [(item.code, item.words) for item in report.warnings] == [
        ("clock-skew", "its clock is 1m35s behind the server's: set up NTP on both"),
        ("version-skew", "runs llmgw 9.9.9, the server 0.1.0: bring both to one version"),
    ]
    seen.fleet.admit("n1", FakeHello(clock=1_000_029.0), "a", FakeAgent())
    report = seen.view().report
    assert report is not None
    assert report.warnings == ()


def test_asking_a_node_that_is_away_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="cannot ask node `n1` for `logs`: it is not connected"):
        Seen("n1").fleet.ask("n1", "logs", {}, 1.0)
    with pytest.raises(LlmgwError, match="there is no node `n2`"):
        Seen("n1").fleet.ask("n2", "logs", {}, 1.0)
