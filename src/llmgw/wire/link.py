"""One thread, one selectors loop, every socket: plain or TLS, accepted or dialled.

OpenSSL forbids two threads on one connection, so nobody but the loop touches a socket: `send`, `close`, `pause` post to
it. A handler's methods run on the loop thread and must return at once.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from OpenSSL import SSL

from llmgw.errors import LinkError, LlmgwError, WireError
from llmgw.system.clock import Clock
from llmgw.wire.codec import Codec
from llmgw.wire.conn import Conn, ConnState, LinkLimits, Outbox, longest_silence_s, overdue, show_address, tune
from llmgw.wire.door import ContextSource, Door, open_listening
from llmgw.wire.handler import LinkHandler
from llmgw.wire.messages import Message, Refused, encode
from llmgw.wire.stream import CLOSED, PlainStream, Stream, TlsStream, Want, os_words

log = logging.getLogger(__name__)

__all__ = ["Link", "LinkHandler"]

_READ_BYTES = 16 << 10
_READS_PER_TURN = 16
_TICK_S = 0.25
_CLOSING = (ConnState.FLUSHING, ConnState.LINGERING, ConnState.GONE)


class Link:
    """Owner of connections.

    Args:
        handler: told what happens.
        clock: for deadlines.
        limits: bounds.
        name: of the thread.
    """

    def __init__(
        self, handler: LinkHandler, clock: Clock, limits: LinkLimits | None = None, name: str = "link"
    ) -> None:
        self._handler = handler
        self._clock = clock
        self._limits = limits or LinkLimits()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._posted: deque[Callable[[], None]] = deque()
        self._post_lock = threading.Lock()
        self._over = False
        self._conns: set[Conn] = set()
        self._again: set[Conn] = set()
        self._door = Door(self._selector, clock, self._limits)
        self._next_tick = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the loop thread."""
        self._thread.start()

    def stop(self, words: str = "llmgw is stopping") -> None:
        """Close every connection and end the loop thread; harmless when done twice."""
        posted = self._post(lambda: self._end(words))
        if self._thread.is_alive():
            self._thread.join()
        elif posted:
            while self._posted:
                self._posted.popleft()()

    def listen(self, host: str, port: int, context: ContextSource | None = None) -> int:
        """Accept connections; with `context`, TLS ones. Returns the port, chosen by the kernel when `port` is 0.

        Raises:
            AddressInUse, LinkError: the address cannot be listened on.
        """
        sock = open_listening(host, port)
        bound: int = sock.getsockname()[1]
        if not self._post(lambda: self._door.add(sock, context)):
            sock.close()
            raise LinkError(f"cannot listen on `{host}:{port}`", cause="llmgw is stopping")
        return bound

    def dial(self, family: int, address: Any, host: str, context: SSL.Context | None, data: Any = None) -> Conn:
        """Begin to connect to one resolved address; `opened` or `closed` tells how it went.

        Args:
            family, address: from `getaddrinfo`.
            host: the name the server's certificate must be for.
            context: None for plain text.
            data: becomes `Conn.data`.

        Raises:
            LinkError: not even a socket could be had.
        """
        sock = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            tune(sock, self._limits.user_timeout_s)
            code = sock.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            stream: Stream = PlainStream(sock) if context is None else TlsStream(sock, context, host)
        except (OSError, UnicodeError) as error:
            if sock is not None:
                sock.close()
            cause = os_words(error) if isinstance(error, OSError) else "its name is not a host name"
            raise LinkError(f"cannot connect to `{show_address(address)}`", cause=cause) from error
        deadline = self._clock.monotonic() + self._limits.handshake_s
        codec = Codec(peer_welcomes=True)
        conn = Conn(
            sock, stream, codec, show_address(address), False, ConnState.DIALLING, deadline, Outbox(), data=data
        )
        conn.secure = context is not None
        if not self._post(lambda: self._adopt(conn)):
            sock.close()
            raise LinkError(f"cannot connect to `{conn.address}`", cause="llmgw is stopping")
        return conn

    def send(self, conn: Conn, message: Message, replace_key: str | None = None) -> None:
        """Queue a message; dropped without a word when the connection is closing, which `closed` tells.

        Args:
            replace_key: a message still waiting under the same key is replaced, so that stale ones never pile up.

        Raises:
            WireError: the message is too long or cannot be said in JSON.
        """
        line = encode(message)
        self._post(lambda: self._queue(conn, line, replace_key))

    def close(self, conn: Conn, error: LlmgwError, last: Message | None = None) -> None:
        """Send what is queued, then `last`, then close. One step: a peer that goes on hearing it changes no words."""
        line = b"" if last is None else encode(last)
        self._post(lambda: self._close(conn, error, flush=True, line=line))

    def greet(self, conn: Conn, idle_s: float) -> None:
        """The peer is about to be welcomed: allow it lines of full length and `idle_s` of silence (or the link's own
        bound, when that is shorter).
        """
        self._post(lambda: self._greet(conn, idle_s))

    def pause(self, conn: Conn, paused: bool) -> None:
        """Stop or go on reading from a peer that sends faster than its messages are handled."""
        self._post(lambda: self._set_paused(conn, paused))

    def _post(self, call: Callable[[], None]) -> bool:
        with self._post_lock:
            if self._over:
                return False
            self._posted.append(call)
            if threading.current_thread() is not self._thread:
                os.eventfd_write(self._wake, 1)
            return True

    # Everything below runs on the loop thread.

    def _run(self) -> None:
        while not self._over:
            timeout = 0.0 if self._again or self._posted else _TICK_S
            for key, mask in self._selector.select(timeout):
                if key.fd == self._wake:
                    os.eventfd_read(self._wake)
                elif isinstance(key.data, Conn):
                    self._guard(key.data, mask)
                else:
                    for conn in self._door.accept(key.fileobj):  # type: ignore[arg-type]
                        self._adopt(conn)
            again, self._again = self._again, set()
            for conn in again:
                self._guard(conn, selectors.EVENT_READ)
            while self._posted and not self._over:
                self._posted.popleft()()
            now = self._clock.monotonic()
            if now >= self._next_tick:
                self._next_tick = now + _TICK_S
                self._tick(now)

    def _guard(self, conn: Conn, mask: int) -> None:
        try:
            self._turn(conn, mask)
        except LlmgwError as error:
            self._close(conn, error, flush=False)
        except Exception as error:
            log.exception("fault in the link, connection with %s closed", conn.address)
            self._close(conn, LinkError("a fault inside llmgw", cause=type(error).__name__), flush=False)

    def _turn(self, conn: Conn, mask: int) -> None:
        if conn.state is ConnState.DIALLING:
            code = conn.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                cause = os_words(OSError(code, os.strerror(code)))
                raise LinkError(f"cannot connect to `{conn.address}`", cause=cause)
            conn.state = ConnState.HANDSHAKE
        if conn.state is ConnState.HANDSHAKE:
            want = conn.stream.handshake()
            if want is not None:
                conn.handshake_want = want
            else:
                conn.state = ConnState.OPEN
                conn.certificate = conn.stream.certificate()
                conn.deadline = self._clock.monotonic() + self._limits.first_message_s
                self._handler.opened(conn)
        if conn.state is ConnState.OPEN and (mask & selectors.EVENT_READ or conn.read_wants_write):
            self._read(conn)
            if conn.write_failed is not None and conn not in self._again:
                raise conn.write_failed
        if conn.state in (ConnState.OPEN, ConnState.FLUSHING):
            self._write(conn)
        elif conn.state is ConnState.LINGERING:
            self._drain(conn)
        self._watch(conn)

    def _read(self, conn: Conn) -> None:
        conn.read_wants_write = False
        for _ in range(_READS_PER_TURN):
            if conn.paused or conn.resting:
                return
            data = conn.stream.read(_READ_BYTES)
            if isinstance(data, Want):
                conn.read_wants_write = data is Want.WRITE
                return
            if not data:
                raise conn.write_failed or LinkError(CLOSED)
            before = conn.codec.lines
            for message in conn.codec.feed(data):
                conn.greeted = True
                self._handler.received(conn, message)
                if conn.state is not ConnState.OPEN:
                    return
            if conn.greeted:
                conn.deadline = self._idle_deadline(conn)
            if conn.codec.fault is not None:
                raise conn.codec.fault
            if conn.budget is not None and conn.budget.spend(len(data), conn.codec.lines - before):
                conn.resting = True
                return
        self._again.add(conn)

    def _write(self, conn: Conn) -> None:
        if conn.write_failed is None:
            try:
                want = conn.outbox.write_to(conn.stream)
                conn.write_wants_read = want is Want.READ
            except LlmgwError as error:
                # What the peer said before it went (a refusal, an alert) is still to be read and says more.
                conn.write_failed = error
                conn.outbox.clear()
                self._again.add(conn)
        if conn.state is ConnState.FLUSHING and not conn.outbox:
            conn.stream.goodbye()
            conn.state = ConnState.LINGERING
            self._drain(conn)

    def _drain(self, conn: Conn) -> None:
        try:
            for _ in range(_READS_PER_TURN):
                if not conn.sock.recv(_READ_BYTES):
                    self._forget(conn)
                    return
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._forget(conn)

    def _watch(self, conn: Conn) -> None:
        if conn.state is ConnState.GONE:
            return
        if conn.state is ConnState.DIALLING:
            events = selectors.EVENT_WRITE
        elif conn.state is ConnState.HANDSHAKE:
            events = selectors.EVENT_READ if conn.handshake_want is Want.READ else selectors.EVENT_WRITE
        elif conn.state is ConnState.FLUSHING:
            events = selectors.EVENT_READ if conn.write_wants_read else selectors.EVENT_WRITE
        elif conn.state is ConnState.LINGERING:
            events = selectors.EVENT_READ
        else:
            events = 0 if conn.paused or conn.resting else selectors.EVENT_READ
            if conn.read_wants_write or (conn.outbox and not conn.write_wants_read):
                events |= selectors.EVENT_WRITE
        if events != conn.events:
            if not conn.events:
                self._selector.register(conn.sock, events, conn)
            elif not events:
                self._selector.unregister(conn.sock)
            else:
                self._selector.modify(conn.sock, events, conn)
            conn.events = events
        if conn.state is ConnState.OPEN and not conn.paused and not conn.resting and conn.stream.pending():
            self._again.add(conn)

    def _queue(self, conn: Conn, line: bytes, key: str | None) -> None:
        if conn.state is not ConnState.OPEN or conn.write_failed is not None:
            return
        conn.outbox.put(line, key)
        if conn.outbox.bytes > self._limits.outbox_bytes:
            words = f"{conn.outbox.bytes} bytes wait for it, {self._limits.outbox_bytes} are allowed"
            self._close(conn, LinkError("the peer does not take what is sent to it", cause=words), flush=False)
            return
        self._guard(conn, 0)

    def _close(self, conn: Conn, error: LlmgwError, *, flush: bool, line: bytes = b"") -> None:
        """Decide that a connection ends: tell the handler now, let the socket go when the peer has heard our last."""
        if line:
            self._queue(conn, line, None)
        if conn.state in _CLOSING:
            if conn.state is ConnState.FLUSHING and not flush:
                self._forget(conn)
            return
        was_open = conn.state is ConnState.OPEN
        dialling = conn.state is ConnState.DIALLING
        conn.state = ConnState.FLUSHING
        conn.deadline = self._clock.monotonic() + self._limits.linger_s
        conn.paused = False
        if isinstance(error, WireError) and conn.accepted and was_open and conn.write_failed is None:
            conn.outbox.put(encode(Refused(error.code, error.words())), None)
        elif not (flush and was_open):
            conn.outbox.clear()
        try:
            self._handler.closed(conn, error)
        except Exception:
            log.exception("fault while telling that the connection with %s closed", conn.address)
        conn.resting = False
        if dialling:
            self._forget(conn)
        else:
            self._guard(conn, 0)

    def _forget(self, conn: Conn) -> None:
        conn.state = ConnState.GONE
        if conn.events:
            self._selector.unregister(conn.sock)
            conn.events = 0
        conn.sock.close()
        self._conns.discard(conn)
        self._again.discard(conn)
        self._door.left(conn)

    def _greet(self, conn: Conn, idle_s: float) -> None:
        conn.codec.raise_limit()
        conn.idle_s = idle_s
        if conn.state is ConnState.OPEN and not conn.paused:
            conn.deadline = self._idle_deadline(conn)

    def _idle_deadline(self, conn: Conn) -> float | None:
        silence_s = longest_silence_s(conn, self._limits)
        return None if silence_s is None else self._clock.monotonic() + silence_s

    def _set_paused(self, conn: Conn, paused: bool) -> None:
        if conn.state is not ConnState.OPEN or conn.paused == paused:
            return
        conn.paused = paused
        # Our own slowness is not the peer's silence.
        conn.deadline = None if paused else self._idle_deadline(conn)
        if not paused:
            self._again.add(conn)
        self._watch(conn)

    def _adopt(self, conn: Conn) -> None:
        self._conns.add(conn)
        if conn.state is ConnState.DIALLING:
            self._watch(conn)
        else:
            self._guard(conn, selectors.EVENT_READ)

    def _tick(self, now: float) -> None:
        self._door.tick(now)
        for conn in [each for each in self._conns if each.budget is not None and each.budget.refill(now)]:
            if conn.resting:
                conn.resting = False
                self._again.add(conn)
                self._watch(conn)
        for conn in [each for each in self._conns if each.deadline is not None and now >= each.deadline]:
            if conn.state in _CLOSING:
                self._forget(conn)
            else:
                self._close(conn, overdue(conn, self._limits), flush=False)

    def _end(self, words: str) -> None:
        with self._post_lock:
            self._over = True
        self._door.close()
        for conn in list(self._conns):
            self._close(conn, LinkError(words), flush=True)
            if conn.state is not ConnState.GONE:
                conn.stream.goodbye()
                self._forget(conn)
        self._selector.close()
        os.close(self._wake)
