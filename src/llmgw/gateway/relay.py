"""One request on its way to another process and its answer on the way back, written to the client as it comes.

The body is framed anew (one chunk per read) instead of copying the engine's chunk headers: so the gateway always knows
that it stands between two chunks and can add an error event, and a strange engine cannot confuse a client's parser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from llmgw.gateway.errors import Answer, refuse, status_line, upstream_failed
from llmgw.gateway.head import RequestHead
from llmgw.gateway.upstream import Upstream

if TYPE_CHECKING:
    from llmgw.gateway.plane import Plane
    from llmgw.gateway.protocol import Client

_HOLD_LIMIT = 256 << 10


class Relay:
    """The part that every relayed answer shares. Subclasses connect, and say what becomes of the answer's head.

    Ends exactly once: `_finish` (whole answer), `_fail` (an error instead of, or inside, the answer) or `cancel`.
    """

    def __init__(self, plane: Plane, client: Client, head: RequestHead, body: bytes | bytearray) -> None:
        self.plane = plane
        self.client = client
        self.head = head
        self.body = body
        self.upstream: Upstream | None = None
        self.began = plane.now()
        self.last = self.began
        self.status = 0
        self._headed = False
        self._written = False
        self._chunked = False
        self._events = False
        self._clean = True
        self._ended = False
        self._hold = False
        self._held: list[bytes] = []
        self._held_size = 0
        self._prefix = b""
        self._paused = False
        self._task: asyncio.Task[None] | None = None
        plane.active.add(self)

    def received(self, upstream: Upstream) -> None:
        """News from upstream; see `Receiver`."""
        self.last = self.plane.now()
        if not self._headed:
            if not upstream.headed:
                if upstream.fault:
                    self.lost(upstream.fault)
                return
            self._headed = True
            self._on_head(upstream)
            if self._ended:
                return
        pieces = upstream.take()
        if self._hold:
            self._keep(upstream, pieces)
            return
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if body:
            self._on_body(body)
        self._write(body, upstream.complete)
        if upstream.complete:
            self._finish()
        elif upstream.fault:
            self.lost(upstream.fault)

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

    def give_up(self, words: str) -> None:
        """The process ends: tell the client."""
        if not self._ended:
            self._fail(refuse(503, words, kind="server_error", code="shutting_down", retry_after_s=1, close=True))

    def _late(self, words: str) -> None:
        self._fail(upstream_failed(self._blame(words), 504, "deadline_exceeded"))

    def _blame(self, words: str) -> str:
        return words

    def _on_head(self, upstream: Upstream) -> None:
        """Look at the head of the answer: set `_prefix`, or `_hold` and `_prefix` later, or fail."""
        raise NotImplementedError

    def _on_body(self, body: bytes) -> None:
        """Body bytes that are about to be written."""

    def _settle(self, upstream: Upstream) -> None:  # noqa: ARG002
        """A held answer is complete."""
        self._open(self.status, self._lines(), self._held_size)
        self._write(b"".join(self._held), True)
        self._finish()

    def _lines(self) -> bytes:
        """The answer's own header lines."""
        raise NotImplementedError

    def _open(self, status: int, lines: bytes, length: int | None) -> None:
        """Make the head of the answer; it is written together with the first bytes of the body."""
        self._chunked = length is None and self.head.http11 and not self._bodiless(status)
        out = [status_line(status), lines]
        if length is not None and not (self._bodiless(status) and self.head.method != "HEAD"):
            out.append(b"content-length: %d\r\n" % length)
        elif self._chunked:
            out.append(b"transfer-encoding: chunked\r\n")
        if length is None and not self._chunked and not self._bodiless(status):
            self.client.keep = False
        if not self.client.keep:
            out.append(b"connection: close\r\n")
        out.append(b"\r\n")
        self._prefix = b"".join(out)

    def _bodiless(self, status: int) -> bool:
        return self.head.method == "HEAD" or status in (204, 304)

    def _keep(self, upstream: Upstream, pieces: list[bytes]) -> None:
        self._held += pieces
        self._held_size += sum(map(len, pieces))
        if upstream.complete:
            self._settle(upstream)
        elif upstream.fault:
            self.lost(upstream.fault)
        elif self._held_size > _HOLD_LIMIT:
            self._hold = False
            self._open(self.status, self._lines(), upstream.length)
            self._write(b"".join(self._held), False)
            self._held = []

    def _write(self, body: bytes, complete: bool) -> None:
        if self._chunked:
            framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            out = self._prefix + framed + b"0\r\n\r\n" if complete else self._prefix + framed
        else:
            out = self._prefix + body
        if out:
            self._prefix = b""
            self._written = True
            self.client.write(out)

    def _fail(self, answer: Answer) -> None:
        written, events, clean = self._written, self._events, self._clean
        if not written:
            self.status = answer.status
        self._end()
        if not written:
            self.client.answer(answer)
        elif events:
            event = b"data: " + answer.body + b"\n\n"
            self._write(event if clean else b"\n\n" + event, True)
            self.client.keep = False
            self.client.answered()
        else:
            self.client.abort()

    def _finish(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            self.plane.pool.give(upstream)
        self._end()
        self.client.answered()

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
        self._task = asyncio.get_running_loop().create_task(work)
