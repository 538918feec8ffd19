"""Agent and server over real sockets, plain and TLS: join, report, obey, answer, come back."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from wire_helpers import (
    CLOCK,
    SERVER,
    Agent,
    Authority,
    Fleet,
    Source,
    running_agent,
    running_listener,
    some_facts,
    wait_for,
)

from llmgw.domain.engines import EngineSpec
from llmgw.domain.facts import Finding, Truth, WeightsFile
from llmgw.domain.report import Desired
from llmgw.errors import ApiError, LinkError, LlmgwError, UsageError, WireError
from llmgw.server.handles import AgentHandle
from llmgw.server.listener import Listener
from llmgw.wire.conn import LinkLimits
from llmgw.wire.messages import PROTOCOL, Ack, Hello, Report, encode
from llmgw.wire.tls import TlsFiles


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TlsFiles | None, TlsFiles | None, str]:
    """TLS files of the server and of node-a, and the URL scheme."""
    if request.param == "plain":
        return None, None, "http"
    authority = Authority(tmp_path / "pki")
    return authority.server(), authority.node("node-a"), "https"


class Pair:
    def __init__(self, fleet: Fleet, listener: Listener, agent: Agent) -> None:
        self.fleet, self.listener, self.agent = fleet, listener, agent


@pytest.fixture
def pair(ends: tuple[TlsFiles | None, TlsFiles | None, str]) -> Iterator[Callable[..., Any]]:
    """Start a listener and an agent that dials it; returns when they are connected."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(server: dict[str, Any] | None = None, **agent: Any) -> Pair:
            fleet = Fleet()
            listener = stack.enter_context(running_listener(fleet, tls=ends[0], **(server or {})))
            url = f"{ends[2]}://127.0.0.1:{listener.port}"
            made = stack.enter_context(running_agent([url], tls=ends[1], **agent))
            made.wait_connected()
            return Pair(fleet, listener, made)

        yield start


def joined(it: Pair) -> AgentHandle:
    """The server's side of the connection, once both sides know that it stands: with a report messages flow."""
    wait_for(lambda: it.fleet.reports, "a report")
    return it.fleet.agents["node-a"]


def test_an_agent_joins_and_its_report_arrives_as_it_was_sent(pair: Callable[..., Pair]) -> None:
    it = pair()
    wait_for(lambda: it.fleet.reports, "a report")
    hello, (node, report) = it.fleet.hellos[0], it.fleet.reports[0]
    assert (hello.node_id, hello.version, hello.boot_id, hello.instance_id) == (
        "node-a",
        "0.1.0",
        "boot-1",
        "instance-1",
    )
    assert hello.facts == some_facts()
    assert abs(hello.clock - CLOCK.now()) < 60
    assert (node, report.seq, report.facts) == ("node-a", 1, None)
    status = it.agent.session.status()
    assert status.server is not None
    assert status.state == Finding(Truth.YES, f"connected to `{status.server}`")


def test_an_agent_reports_every_beat_and_every_report_is_acknowledged(pair: Callable[..., Pair]) -> None:
    it = pair(heartbeat_interval_s=0.1)
    wait_for(lambda: len(it.fleet.reports) >= 5, "five reports")
    assert [report.seq for _, report in it.fleet.reports[:5]] == [1, 2, 3, 4, 5]
    # Without acks the agent would have given the server up after two seconds.
    wait_for(lambda: len(it.fleet.reports) >= 25, "reports over more than two seconds")
    assert len(it.fleet.hellos) == 1


def test_a_desired_set_reaches_the_agent_and_its_generation_comes_back(pair: Callable[..., Pair]) -> None:
    it = pair()
    it.fleet.agents["node-a"].send_desired(Desired(7, 1))
    wait_for(lambda: it.agent.desired == [Desired(7, 1)], "the desired set")
    it.agent.session.poke()
    wait_for(lambda: it.fleet.reports[-1][1].generation == 7, "the generation in a report")
    assert it.fleet.reports[-1][1].epoch == 1


