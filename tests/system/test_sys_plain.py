"""Asking with a socket alone: the plain case, and giving up on everything else."""

from __future__ import annotations

import socket
import threading

import pytest

from llmgw.system import plain

LIMITS = {"timeout_s": 5.0, "connect_timeout_s": 2.0, "max_bytes": 1 << 20}


@pytest.fixture
def answering(monkeypatch):
    """`answering(bytes)`: the URL of a server that says just that, once, and closes."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    listeners, threads = [], []

    def make(data: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            talk, _ = listener.accept()
            with talk:
                asked = b""
                while not asked.endswith(b"\r\n\r\n"):
                    asked += talk.recv(4096)
                make.asked = asked
                talk.sendall(data)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/a?b=c"

    yield make
    for thread in threads:
        thread.join(5)
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n1;x=y\r\n!\r\n0\r\n\r\n", b"ok!"),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
    ],
)
def test_a_whole_answer(answering, data, body):
    answer = plain.get(answering(data), {"Accept": "text/plain"}, **LIMITS)
    assert (answer.status, answer.body) == (200, body)
    assert answering.asked.startswith(b"GET /a?b=c HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAccept: text/plain\r\n" in answering.asked


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (1 << 20),
    ],
)
def test_anything_odd_is_left_to_the_full_client(answering, data):
    assert plain.get(answering(data), {}, **LIMITS) is None


@pytest.mark.parametrize("url", ["https://127.0.0.1/", "http:///x", "http://127.0.0.1:1/x", "ftp://127.0.0.1/"])
def test_other_addresses_and_refused_connections_are_left_too(url, monkeypatch):
    assert plain.get(url, {}, **LIMITS) is None


def test_a_proxy_in_the_environment_is_left_to_the_full_client(answering, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert plain.get("http://127.0.0.1:1/", {}, **LIMITS) is None


def test_a_header_cannot_smuggle_a_second_request():
    assert plain.get("http://127.0.0.1:1/", {"X": "a\r\n\r\nGET /b HTTP/1.1"}, **LIMITS) is None
