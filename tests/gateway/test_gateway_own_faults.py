"""A fault of the gateway itself is an answer too, and what goes wrong very often goes on being handled."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_fakes import model, replica

from llmgw.domain.routing import RouteTable
from llmgw.gateway.balance import Balance
from llmgw.gateway.errors import Answer, refuse
from llmgw.gateway.plane import Plane
from llmgw.gateway.pool import Dial
from llmgw.gateway.protocol import Client
from llmgw.gateway.relay import Relay
from llmgw.gateway.settings import Options


def test_a_replica_that_has_failed_thousands_of_times_in_a_row_is_passed_over_for_a_minute_at_most() -> None:
    now = [0.0]
    balance = Balance(Options(), lambda: now[0])
    balance.apply(RouteTable(1, (model(replica(1)),)))
    for _ in range(5000):
        balance.failed(replica(1), "it cannot be reached")
        now[0] = balance.sick["m#0"].until
    balance.failed(replica(1), "it cannot be reached")
    assert balance.sick["m#0"].until == now[0] + 60.0


class _Relay(Relay):
    def _on_head(self, upstream: Any, reply: Any) -> None: ...

    def _lines(self) -> bytes:
        return b""


def test_a_client_is_answered_when_the_way_to_an_engine_fails_by_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Answer] = []
    plane: Any = SimpleNamespace(now=lambda: 0.0, active=set())
    client: Any = SimpleNamespace(answer=answers.append)

    async def fails() -> None:
        raise RuntimeError("nobody thought of this")

    async def main() -> None:
        relay = _Relay(plane, client, None, b"id-1", b"")  # type: ignore[arg-type]
        relay._spawn(fails())
        while not answers:
            await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(main(), 10))
    assert answers[0].status == 500
    assert json.loads(answers[0].body)["error"]["code"] == "internal"
    assert not plane.active
    assert "`id-1` could not be handled" in caplog.text
    assert "nobody thought of this" in caplog.text


def test_a_client_that_is_reset_while_its_answer_is_written_is_nobody_elses_trouble() -> None:
    """A slot that comes free may find that this one is to be refused; what goes wrong here must not reach the giver."""
    written: list[bytes] = []

    def gone() -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    transport: Any = SimpleNamespace(
        write=written.append, write_eof=gone, can_write_eof=lambda: True, is_closing=lambda: False
    )
    plane: Any = SimpleNamespace(now=lambda: 0.0, draining=False, cors=b"")
    client = Client(plane)
    client.transport = transport
    client.answer(refuse(503, "no", code="no_replica", close=True))
    assert b" 503 " in written[0]


def test_a_deadline_that_cannot_be_judged_keeps_no_other_from_being_judged(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_now: float) -> None:
        raise RuntimeError("nobody thought of this")

    plane = Plane(Options(), "", lambda: 0.0)
    ended: list[str] = []
    judged: list[str] = []
    relays: list[Any] = [SimpleNamespace(check=fails, broke=lambda _: ended.append("relay"))]
    relays.append(SimpleNamespace(check=lambda _: judged.append("relay")))
    clients: list[Any] = [SimpleNamespace(check=fails, abort=lambda: ended.append("client"))]
    clients.append(SimpleNamespace(check=lambda _: judged.append("client")))
    plane.active, plane.clients = relays, clients  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        plane.sweep()
    assert ended == judged == ["relay", "client"]
    assert "nobody thought of this" in caplog.text


def test_the_number_of_a_connection_given_up_is_not_anothers_before_the_loops_next_turn() -> None:
    """The loop may hold an event for it: of a new connection's it would seem to say that it is made."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            where = (socket.AF_INET, server.getsockname())
            first = Dial(where, 5.0, lambda sock: sock.close(), lambda _: None)
            before = {int(each) for each in os.listdir("/proc/self/fd")}
            first.cancel()
            second = Dial(where, 5.0, lambda sock: sock.close(), lambda _: None)
            assert {int(each) for each in os.listdir("/proc/self/fd")} > before
            second.cancel()
            await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/fd")) == len(before) - 1

    asyncio.run(main())
