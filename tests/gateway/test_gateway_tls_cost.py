"""What connections over TLS cost in memory: little, and nothing once they have failed."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_fakes import Gateway, gateway

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"


def rss_kb(made: Gateway) -> int:
    fields = Path(f"/proc/{made.process.pid}/status").read_text().split()
    return int(fields[fields.index("VmRSS:") + 1])


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Gateway]:
    with gateway(tmp_path, secure=True) as made:
        assert made.fetch("GET", "/healthz")[0] == 200
        yield made


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00\x05hello"])
def test_handshakes_that_fail_leave_nothing_behind(secure: Gateway, said: bytes) -> None:
    before = rss_kb(secure)
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", secure.port), timeout=20) as sock, contextlib.suppress(OSError):
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    # with asyncio's own buffers it was 270 KB for each
    assert rss_kb(secure) - before < 300 * 50


def test_an_idle_connection_costs_less_than_100_kilobytes(secure: Gateway) -> None:
    with contextlib.ExitStack() as stack:
        before = rss_kb(secure)
        for _ in range(100):
            tls = stack.enter_context(secure.connect())
            tls.sendall(HEALTH)
            assert tls.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert rss_kb(secure) - before < 100 * 100
