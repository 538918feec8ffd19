"""What changes at the worst moment: routes, keys and replicas while requests come in, are answered or counted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_fakes import (
    FakeControl,
    Gateway,
    Scripted,
    ask,
    dechunk,
    model,
    post,
    read_all,
    read_until,
    replica,
    wait_for,
)

from llmgw.domain.routing import RouteKey
from llmgw.gateway.plane import Plane
from llmgw.gateway.protocol import Client
from llmgw.gateway.settings import Options

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
USAGE = b'{"usage":{"prompt_tokens":%d,"completion_tokens":%d}}'


def whole(body: bytes) -> bytes:
    return OK % (len(body), body)


def key(name: str, value: str, **more: object) -> RouteKey:
    return RouteKey(name, hashlib.sha256(value.encode()).hexdigest(), **more)


# -- usage


@pytest.mark.parametrize("count", [1, 5])
def test_usage_of_the_last_moment_is_told_before_the_process_ends(start: Callable[..., Gateway], count: int):
    made = start()
    # said to close: a connection that ends just when the next request is on its way would be a 502
    said = whole(USAGE % (3, 4)).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    made.routes(model(replica(made.scripted(lambda sock, _: sock.sendall(said)))))
    for _ in range(count):
        assert made.chat()[0] == 200
    made.terminate()
    assert made.process.wait(10) == 0
    assert (made.control.usage("requests"), made.control.usage("prompt")) == (count, 3 * count)
    assert "is lost" not in made.log()


def test_a_process_whose_control_process_is_away_ends_all_the_same_and_says_what_is_lost(start: Callable[..., Gateway]):
    made = start()
    made.routes(model(replica(made.scripted(lambda sock, _: sock.sendall(whole(USAGE % (3, 4)))))))
    made.control.close()
    wait_for(lambda: made.ready()["control"] == "away", "the gateway to notice")
    assert made.chat()[0] == 200
    made.terminate()
    assert made.process.wait(10) == 0
    assert "usage of 1 requests is lost" in made.log()


@pytest.mark.parametrize("said", [b"-5", b"99999999999999999999999999", b"9223372036854775807"])
def test_a_count_that_cannot_be_is_not_counted_and_stops_no_report(plane: Gateway, said: bytes):
    body = b'{"usage":{"prompt_tokens":%b,"completion_tokens":%b}}' % (said, said)
    plane.routes(model(replica(plane.scripted(lambda sock, _: sock.sendall(whole(body)))), name=f"odd{said[:3]!a}"))
    assert plane.chat(f"odd{said[:3]!a}")[0] == 200
    only = {"model": f"odd{said[:3]!a}"}
    wait_for(lambda: plane.control.usage("requests", **only) == 1, "the request to be told")
    assert plane.control.usage("prompt", **only) == plane.control.usage("completion", **only) == 0
    assert plane.control.usage("unknown_requests", **only) == 1


def test_usage_at_the_end_of_a_large_whole_answer_is_read(plane: Gateway):
    body = b'{"data":["' + b"x" * 1_500_000 + b'"],"usage":{"prompt_tokens":7,"total_tokens":7}}'
    plane.routes(model(replica(plane.scripted(lambda sock, _: sock.sendall(whole(body)))), name="large"))
    status, _, got = plane.fetch("POST", "/v1/embeddings", {"model": "large", "input": "x"})
    assert (status, got) == (200, body)
    wait_for(lambda: plane.control.usage("requests", model="large") == 1, "the request to be told")
    assert plane.control.usage("prompt", model="large") == 7


def test_who_looked_before_the_control_process_went_looks_no_more(start: Callable[..., Gateway]):
    made = start()
    made.routes(model(replica(made.scripted(lambda sock, _: sock.sendall(whole(b"{}"))))))
    made.control.send({"type": "watch", "on": True})
    wait_for(lambda: made.control.watched, "what is looked at")
    made.control.close()
    made.control = FakeControl(made.control_path)
    wait_for(lambda: len(made.control.stats) > 2, "the gateway to come back")
    assert not made.control.watched


# -- routes and keys that change while a request comes in


@pytest.mark.parametrize("chunked", [False, True])
def test_a_key_that_is_gone_when_the_body_is_here_opens_nothing(plane: Gateway, chunked: bool):
    served = model(replica(plane.scripted(lambda sock, _: sock.sendall(whole(b"{}")))))
    plane.routes(served, keys=(key("a", "secret-a"), key("b", "secret-b")), required=True)
    data = json.dumps(ask()).encode()
    how = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(data)}"
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret-a\r\nExpect: 100-continue"
    with plane.connect() as sock:
        sock.sendall(f"{head}\r\n{how}\r\n\r\n".encode())
        assert b" 100 " in read_until(sock, b"\r\n\r\n")
        plane.routes(served, keys=(key("b", "secret-b"),), required=True)
        sock.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if chunked else data)
        assert read_until(sock, b"}}").startswith(b"HTTP/1.1 401 ")


# -- engines that answer before they have read


class Hasty(Scripted):
    """Answers by the head alone."""

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._act(connection, connection.recv(100))


@pytest.fixture
def hasty(plane: Gateway) -> Iterator[Callable[[Callable[[socket.socket], None]], None]]:
    """`hasty(act)`: the model `m` is served by such an engine."""
    with contextlib.ExitStack() as stack:

        def serve(act: Callable[[socket.socket], None]) -> None:
            upstream = Hasty(lambda sock, _: act(sock))
            stack.callback(upstream.close)
            plane.routes(model(replica(upstream)))

        yield serve


def test_an_engine_that_answers_before_it_has_read_gets_no_further_request_on_that_connection(plane: Gateway, hasty):
    """What is left of the body would be read as the next request."""
    connections: list[socket.socket] = []
    go = threading.Event()

    def act(sock: socket.socket) -> None:
        connections.append(sock)
        sock.sendall(whole(b'{"ok":1}'))
        go.wait(20)

    hasty(act)
    try:
        assert plane.chat(user="x" * 20_000_000)[0] == 200
        assert plane.chat(timeout=10)[0] == 200
    finally:
        go.set()
    assert len(connections) == 2


def test_an_engine_that_refuses_a_large_body_and_closes_is_heard(plane: Gateway, hasty):
    hasty(lambda sock: sock.sendall(b'HTTP/1.1 413 Too Large\r\nContent-Length: 10\r\n\r\n{"no":413}'))
    for _ in range(10):
        status, _, body = plane.chat(user="x" * 20_000_000)
        assert (status, body) == (413, b'{"no":413}')


# -- the end


def test_a_page_that_looks_on_does_not_hold_up_the_end(start: Callable[..., Gateway]):
    """Its event stream has no end: the gateway ends it, and the page connects anew."""
    made = start("--drain-timeout", "60s")
    with socket.socket(socket.AF_UNIX) as admin:
        admin.bind(str(made.admin_path))
        admin.listen()
        with made.connect() as page:
            page.sendall(b"GET /page/live HTTP/1.1\r\nHost: x\r\n\r\n")
            peer, _ = admin.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
                read_until(page, b"data: 1")
                began = time.monotonic()
                made.process.send_signal(signal.SIGTERM)
                assert read_all(page).endswith(b"0\r\n\r\n")
                assert made.process.wait(10) == 0
                assert time.monotonic() - began < 10


def test_who_waits_for_news_does_not_hold_up_the_end(start: Callable[..., Gateway]):
    made = start("--drain-timeout", "60s")
    with socket.socket(socket.AF_UNIX) as admin:
        admin.bind(str(made.admin_path))
        admin.listen()
        with made.connect() as follower:
            follower.sendall(b"GET /api/v1/events?wait=20 HTTP/1.1\r\nHost: x\r\n\r\n")
            peer, _ = admin.accept()
            with peer:
                peer.recv(65536)
                made.process.send_signal(signal.SIGTERM)
                got = read_all(follower)
                assert got.startswith(b"HTTP/1.1 503 ")
                assert b"shutting_down" in got
                assert made.process.wait(10) == 0


def test_a_request_that_was_on_its_way_when_the_process_began_to_end_is_answered(start: Callable[..., Gateway]):
    def answers() -> list[bytes]:
        made = start()
        made.routes(model(replica(made.scripted(lambda sock, _: sock.sendall(whole(b'{"ok":1}'))))))
        with made.connect() as used, made.connect() as fresh, made.connect() as idle:
            used.sendall(post("/v1/chat/completions", ask()))
            assert b" 200 " in read_until(used, b'{"ok":1}')
            made.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "draining" in made.log(), "draining")
            for sock in (used, fresh):
                sock.sendall(post("/v1/chat/completions", ask()))
            got = [read_all(sock) for sock in (used, fresh)]
            assert read_all(idle) == b""
        assert made.process.wait(10) == 0
        return got

    # a second is given: a machine that stands still for longer may try again
    for _ in range(4):
        if all(b" 200 " in got and b"connection: close" in got for got in answers()):
            return
    raise AssertionError("no answer")


# -- a stream whose only end is that of its connection


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
    ],
)
@pytest.mark.parametrize("cut", [0, 10])
def test_a_stream_is_complete_when_its_last_event_came_however_it_is_cut(
    plane: Gateway, path: str, end: bytes, cut: int
):
    seen = threading.Event()
    event = b'data: {"x":1}\n\n'

    def act(sock: socket.socket, _request: bytes) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event + end[:cut])
        seen.wait(20)
        sock.sendall(end[cut:])

    plane.routes(model(replica(plane.scripted(act)), endpoints=(path,)))
    with plane.connect() as sock:
        sock.sendall(post(path, ask(stream=True, stream_options={"include_usage": True})))
        got = read_until(sock, event + (end[:cut] if not cut else b""))
        seen.set()
        got += read_until(sock, b"0\r\n\r\n")
    body, whole_one = dechunk(got.partition(b"\r\n\r\n")[2])
    assert whole_one
    assert body == event + end


# -- deadlines of heads


def test_a_head_has_its_time_from_its_first_byte_and_no_more_however_it_trickles():
    now = [0.0]
    plane = Plane(Options(head_timeout_s=15.0, keepalive_s=75.0), "", lambda: now[0])
    written: list[bytes] = []
    transport: Any = SimpleNamespace(
        get_extra_info=lambda _: None,
        set_write_buffer_limits=lambda **_: None,
        write=written.append,
        can_write_eof=lambda: False,
        is_closing=lambda: False,
        close=lambda: None,
    )
    client = Client(plane)
    client.connection_made(transport)
    client.data_received(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    now[0] = 74.9
    client.data_received(b"GET /healthz HTTP/1.1\r\n")
    now[0] = 80.0
    client.check(now[0])
    client.data_received(b"Host: x\r\n\r\n")
    assert [each[:13] for each in written] == [b"HTTP/1.1 200 "] * 2
    for now[0] in (100.0, 110.0, 114.9):
        client.data_received(b"G")
        client.check(now[0])
    assert len(written) == 2
    now[0] = 115.0
    client.check(now[0])
    assert written[2].startswith(b"HTTP/1.1 408 ")
