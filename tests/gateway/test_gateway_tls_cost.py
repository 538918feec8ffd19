"""What connections over TLS cost in memory: little, and nothing once they have failed."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from gateway_fakes import Gateway

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"


def rss_kb(made: Gateway) -> int:
    fields = Path(f"/proc/{made.process.pid}/status").read_text().split()
    return int(fields[fields.index("VmRSS:") + 1])


@pytest.fixture
def secure(start: Callable[..., Gateway], tmp_path: Path) -> tuple[Gateway, ssl.SSLContext]:
    authority = trustme.CA()
    cert = authority.issue_cert("gateway")
    cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    made = start("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with made.connect() as sock, context.wrap_socket(sock, server_hostname="gateway") as tls:
        tls.sendall(HEALTH)
        assert tls.recv(4096).startswith(b"HTTP/1.1 200 ")
    return made, context


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00\x05hello"])
def test_handshakes_that_fail_leave_nothing_behind(secure: tuple[Gateway, ssl.SSLContext], said: bytes) -> None:
    made, _ = secure
    before = rss_kb(made)
    for _ in range(300):
        with made.connect() as sock, contextlib.suppress(OSError):
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    # with asyncio's own buffers it was 270 KB for each
    assert rss_kb(made) - before < 300 * 50


def test_an_idle_connection_costs_less_than_100_kilobytes(secure: tuple[Gateway, ssl.SSLContext]) -> None:
    made, context = secure
    with contextlib.ExitStack() as stack:
        before = rss_kb(made)
        for _ in range(100):
            tls = stack.enter_context(context.wrap_socket(made.connect(), server_hostname="gateway"))
            tls.sendall(HEALTH)
            assert tls.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert rss_kb(made) - before < 100 * 100
