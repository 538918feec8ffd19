"""One connection as the loop of the link sees it: socket, stream, codec, outbox; touched by the loop thread only."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from enum import Enum
from typing import Any

from attrs import define, frozen
from cryptography import x509

from llmgw.errors import LinkError, LlmgwError, WireError
from llmgw.units import format_duration
from llmgw.wire.codec import Codec
from llmgw.wire.stream import Stream, Want


@frozen
class LinkLimits:
    """Bounds of one link.

    Args:
        handshake_s: for dialling and the TLS handshake together.
        first_message_s: from then to the peer's first message.
        idle_s: longest silence after it, None allows any; a connection may have a shorter one of its own.
        outbox_bytes: a peer that lets more than this pile up is disconnected.
        connections: in all.
        per_address: from one IP address.
        user_timeout_s: how long sent bytes may stay unacknowledged by the peer's kernel.
        bytes_per_s, lines_per_s: what an accepted peer may send for long, read no faster than that; four seconds' worth
            may come at once. None allows any.
        linger_s: how long a closed connection is drained, so that our last words are not lost in a reset.
    """

    handshake_s: float = 10.0
    first_message_s: float = 10.0
    idle_s: float | None = None
    outbox_bytes: int = 4 << 20
    connections: int = 4096
    per_address: int = 1024
    user_timeout_s: float = 20.0
    linger_s: float = 1.0
    bytes_per_s: int | None = 1 << 20
    lines_per_s: int | None = 100


_BURST_S = 4.0


class Budget:
    """How much of a peer is read now; spent while reading, refilled by the loop's tick."""

    def __init__(self, limits: LinkLimits, now: float) -> None:
        self._bytes_per_s = float(limits.bytes_per_s if limits.bytes_per_s is not None else "inf")
        self._lines_per_s = float(limits.lines_per_s if limits.lines_per_s is not None else "inf")
        self._bytes = self._bytes_per_s * _BURST_S
        self._lines = self._lines_per_s * _BURST_S
        self._at = now

    def spend(self, count: int, lines: int) -> bool:
        """Take `count` bytes and `lines` off; True when nothing is left."""
        self._bytes -= count
        self._lines -= lines
        return self._bytes <= 0 or self._lines <= 0

    def refill(self, now: float) -> bool:
        """Add what the time since the last call gives; True when something may be read."""
        passed, self._at = now - self._at, now
        self._bytes = min(self._bytes_per_s * _BURST_S, self._bytes + self._bytes_per_s * passed)
        self._lines = min(self._lines_per_s * _BURST_S, self._lines + self._lines_per_s * passed)
        return self._bytes > 0 and self._lines > 0


class ConnState(Enum):
    """dialling -> handshake -> open -> (flushing ->) lingering -> gone."""

    DIALLING = "dialling"
    HANDSHAKE = "handshake"
    OPEN = "open"
    FLUSHING = "flushing"
    LINGERING = "lingering"
    GONE = "gone"


@define(eq=False)
class _Line:
    data: bytes
    key: str | None


class Outbox:
    """Lines waiting for the peer to take them."""

    def __init__(self) -> None:
        self._lines: deque[_Line] = deque()
        self._offset = 0
        self._head_tried = False
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def put(self, data: bytes, key: str | None) -> None:
        """Queue a line; one that waits under the same key is replaced, unless OpenSSL has already seen it."""
        if key is not None:
            for at, line in enumerate(self._lines):
                if line.key == key and not (at == 0 and self._head_tried):
                    self.bytes += len(data) - len(line.data)
                    line.data = data
                    return
        self._lines.append(_Line(data, key))
        self.bytes += len(data)

    def write_to(self, stream: Stream) -> Want | None:
        """Write as much as the stream takes; None when everything is gone.

        Raises:
            LinkError, TlsError: the connection broke.
        """
        while self._lines:
            line = self._lines[0]
            self._head_tried = True
            taken = stream.write(memoryview(line.data)[self._offset :])
            if isinstance(taken, Want):
                return taken
            self._offset += taken
            if self._offset == len(line.data):
                self._lines.popleft()
                self.bytes -= len(line.data)
                self._offset, self._head_tried = 0, False
        return None

    def clear(self) -> None:
        """Forget what was not sent."""
        self._lines.clear()
        self._offset, self._head_tried, self.bytes = 0, False, 0


@define(eq=False)
class Conn:
    """Handle of a connection: hand it back to the link to send or close.

    Args:
        address: `ip:port` of the peer.
        data: the handler's own.
        certificate: the peer's, once open; None without TLS.
        secure: TLS, though a peer that asks to join shows no certificate.
        resting: not read until the next tick, because it sent more than its budget.
    """

    sock: socket.socket
    stream: Stream
    codec: Codec
    address: str
    accepted: bool
    state: ConnState
    deadline: float | None
    outbox: Outbox
    ip: str = ""
    data: Any = None
    certificate: x509.Certificate | None = None
    secure: bool = False
    events: int = 0
    handshake_want: Want = Want.READ
    read_wants_write: bool = False
    write_wants_read: bool = False
    write_failed: LlmgwError | None = None
    paused: bool = False
    greeted: bool = False
    resting: bool = False
    budget: Budget | None = None
    idle_s: float | None = None


def longest_silence_s(conn: Conn, limits: LinkLimits) -> float | None:
    """How long an open connection's peer may say nothing; None when any silence is allowed."""
    return min((bound for bound in (limits.idle_s, conn.idle_s) if bound is not None), default=None)


def overdue(conn: Conn, limits: LinkLimits) -> LlmgwError:
    """Why a connection whose deadline has passed ends."""
    if conn.state is ConnState.OPEN and not conn.greeted:
        return WireError(f"the peer said nothing llmgw knows within {format_duration(limits.first_message_s)}")
    if conn.state is ConnState.OPEN:
        return LinkError(f"the peer was silent for {format_duration(longest_silence_s(conn, limits) or 0)}")
    what = "no answer" if conn.state is ConnState.DIALLING else "the TLS handshake was not finished"
    return LinkError(f"{what} from `{conn.address}` within {format_duration(limits.handshake_s)}")


def tune(sock: socket.socket, user_timeout_s: float) -> None:
    """Non-blocking, no delay, and a peer that is gone is noticed by the kernel too."""
    sock.setblocking(False)
    # A unix socket, or an exotic kernel, knows none of these: the application's own deadlines remain.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_s * 1000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def show_address(peer: Any) -> str:
    """`ip:port`, IPv6 in brackets."""
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"[{peer[0]}]:{peer[1]}" if ":" in str(peer[0]) else f"{peer[0]}:{peer[1]}"
    return str(peer) or "a local socket"
