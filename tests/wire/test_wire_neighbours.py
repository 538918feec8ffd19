"""Neighbouring releases talk: recorded peers of the previous protocol, and invented ones of the next.

`data/agent-0.1.0.jsonl` and `data/server-0.1.0.jsonl` are what agent and server of llmgw 0.1.0, before certificates
were renewed over the socket, said to each other, byte for byte.
"""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from wire_helpers import Fleet, running_agent, running_listener, wait_for

from llmgw.domain.facts import Truth
from llmgw.domain.report import Desired
from llmgw.wire.messages import PROTOCOL

DATA = Path(__file__).parent / "data"


def _lines(name: str) -> list[bytes]:
    return (DATA / name).read_bytes().splitlines(keepends=True)


def test_a_recorded_agent_of_the_previous_release_is_served() -> None:
    fleet = Fleet()
    fleet.on_admit = lambda agent: agent.send_desired(Desired(3, 1))
    recorded = _lines("agent-0.1.0.jsonl")
    with (
        running_listener(fleet) as listener,
        socket.create_connection(("127.0.0.1", listener.port), timeout=10) as peer,
    ):
        answers = peer.makefile("rb")
        peer.sendall(recorded[0])
        welcome, desired = json.loads(answers.readline()), json.loads(answers.readline())
        assert (welcome["type"], welcome["protocol"]) == ("welcome", 1)
        assert desired["type"] == "desired"
        result: list[Any] = []
        asking = threading.Thread(
            target=lambda: result.append(fleet.agents["node-a"].ask("logs", {"replica_id": "m#0"}, 10))
        )
        asking.start()
        assert json.loads(answers.readline())["type"] == "ask"
        for line in recorded[1:]:
            peer.sendall(line)
        acks = [json.loads(answers.readline()) for line in recorded if b'"report"' in line[:20]]
        asking.join()
        assert [ack["seq"] for ack in acks] == [1, 2, 3, 4, 5]
        assert result == [{"lines": ["x"]}]
    assert fleet.hellos[0].facts is not None
    assert [report.seq for _, report in fleet.reports] == [1, 2, 3, 4, 5]


def _serve(server: socket.socket, lines: list[bytes], heard: list[dict[str, Any]], done: threading.Event) -> None:
    peer, _ = server.accept()
    with peer:
        stream = peer.makefile("rb")
        heard.append(json.loads(stream.readline()))
        acks = {json.loads(line)["seq"]: line for line in lines if b'"ack"' in line[:15]}
        for line in lines:
            if line not in acks.values():
                peer.sendall(line)
        for raw in stream:
            message = json.loads(raw)
            heard.append(message)
            if message["type"] == "report" and message["report"]["seq"] in acks:
                peer.sendall(acks.pop(message["report"]["seq"]))
            if not acks and any(each["type"] == "answer" for each in heard):
                done.set()


def _against(lines: list[bytes], **given: Any) -> tuple[Any, list[dict[str, Any]]]:
    heard: list[dict[str, Any]] = []
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=_serve, args=(server, lines, heard, done), daemon=True)
        serving.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        answers = {"logs": lambda args: {"lines": ["x"]}}
        with running_agent([url], answers=answers, **given) as agent:
            agent.wait_connected()
            assert done.wait(20), heard
            assert agent.state is Truth.YES
            wait_for(lambda: agent.desired, "the desired set")
        serving.join(10)
    return agent, heard


def test_a_recorded_server_of_the_previous_release_is_obeyed() -> None:
    agent, heard = _against(_lines("server-0.1.0.jsonl"))
    assert agent.desired[0].generation == 3
    assert {message["type"] for message in heard} == {"hello", "report", "answer"}
    answer = next(message for message in heard if message["type"] == "answer")
    assert answer["result"] == {"lines": ["x"]}


def test_a_server_of_the_next_protocol_with_more_to_say_is_obeyed() -> None:
    lines = []
    for line in _lines("server-0.1.0.jsonl"):
        message = json.loads(line) | {"invented": {"later": [1, 2, 3]}}
        if message["type"] == "welcome":
            message["protocol"] = PROTOCOL + 1
        if message["type"] == "desired":
            message["desired"]["invented"] = "later"
        lines.append(json.dumps(message).encode() + b"\n")
    lines.insert(1, b'{"type":"invented-later","x":1}\n')
    agent, _ = _against(lines)
    assert agent.desired[0].generation == 3


@pytest.mark.parametrize(("protocol", "agreed"), [(PROTOCOL - 1, PROTOCOL - 1), (PROTOCOL + 1, PROTOCOL)])
def test_the_lower_of_two_neighbouring_protocols_is_spoken(protocol: int, agreed: int) -> None:
    hello = json.loads(_lines("agent-0.1.0.jsonl")[0]) | {"protocol": protocol, "invented": [1]}
    with (
        running_listener(Fleet()) as listener,
        socket.create_connection(("127.0.0.1", listener.port), timeout=10) as peer,
    ):
        peer.sendall(json.dumps(hello).encode() + b'\n{"type":"invented-later"}\n')
        assert json.loads(peer.makefile("rb").readline())["protocol"] == agreed


def test_protocols_too_far_apart_are_refused_with_both_numbers() -> None:
    hello = json.loads(_lines("agent-0.1.0.jsonl")[0]) | {"protocol": PROTOCOL + 2}
    with (
        running_listener(Fleet()) as listener,
        socket.create_connection(("127.0.0.1", listener.port), timeout=10) as peer,
    ):
        peer.sendall(json.dumps(hello).encode() + b"\n")
        said = json.loads(peer.makefile("rb").readline())
    assert said["type"] == "refused"
    assert f"the agent speaks protocol {PROTOCOL + 2}, this server {PROTOCOL}" in said["words"]
