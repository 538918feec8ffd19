"""One request on its way to another process and its answer on the way back, written to the client as it comes.

What is written always ends between two chunks (see `frames`), so an error event can be added at any time, and a strange
engine cannot confuse a client's parser.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from llmgw.gateway.errors import Answer, own_fault, refuse, status_line, upstream_failed
from llmgw.gateway.frames import deframe, frame
from llmgw.gateway.head import RequestHead
from llmgw.gateway.reply import Reply
from llmgw.gateway.upstream import Upstream

if TYPE_CHECKING:
    from llmgw.gateway.plane import Plane
    from llmgw.gateway.pool import Cancellable
    from llmgw.gateway.protocol import Client

_LOG = logging.getLogger("llmgw.gateway")
_HOLD_LIMIT = 256 << 10
_END = b"0\r\n\r\n"


class Relay(ABC):
    """The part that every relayed answer shares. Subclasses connect, and say what becomes of the answer's head.

    Ends exactly once: `_finish` (whole answer), `_fail` (an error instead of, or inside, the answer) or `cancel`.
    Defaults are the class's, so that a request pays only for what it changes.
    """

    upstream: Upstream | None = None
    status = 0
    _headed = False
    _written = False
    _chunked = False
    _events = False
    _clean = True
    _ended = False
    _hold = False
    _held: list[bytes] | None = None
    _held_size = 0
    _prefix = b""
    _paused = False
    _endless = False
    _task: Cancellable | None = None

    def __init__(
        self, plane: Plane, client: Client, head: RequestHead, request_id: bytes, body: bytes | bytearray
    ) -> None:
        self.plane = plane
        self.client = client
        self.head = head
        self.request_id = request_id
        self.body = body
        self.began = self.last = plane.now()
        plane.active.add(self)

    def on_reply(self, upstream: Upstream, reply: Reply) -> None:
        """The head of the answer; see `Receiver`."""
        self.last = self.plane.now()
        self._headed = True
        self.status = reply.status
        self._on_head(upstream, reply)

    def on_whole(self, upstream: Upstream, reply: Reply, body: bytes) -> None:
        """The whole answer at once; see `Receiver`."""
        self.on_reply(upstream, reply)
        if not self._ended and self.upstream is upstream:
            self.on_data(upstream, body, True)

    def on_data(self, upstream: Upstream, data: bytes, ended: bool) -> None:
        """A part of the body; see `Receiver`."""
        self.last = self.plane.now()
        if self._hold:
            self._keep(upstream, deframe(data) if upstream.framed and data else data, ended)
            return
        self._send(data, upstream.framed, ended)
        if ended:
            self._finish()

    def lost(self, words: str) -> None:
        """The answer will never be complete."""
        if self._ended:
            return
        self.plane.stats.broken += 1
        self._fail(upstream_failed(self._blame(words)))

    def may_end_by_close(self) -> bool:
        """Whether an answer of unannounced length is complete when its connection ends."""
        return True

    def cancel(self) -> None:
        """The client has gone: upstream must stop working for it, at once."""
        if not self._ended:
            self.plane.stats.gone += 1
            self.status = self.status or 499
            self._end()

    def pause(self) -> None:
        """The client does not keep up: stop reading upstream."""
        self._paused = True
        self.last = self.plane.now()
        if self.upstream is not None:
            self.upstream.pause()

    def resume(self) -> None:
        """The client has caught up."""
        self._paused = False
        self.last = self.plane.now()
        if self.upstream is not None:
            self.upstream.resume()

    def check(self, now: float) -> None:
        """Judge the deadlines; called about twice a second."""
        options = self.plane.options
        if self._paused and now - self.last > options.token_gap_timeout_s:
            self.cancel()
            self.client.abort()
        elif self.upstream is not None and now - self.began > options.total_timeout_s:
            self._late(f"the answer took longer than {options.total_timeout_s:g} s")

    def drain(self) -> None:
        """The process is about to end, and waits for open answers: one that has no end of its own ends now."""
        if self._endless and not self._ended:
            self._send(b"", False, True)
            self._finish()

    def give_up(self, words: str) -> None:
        """The process ends: tell the client."""
        if not self._ended:
            self._fail(refuse(503, words, kind="server_error", code="shutting_down", retry_after_s=1, close=True))

    def _late(self, words: str) -> None:
        self._fail(upstream_failed(self._blame(words), 504, "deadline_exceeded"))

    def _blame(self, words: str) -> str:
        return words

    @abstractmethod
    def _on_head(self, upstream: Upstream, reply: Reply) -> None:
        """Look at the head of the answer: `_open`, or set `_hold` and `_open` later, or fail."""

    def _settle(self) -> None:
        """A held answer is complete."""
        self._open(self.status, self._lines(), self._held_size)
        self._send(b"".join(self._held or ()), False, True)
        self._finish()

    @abstractmethod
    def _lines(self) -> bytes:
        """The answer's own header lines."""

    def _open(self, status: int, lines: bytes, length: int | None) -> None:
        """Make the head of the answer; it is written together with the first bytes of the body."""
        head, client = self.head, self.client
        bodiless = head.method == "HEAD" or status in (204, 304)
        out = status_line(status) + lines
        if length is not None:
            if not bodiless or head.method == "HEAD":
                out += b"content-length: %d\r\n" % length
        elif not bodiless:
            if head.http11:
                self._chunked = True
                out += b"transfer-encoding: chunked\r\n"
            else:
                client.keep = False
        self._prefix = out + (b"\r\n" if client.keep else b"connection: close\r\n\r\n")

    def _keep(self, upstream: Upstream, data: bytes, ended: bool) -> None:
        if self._held is None:
            self._held = []
        self._held.append(data)
        self._held_size += len(data)
        if ended:
            self._settle()
        elif self._held_size > _HOLD_LIMIT:
            self._hold = False
            self._open(self.status, self._lines(), upstream.length)
            self._send(b"".join(self._held), False, False)
            self._held = None

    def _send(self, data: bytes, framed: bool, ended: bool) -> None:
        if self._chunked:
            if not framed and data:
                data = frame(data)
            if ended:
                data += _END
        elif framed and data:
            data = deframe(data)
        if self._prefix:
            data = self._prefix + data
            self._prefix = b""
        if data:
            self._written = True
            self.client.transport.write(data)

    def _fail(self, answer: Answer) -> None:
        written, events, clean = self._written, self._events, self._clean
        if not written:
            self.status = answer.status
        self._end()
        if not written:
            self.client.answer(answer)
        elif events:
            event = self._event(answer)
            self._send(event if clean else b"\n\n" + event, False, True)
            self.client.keep = False
            self.client.answered(self.plane.now())
        else:
            self.client.abort()

    def _event(self, answer: Answer) -> bytes:
        return b"data: " + answer.body + b"\n\n"

    def _finish(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            self.plane.pool.give(upstream, self.plane.now())
        self._end()
        self.client.answered(self.plane.now())

    def _end(self) -> None:
        self._ended = True
        self.plane.active.discard(self)
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._drop()

    def _attach(self, upstream: Upstream) -> None:
        self.upstream = upstream
        if self._paused:
            upstream.pause()

    def _drop(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.broke(error)

    def broke(self, error: BaseException) -> None:
        """A fault of ours must not leave a client waiting for ever."""
        _LOG.error("request `%s` could not be handled", self.request_id.decode("ascii"), exc_info=error)
        if not self._ended:
            self._fail(own_fault())
