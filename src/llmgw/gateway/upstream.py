"""Connections to engines (and to the admin socket): pooled, watched, closed at once when nobody wants the answer."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable
from typing import Any, Protocol

from llmgw.gateway.frames import Frames
from llmgw.gateway.head import DIGITS, QUICK
from llmgw.gateway.reply import HEAD_LIMIT, TOO_LARGE, AnswerBroken, Replies, Reply, around_length


class Receiver(Protocol):
    """Who asked: gets the answer piece by piece."""

    def on_reply(self, upstream: Upstream, reply: Reply) -> None:
        """The head of the answer is here; `upstream.length` is the announced size of its body."""
        ...

    def on_whole(self, upstream: Upstream, reply: Reply, body: bytes) -> None:
        """The whole answer is here, in one piece: stands for `on_reply` and `on_data`."""
        ...

    def on_data(self, upstream: Upstream, data: bytes, ended: bool) -> None:
        """A part of the body: whole chunks where `upstream.framed`, else as it is. `ended`: it was the last one."""
        ...

    def lost(self, words: str) -> None:
        """The answer cannot be completed: the connection ended, or what came is not HTTP."""
        ...

    def may_end_by_close(self) -> bool:
        """Whether an answer of unannounced length is complete when its connection ends."""
        ...


class Upstream(asyncio.Protocol):
    """One connection, one request at a time. What follows an answer costs the connection, not the answer.

    Attributes:
        framed: the body comes in chunks, and `Receiver.on_data` gets whole ones.
        length: the announced size of the body, None for a chunked one or one that ends with the connection.
        complete: the answer has ended.
    """

    def __init__(
        self, address: tuple[str, int], sock: socket.socket, replies: Replies, forget: Callable[[Upstream], None]
    ) -> None:
        self.address = address
        self.sock = sock
        self.receiver: Receiver | None = None
        self.idle_since = 0.0
        self.complete = self.framed = self.gone = False
        self.length: int | None = None
        self._replies = replies
        self._forget = forget
        self.transport: Any = None
        self._poll: select.poll | None = None
        self._reply: Reply | None = None
        self._frames = Frames()
        self._buf = b""
        self._last: tuple[bytes, bytes, int, Reply] | None = None
        self._left = 0
        self._head_only = self._surplus = self._large = self.paused = False

    def ask(self, receiver: Receiver, head: bytes, body: bytes | bytearray, head_only: bool = False) -> None:
        """Send a request; the answer goes to `receiver`. `head_only`: the answer to HEAD has no body."""
        self.receiver = receiver
        self.complete = False
        self._reply = None
        self._head_only = head_only
        if len(body) <= 65536:
            self.transport.write(head + body)
        else:
            self._large = True
            self.transport.write(head)
            self.transport.write(body)

    def reusable(self) -> bool:
        """Whether another request may follow on this connection."""
        reply = self._reply
        if not self.complete or reply is None or not reply.keep or reply.until_close:
            return False
        if self._large and self.transport.get_write_buffer_size():
            return False  # answered before it was read: what is left of the body must not be taken for a request
        return not (self._surplus or self._head_only or self.gone)

    def between_chunks(self) -> bool:
        """Whether the answer comes in chunks, and the last one read is whole."""
        return self.framed and not self.complete and self._frames.idle()

    def pause(self) -> None:
        """Stop reading: the client is slower than the engine."""
        self.paused = True
        if not self.gone:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.paused and not self.gone:
            self.paused = False
            self.transport.resume_reading()

    def abort(self) -> None:
        """Close at once: the engine must notice that nobody listens any more."""
        self.receiver = None
        self.gone = True
        self.transport.abort()

    def alive(self) -> bool:
        """Whether an idle connection can take a request: nothing has arrived on it, not even its end."""
        if self.gone:
            return False
        poll = self._poll
        if poll is None:
            poll = self._poll = select.poll()
            poll.register(self.sock.fileno(), select.POLLIN)
        return not poll.poll(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        receiver = self.receiver
        if receiver is None:
            self.abort()
            return
        try:
            if self._reply is None:
                if self._last is None or self._buf or not self._again(receiver, self._last, data):
                    self._head(receiver, data)
            elif self.framed:
                frames = self._frames
                framed = frames.feed(data)
                if frames.ended:
                    self.complete, self._surplus = True, frames.surplus
                    receiver.on_data(self, framed, True)
                elif framed:
                    receiver.on_data(self, framed, False)
            else:
                self._plain(receiver, data)
        except AnswerBroken as error:
            if self.receiver is not None:
                self.receiver.lost(error.message)

    def eof_received(self) -> bool:
        """The engine sends no more: nobody may ask on this connection, also before it is lost."""
        self.gone = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._forget(self)
        if exc is not None:
            self._read_rest()
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        reply = self._reply
        if reply is not None and reply.until_close and exc is None and receiver.may_end_by_close():
            self.complete = True
            receiver.on_data(self, b"", True)
        else:
            receiver.lost(f"it closed the connection ({exc})" if exc else "it closed the connection")

    def _read_rest(self) -> None:
        """An engine that refuses a body may close before it is sent: its answer is here though writing failed."""
        with contextlib.suppress(OSError):
            while self.receiver is not None and (data := self.sock.recv(1 << 16)):
                self.data_received(data)

    def _again(self, receiver: Receiver, last: tuple[bytes, bytes, int, Reply], data: bytes) -> bool:
        """A whole answer whose head is the last one's but for the length: nothing is left to be read in it."""
        before, after, size, reply = last
        rest = len(data) - size
        if not 1 < rest < QUICK or self._head_only:
            return False
        digits = DIGITS[rest]
        if not data.startswith(before) or not data.startswith(digits + after, len(before)):
            return False
        self._reply, self.length, self.framed, self.complete = reply, rest - len(digits), False, True
        receiver.on_whole(self, reply, data[len(digits) - rest :])
        return True

    def _head(self, receiver: Receiver, data: bytes) -> None:
        buf = self._buf + data if self._buf else data
        while True:
            end = buf.find(b"\r\n\r\n")
            if end > HEAD_LIMIT or (end < 0 and len(buf) > HEAD_LIMIT):
                raise AnswerBroken(TOO_LARGE)
            if end < 0:
                if b"\n" in buf and buf.count(b"\n") != buf.count(b"\r\n"):
                    raise AnswerBroken(f"it sent what is not HTTP ({buf[:60]!a})")
                self._buf = buf
                return
            reply, length = self._replies.read(buf[: end + 2], self._head_only)
            head, buf = buf[: end + 4], buf[end + 4 :]
            if reply.status == 101:
                raise AnswerBroken("it wants to speak another protocol")
            if reply.status >= 200:
                break
        self._buf = b""
        self._reply, self.length, self.framed = reply, length, reply.chunked
        if length == len(buf) and length and not self._head_only:
            self.complete = True
            around = around_length(head)
            self._last = (*around, sum(map(len, around)), reply) if around is not None else None
            receiver.on_whole(self, reply, buf)
            return
        self._left = -1 if length is None else length
        if reply.chunked:
            self._frames = Frames()
        receiver.on_reply(self, reply)
        if self.receiver is not receiver:
            return
        if not reply.chunked:
            if buf or not self._left:
                self._plain(receiver, buf)
        elif buf:
            framed = self._frames.feed(buf)
            self.complete, self._surplus = self._frames.ended, self._frames.surplus
            if framed or self.complete:
                receiver.on_data(self, framed, self.complete)

    def _plain(self, receiver: Receiver, data: bytes) -> None:
        if self.complete:
            self._surplus = True
            return
        if self._left >= 0:
            if len(data) > self._left:
                self._surplus = True
                data = data[: self._left]
            self._left -= len(data)
            self.complete = not self._left
        receiver.on_data(self, data, self.complete)