def test_megabytes_in_both_directions_arrive_whole(pair: Callable[..., Pair]) -> None:
    it = pair(answers={"echo": lambda args: args["text"]})
    handle = joined(it)
    engines = tuple(EngineSpec(f"engine-{n}", "v" * 9000) for n in range(100))
    for generation in range(1, 21):
        handle.send_desired(Desired(generation, 1, engines))
        text = f"{generation}" + "ü" * 400_000
        assert handle.ask("echo", {"text": text}, 30.0) == text
    assert it.agent.desired[-1] == Desired(20, 1, engines)
    assert len(it.fleet.hellos) == 1


def test_what_is_wanted_while_a_node_is_admitted_follows_the_welcome(
    ends: tuple[TlsFiles | None, TlsFiles | None, str],
) -> None:
    fleet = Fleet()
    fleet.on_admit = lambda agent: [agent.send_desired(Desired(n, 1)) for n in (1, 2)]  # type: ignore[assignment,return-value]
    with (
        running_listener(fleet, tls=ends[0]) as listener,
        running_agent([f"{ends[2]}://127.0.0.1:{listener.port}"], tls=ends[1]) as agent,
    ):
        wait_for(lambda: agent.desired == [Desired(2, 1)], "the newest desired set alone")
        assert agent.state is Truth.YES


def test_a_poke_reports_at_once_and_many_pokes_become_few_reports(pair: Callable[..., Pair]) -> None:
    it = pair(heartbeat_interval_s=60.0)
    wait_for(lambda: len(it.fleet.reports) == 1, "the first report")
    for _ in range(200):
        it.agent.session.poke()
    wait_for(lambda: len(it.fleet.reports) >= 2, "a report long before the beat", 5.0)
    count = len(it.fleet.reports)
    it.agent.source.changes = {"probed_at": 1.0}
    it.agent.session.poke()
    wait_for(lambda: it.fleet.reports[-1][1].probed_at == 1.0, "what is true after the last poke")
    assert count <= 4


def test_facts_travel_again_only_when_their_revision_changed(pair: Callable[..., Pair]) -> None:
    it = pair(heartbeat_interval_s=0.1)
    wait_for(lambda: len(it.fleet.reports) >= 3, "three reports")
    it.agent.source.known = changed = some_facts("r2", hostname="other")
    wait_for(
        lambda: it.fleet.reports[-1][1].facts is not None or any(r.facts for _, r in it.fleet.reports), "new facts"
    )
    wait_for(lambda: len(it.fleet.reports) >= 8, "more reports")
    assert [report.facts for _, report in it.fleet.reports if report.facts is not None] == [changed]


def test_facts_too_large_for_hello_come_with_the_first_report(pair: Callable[..., Pair]) -> None:
    large = some_facts(model_dirs=tuple(f"/mnt/{'x' * 100}/{n}" for n in range(1000)))
    it = pair(source=Source(large))
    wait_for(lambda: it.fleet.reports, "a report")
    assert it.fleet.hellos[0].facts is None
    assert it.fleet.reports[0][1].facts == large


def test_a_report_too_large_is_sent_without_its_bulk_and_says_so(pair: Callable[..., Pair]) -> None:
    source = Source(some_facts())
    source.changes = {
        "weights": tuple(
            WeightsFile(f"/m/{'x' * 200}{n}", 1, "gguf", Finding(Truth.YES, "complete")) for n in range(6000)
        )
    }
    it = pair(source=source)
    report = wait_for(lambda: it.fleet.reports, "a report")[0][1]
    assert report.weights == ()
    assert [warning.code for warning in report.warnings] == ["report-too-large"]


