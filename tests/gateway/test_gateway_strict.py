"""Hostile bytes on a real socket: no hidden request is ever run, and every connection ends in order."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_fakes import Gateway, ask, gateway, model, post, read_all, read_until, replica, wait_for

HIDDEN = b"GET /api/v1/hidden HTTP/1.1\r\nHost: x\r\n\r\n"
JSON = json.dumps(ask()).encode()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("strict"), "--max-body", "100000") as made:
        made.routes(model(replica(made.engine())))
        yield made


def talk(made: Gateway, data: bytes) -> bytes:
    with made.connect() as sock:
        sock.sendall(data)
        return read_all(sock)


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/api/v1/status"])
@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 40\r\n\r\n",
        b"Content-Length: +0\r\n\r\n",
        b"Content-Length : 40\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"X: a\n\r\n",
        b"X: a\r\n folded\r\n\r\n",
        b"X: a\nContent-Length: 40\r\n\r\n",
        b"X: a\x00\r\n\r\n",
        b"Host: y\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0\n\n",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\na0\r\n\r\n",
    ],
)
def test_an_ambiguous_request_is_refused_and_what_follows_is_never_run(small: Gateway, path: bytes, lines: bytes):
    got = talk(small, b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n" + lines + HIDDEN)
    assert got.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
    assert got.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in got
    assert b'"code":' in got


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\nHost: x\n\n", b"GET /healthz HTTP/1.1\r\nHost: x\n", b"\x16\x03\x01\n\n"]
)
def test_a_head_that_can_never_become_valid_is_refused_at_once(small: Gateway, data: bytes):
    began = time.monotonic()
    assert talk(small, data).startswith(b"HTTP/1.1 400 ")
    assert time.monotonic() - began < 5


def test_an_endless_head_is_refused(small: Gateway):
    assert talk(small, b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000).startswith(b"HTTP/1.1 431 ")


def test_a_body_in_chunks_reaches_the_engine_whole(small: Gateway):
    parts = [JSON[i : i + 7] for i in range(0, len(JSON), 7)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with small.connect() as sock:
        for piece in (head + chunks, head[:30], head[30:] + chunks[:11], chunks[11:12], chunks[12:]):
            sock.sendall(piece)
        answers = read_until(sock, b"t7 ")
        while answers.count(b"t7 ") < 2:  # both answers may have come in one read
            answers += read_until(sock, b"t7 ")
        assert answers.startswith(b"HTTP/1.1 200 ")
        assert answers.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_over_the_limit_is_a_413_that_the_client_gets_to_read(small: Gateway, chunked: bool):
    framing = b"Transfer-Encoding: chunked\r\n\r\n186A1\r\n" if chunked else b"Content-Length: 100001\r\n\r\n"
    with small.connect() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + framing)
        try:
            for _ in range(20):
                sock.sendall(b"x" * 5000)
        except OSError:
            pass
        got = read_all(sock)
    assert got.startswith(b"HTTP/1.1 413 ")
    assert b"100000" in got


def test_expect_100_continue(small: Gateway):
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with small.connect() as sock:
        sock.sendall(head % (b"/v1/chat/completions", len(JSON)))
        assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(JSON)
        assert read_until(sock, b"t7 ").startswith(b"HTTP/1.1 200 ")
    for path, length, status in ((b"/v1/nothing", 5, b"404"), (b"/v1/completions", 100_001, b"413")):
        assert talk(small, head % (path, length)).startswith(b"HTTP/1.1 " + status)


def test_an_early_error_leaves_the_connection_usable_when_the_body_was_there(small: Gateway):
    with small.connect() as sock:
        sock.sendall(post("/v1/nothing", b"{}") + b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        got = read_all(sock)
    assert got.startswith(b"HTTP/1.1 404 ")
    assert got.endswith(b'{"status":"ok"}')


def test_more_than_a_head_sent_ahead_costs_the_client_its_connection_not_its_answer(small: Gateway):
    with small.connect() as sock:
        sock.sendall(post("/v1/chat/completions", ask(max_tokens=2)))
        try:
            sock.sendall(b"x" * 60_000)
        except OSError:
            pass
        assert b"t0 t1" in read_all(sock)


def test_bytes_that_come_one_by_one_are_a_request_like_any_other(small: Gateway):
    with small.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post("/v1/completions", {"model": "m", "prompt": "p", "max_tokens": 1}):
            sock.sendall(bytes([byte]))
        assert b"t0 " in read_until(sock, b"t0 ")


def test_many_silent_connections_do_not_stop_others(small: Gateway):
    silent = [small.connect() for _ in range(200)]
    for sock in silent[::2]:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
    try:
        assert small.chat()[0] == 200
    finally:
        for sock in silent:
            sock.close()


def test_a_request_that_does_not_arrive_in_time_is_a_408(tmp_path: Path):
    with gateway(tmp_path, "--head-timeout", "300ms") as made:
        assert talk(made, b"POST /v1/chat/completions HTTP/1.1\r\n").startswith(b"HTTP/1.1 408 ")
        assert talk(made, b"") == b""


def test_no_connection_is_left_behind(small: Gateway):
    with small.connect() as idle, small.connect() as half, small.open_chat(stream=True) as asking:
        half.sendall(b"half a requ")
        read_until(asking, b"t0")
        wait_for(lambda: small.metric("llmgw_clients") == 4, "three connections and the one that asks")
        assert idle.fileno() > 0
    wait_for(lambda: small.metric("llmgw_clients") == 1, "the connections to be forgotten")