def test_a_question_is_answered_and_an_error_keeps_its_words(pair: Callable[..., Pair]) -> None:
    def refuse(args: Any) -> Any:
        raise LlmgwError("there is no replica `x#0` on this node")

    answers = {
        "logs": lambda args: {"lines": [f"last {args['lines']}"]},
        "refuse": refuse,
        "fault": lambda args: args["missing"],
        "huge": lambda args: "x" * (2 << 20),
    }
    it = pair(answers=answers)
    handle = joined(it)
    assert handle.ask("logs", {"lines": "5"}, 10.0) == {"lines": ["last 5"]}
    for what, words in {
        "refuse": "there is no replica `x#0` on this node",
        "fault": "a fault inside the agent: KeyError",
        "huge": "1048576 are allowed",
        "tea": "does not know how to answer `tea`, it knows `fault`, `huge`, `logs`, `refuse`",
    }.items():
        with pytest.raises(ApiError, match=words):
            handle.ask(what, {}, 10.0)


def test_questions_from_many_threads_get_their_own_answers(pair: Callable[..., Pair]) -> None:
    it = pair(answers={"echo": lambda args: args["text"]})
    handle = joined(it)
    wrong: list[Any] = []

    def ask(thread: int) -> None:
        for number in range(40):
            text = f"{thread}-{number}-" + "x" * (number * 500)
            answer = handle.ask("echo", {"text": text}, 30.0)
            if answer != text:
                wrong.append((text[:20], answer[:20]))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(it.fleet.hellos) == 1


def test_a_slow_answer_delays_no_heartbeat(pair: Callable[..., Pair]) -> None:
    release = threading.Event()
    it = pair(heartbeat_interval_s=0.1, answers={"slow": lambda args: release.wait(30)})
    handle = joined(it)
    with pytest.raises(LinkError, match=r"node `node-a` did not answer `slow` within 50ms"):
        handle.ask("slow", {}, 0.05)
    count = len(it.fleet.reports)
    wait_for(lambda: len(it.fleet.reports) >= count + 5, "reports while the answer is being found")
    release.set()


def test_a_question_ends_when_the_node_goes_away(pair: Callable[..., Pair]) -> None:
    release = threading.Event()
    it = pair(answers={"slow": lambda args: release.wait(30)})
    handle = joined(it)
    asked = threading.Timer(0.1, handle.close, ["drained by a test"])
    asked.start()
    with pytest.raises(LinkError, match="node `node-a` went away: drained by a test"):
        handle.ask("slow", {}, 20.0)
    release.set()
    with pytest.raises(LinkError, match="drained by a test"):
        handle.ask("slow", {}, 20.0)
    asked.join()


def test_a_stopped_agent_leaves_with_words(pair: Callable[..., Pair]) -> None:
    it = pair()
    it.agent.session.stop()
    wait_for(lambda: it.fleet.lefts, "left")
    assert it.fleet.lefts == [("node-a", "instance-1", "the peer closed the connection")]
    assert it.agent.words == "the agent is stopping"
    it.agent.session.stop()


def test_an_agent_comes_back_after_the_server_restarted(ends: tuple[TlsFiles | None, TlsFiles | None, str]) -> None:
    first, second = Fleet(), Fleet()
    with running_listener(first, tls=ends[0]) as listener:
        port = listener.port
        url = f"{ends[2]}://127.0.0.1:{port}"
        context = running_agent([url], tls=ends[1])
        agent = context.__enter__()
        try:
            agent.wait_connected()
            listener.stop()
            wait_for(lambda: agent.state is Truth.NO, "the loss is seen")
            assert agent.words.startswith(f"not connected to `{url}`: ")
            with running_listener(second, tls=ends[0], port=port):
                agent.wait_connected()
                wait_for(lambda: second.reports, "a report at the new server")
                assert second.hellos[0].facts == some_facts()
        finally:
            context.__exit__(None, None, None)


def test_an_agent_goes_to_the_next_server_when_the_first_is_away(
    ends: tuple[TlsFiles | None, TlsFiles | None, str],
) -> None:
    fleet = Fleet()
    with socket.create_server(("127.0.0.1", 0)) as held:
        gone = held.getsockname()[1]
    with running_listener(fleet, tls=ends[0]) as listener:
        urls = [f"{ends[2]}://127.0.0.1:{gone}", f"{ends[2]}://127.0.0.1:{listener.port}"]
        with running_agent(urls, tls=ends[1]) as agent:
            agent.wait_connected()
            assert agent.session.status().server == urls[1]
            assert "nothing listens there" in agent.session.status().last_error


def test_a_refusal_keeps_its_words_and_is_never_called_connected(
    ends: tuple[TlsFiles | None, TlsFiles | None, str],
) -> None:
    fleet = Fleet()
    fleet.refuse = LlmgwError("node `node-a` was removed", hint="`llmgw ctl nodes allow node-a`", code="node-removed")
    with (
        running_listener(fleet, tls=ends[0]) as listener,
        running_agent([f"{ends[2]}://127.0.0.1:{listener.port}"], tls=ends[1]) as agent,
    ):
        words = agent.wait_words("refused by the server")
        assert words.endswith("refused by the server: node `node-a` was removed (`llmgw ctl nodes allow node-a`)")
        assert fleet.lefts == []
        fleet.refuse = None
        agent.wait_connected()


def test_the_newer_of_two_agents_with_one_name_wins_and_a_warning_names_both(
    pair: Callable[..., Pair], ends: tuple[TlsFiles | None, TlsFiles | None, str], caplog: pytest.LogCaptureFixture
) -> None:
    it = pair(reconnect_base_s=60.0, reconnect_max_s=60.0)
    url = f"{ends[2]}://127.0.0.1:{it.listener.port}"
    with (
        caplog.at_level(logging.WARNING, "llmgw.server.listener"),
        running_agent([url], tls=ends[1], instance_id="instance-2") as newer,
    ):
        newer.wait_connected()
        wait_for(lambda: it.agent.state is Truth.NO or it.agent.session.status().last_error, "the older is told")
        wait_for(lambda: "two agents say they are node `node-a`" in caplog.text, "the warning")
        assert it.fleet.agents["node-a"].instance_id == "instance-2"
        count = len(it.fleet.reports)
        newer.session.poke()
        wait_for(lambda: len(it.fleet.reports) > count, "the newer's report")
        assert it.fleet.lefts == []
    wait_for(lambda: it.fleet.lefts, "the newer left")
    assert it.fleet.lefts[0][:2] == ("node-a", "instance-2")


def test_a_lower_epoch_is_not_obeyed(pair: Callable[..., Pair]) -> None:
    it = pair({"epoch": 5})
    handle = joined(it)
    handle.send_desired(Desired(1, 4))
    wait_for(lambda: "epoch 4 is lower than 5" in it.agent.words, "the refusal is seen")
    assert it.agent.desired == []
    handle.send_desired(Desired(2, 6))
    wait_for(lambda: it.agent.desired == [Desired(2, 6)], "the higher one is obeyed")
    wait_for(lambda: "epoch" not in it.agent.words, "the trouble is over")


def test_a_server_of_a_lower_epoch_is_left() -> None:
    with (
        running_listener(Fleet(), epoch=3) as listener,
        running_agent([f"http://127.0.0.1:{listener.port}"], highest_epoch=4) as agent,
    ):
        words = agent.wait_words("not the leader any more")
        assert words.endswith(
            f"server `{SERVER}` is not the leader any more: its epoch is 3, a newer server has epoch 4"
        )


def test_a_report_that_cannot_be_made_is_said_in_the_status(pair: Callable[..., Pair]) -> None:
    it = pair(heartbeat_interval_s=0.1)
    it.agent.source.broken = True
    wait_for(lambda: "the probe registry fell over" in it.agent.words, "the trouble is said")
    it.agent.source.broken = False
    wait_for(lambda: it.agent.words == f"connected to `{it.agent.session.status().server}`", "the trouble is over")


def test_an_agent_gives_up_a_server_that_acknowledges_nothing(pair: Callable[..., Pair]) -> None:
    it = pair(heartbeat_interval_s=0.1)
    it.fleet.hold.clear()
    error = wait_for(lambda: it.agent.session.status().last_error, "the loss")
    assert error.startswith("the server is silent: ")
    it.fleet.hold.set()


def test_a_server_gives_up_an_agent_that_reports_nothing() -> None:
    fleet = Fleet()
    with (
        running_listener(fleet, limits=LinkLimits(idle_s=0.5)) as listener,
        socket.create_connection(("127.0.0.1", listener.port)) as peer,
    ):
        peer.sendall(encode(Hello(PROTOCOL, "mute", "0.1.0", "b", "i", CLOCK.now(), 5.0)))
        wait_for(lambda: fleet.lefts, "left")
        assert fleet.lefts == [("mute", "i", "the peer was silent for 500ms")]


def test_an_agent_is_given_up_after_four_of_its_own_beats() -> None:
    fleet = Fleet()
    with (
        running_listener(fleet, heartbeat_interval_s=0.1) as listener,
        socket.create_connection(("127.0.0.1", listener.port)) as slow,
        socket.create_connection(("127.0.0.1", listener.port)) as quick,
    ):
        slow.sendall(encode(Hello(PROTOCOL, "slow", "0.1.0", "b", "i", CLOCK.now(), 60.0)))
        quick.sendall(encode(Hello(PROTOCOL, "quick", "0.1.0", "b", "i", CLOCK.now(), 0.2)))
        wait_for(lambda: fleet.lefts, "left")
        assert fleet.lefts == [("quick", "i", "the peer was silent for 800ms")]
        assert b'"heartbeat_interval_s":60.0' in slow.makefile("rb").readline()


def test_versions_one_apart_talk_and_two_apart_are_refused_with_words() -> None:
    fleet = Fleet()
    with running_listener(fleet) as listener:
        for protocol, answer in ((PROTOCOL + 1, b'"type":"welcome"'), (PROTOCOL + 2, b"this server 1")):
            with socket.create_connection(("127.0.0.1", listener.port)) as peer:
                peer.sendall(encode(Hello(protocol, f"n{protocol}", "9.0", "b", "i", CLOCK.now(), 5.0)))
                assert answer in peer.makefile("rb").readline()
    assert [hello.node_id for hello in fleet.hellos] == [f"n{PROTOCOL + 1}"]


def test_a_url_that_is_none_is_refused_at_once() -> None:
    for url in ("ftp://x", "https://", "server:7443", "https://x:99999", "https://x/path", "https://u@x"):
        with pytest.raises(UsageError, match="is not a server URL"):
            Agent([url])


def test_all_of_one_nodes_reports_are_handled_in_order() -> None:
    fleet = Fleet()
    template = Source().report(1, None, None, None)
    with running_listener(fleet) as listener, socket.create_connection(("127.0.0.1", listener.port)) as peer:
        reports = b"".join(encode(Report(evolve(template, seq=seq))) for seq in range(500))
        peer.sendall(encode(Hello(PROTOCOL, "fast", "0.1.0", "b", "i", CLOCK.now(), 5.0)))
        lines = peer.makefile("rb")
        assert b"welcome" in lines.readline()
        sender = threading.Thread(target=peer.sendall, args=(reports,))
        sender.start()
        acks = [lines.readline() for _ in range(500)]
        sender.join()
    assert acks == [encode(Ack(seq)) for seq in range(500)]
    assert [report.seq for _, report in fleet.reports] == list(range(500))


def test_a_handle_sends_nothing_too_long() -> None:
    fleet = Fleet()
    with running_listener(fleet) as listener, running_agent([f"http://127.0.0.1:{listener.port}"]) as agent:
        agent.wait_connected()
        with pytest.raises(WireError, match="cannot send `ask`"):
            fleet.agents["node-a"].ask("logs", {"x": "y" * (1 << 20)}, 1.0)
        began = time.monotonic()
        agent.session.stop()
        assert time.monotonic() - began < 5.0
