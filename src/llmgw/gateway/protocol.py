"""A client's connection: heads and bodies in, answers out, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from typing import Any

from llmgw.domain.routing import RouteKey
from llmgw.gateway.admin import AdminRelay
from llmgw.gateway.bodies import ChunkedBody, apply_caps, prefix_of, read_asked, too_large
from llmgw.gateway.dialects import anthropic_error, is_anthropic
from llmgw.gateway.errors import Answer, RequestRefused, malformed, own_fault, refuse, status_line
from llmgw.gateway.forms import read_form
from llmgw.gateway.head import DIGITS, Known, RequestHead, incomplete_is_hopeless, read_head, speaks_tls
from llmgw.gateway.keys import check_expiry
from llmgw.gateway.lane import find_lane
from llmgw.gateway.plane import Plane
from llmgw.gateway.relay import Relay
from llmgw.gateway.surface import Goal, aim
from llmgw.gateway.tls import operator_of

_LOG = logging.getLogger("llmgw.gateway")
_LAST_S = 1.0
_LINGER_S = 2.0
_LINGER_MOST_S = 30.0
_FLUSH_S = 30.0
_BODY_BYTES_PER_S = 32 << 10


# what a connection is doing: reading a head or a body, waiting for its answer's end, nothing any more
_HEAD, _BODY, _BUSY, _CLOSING = range(4)


class Client(asyncio.Protocol):
    """One client connection.

    Bytes that come while an answer is under way are the next request: they wait, up to the size of a head; a client
    that sends more gets its answer and then has to connect anew. So reading never stops, and a client's leaving is
    always seen.
    """

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.keep = True
        self.peer = ""
        self.peer_text = b""
        self.secure = False
        self.operator = ""
        self.transport: Any = None
        self._stage = _HEAD
        self._buf = b""
        self._head: RequestHead | None = None
        self._id = b""
        self._length = 0
        self._key: RouteKey | None = None
        self._goal = Goal.MODEL
        self._body = bytearray()
        self._known: Known | None = None
        self._chunks: ChunkedBody | None = None
        self._relay: Relay | None = None
        self._deadline: float | None = None
        self._linger_until = 0.0
        self._spilt = self._begun = False
        self._choked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self.peer_text = self.peer.encode("ascii", "replace")
        tls = transport.get_extra_info("ssl_object")
        self.secure = isinstance(tls, (ssl.SSLObject, ssl.SSLSocket))
        self.operator = operator_of(tls) if self.secure else ""
        self.transport.set_write_buffer_limits(high=65536)
        self.plane.clients.add(self)
        self._deadline = self.plane.now() + (_LAST_S if self.plane.draining else self.plane.options.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._stage = _CLOSING
        self.plane.clients.discard(self)
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.cancel()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._choked = True
        if self._relay is not None:
            self._relay.pause()

    def resume_writing(self) -> None:
        self._choked = False
        if self._relay is not None:
            self._relay.resume()

    def data_received(self, data: bytes) -> None:
        stage = self._stage
        if stage is _HEAD:
            known = self._known
            if known is None or self._buf or not self._again(known, data):
                self._buf = self._buf + data if self._buf else data
                self._advance()
        elif stage is _BODY:
            self._buf = data
            self._advance()
        elif stage is _BUSY:
            if len(self._buf) + len(data) > self.plane.options.max_head_bytes:
                self.keep, self._buf, self._spilt = False, b"", True
            elif self.keep:
                self._buf += data
        elif not self.plane.draining and self._deadline is not None:
            # still sending what nobody reads: a slow client gets to see the answer too
            self._deadline = max(self._deadline, min(self.plane.now() + _LINGER_S, self._linger_until))

    def abort(self) -> None:
        """Cut the connection: the only honest end of an answer that cannot be completed."""
        self._relay = None
        self._stage = _CLOSING
        self.transport.abort()

    def answer(self, answer: Answer) -> None:
        """Write a whole answer of our own."""
        head = self._head
        if answer.close or self.plane.draining:
            self.keep = False
        body, more = answer.body, b""
        if head is not None and is_anthropic(head.path):
            body, more = anthropic_error(answer.status, body, self._id), b"request-id: %b\r\n" % self._id
        lines = [status_line(answer.status), b"content-type: %b\r\n" % answer.content_type.encode("ascii")]
        lines += [f"{name}: {value}\r\n".encode("latin-1", "replace") for name, value in answer.headers]
        if head is not None:
            lines.append(b"x-request-id: %b\r\n%b%b" % (self._id, more, self.plane.cors))
        if answer.status != 204:
            lines.append(b"content-length: %d\r\n" % len(body))
        if not self.keep:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        if head is None or head.method != "HEAD":
            lines.append(body)
        self.transport.write(b"".join(lines))
        self.answered(self.plane.now())

    def answered(self, now: float) -> None:
        """The answer is written: the next request, or the end."""
        stage = self._stage
        self._relay = self._head = self._chunks = None
        if not self.keep or self.plane.draining:
            self._close(linger=self._spilt or stage is _HEAD or stage is _BODY)
            return
        self._stage = _HEAD
        self._deadline = now + self.plane.options.keepalive_s
        if self._buf:
            asyncio.get_running_loop().call_soon(self._advance)

    def drain(self) -> None:
        """The process ends: the next request on this connection is the last one, and is not waited for long.

        It may be on its way already: closed at once, its client would not know whether it was begun.
        """
        self.keep = False
        if self._stage is _HEAD and not self._buf:
            self._deadline = self.plane.now() + _LAST_S
        elif self._relay is not None:
            self._relay.drain()

    def check(self, now: float) -> None:
        """Judge the deadline of whatever the client is to do next."""
        if self._deadline is None or now < self._deadline:
            return
        if self._stage is _CLOSING:
            self.transport.abort()
        elif self._stage is _HEAD and not self._buf:
            self._close(linger=False)
        elif self._stage is not _BUSY:
            late = refuse(408, "the request did not arrive in time", code="request_timeout", close=True)
            self._count(late)
            self.answer(late)

    def _again(self, known: Known, data: bytes) -> bool:
        """A whole request whose head is the last one's but for the length: nothing is left to be read in it."""
        plane, before = self.plane, known.before
        rest = len(data) - known.size
        if not 0 < rest < plane.quick or known.epoch is not plane.heads.epoch or not before:
            return False
        digits = DIGITS[rest]
        if not data.startswith(before) or not data.startswith(digits + known.after, len(before)):
            return False
        head = self._head = known.head
        self._goal, self._key = known.goal, known.key
        self._id = plane.new_request_id()
        self.keep = head.keep_alive and not plane.draining
        try:
            self._go(head, data[len(digits) - rest :])
        except Exception as error:
            self._failed(error)
        return True

    def _advance(self) -> None:
        try:
            while self._stage in (_HEAD, _BODY) and (self._buf or self._stage is _BODY):
                if not (self._read_head() if self._stage is _HEAD else self._read_body()):
                    return
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Answer a refusal, and a fault of ours too: a client that is cut off does not know what to make of it."""
        if isinstance(error, RequestRefused):
            answer = error.answer
        elif self._relay is not None:
            self._relay.broke(error)
            if self._relay is not None:
                self.abort()  # it had ended before
            return
        else:
            _LOG.error("a request could not be handled", exc_info=error)
            if self._stage is not _BUSY:
                self.abort()
                return
            answer = own_fault()
        self._count(answer)
        self.answer(answer)

    def _count(self, answer: Answer) -> None:
        head, plane = self._head, self.plane
        if head is None or head.path.startswith("/v1"):
            plane.stats.count("", answer.status)
        books = plane.books
        if head is not None and (books.log.on or books.watched):
            books.refused(head.path, self._id, self._key.name if self._key is not None else None, self.peer, answer)

    def _read_head(self) -> bool:
        """True when there may be more to do at once."""
        buf, options = self._buf, self.plane.options
        end = buf.find(b"\r\n\r\n", 0, options.max_head_bytes)
        if end < 0:
            if len(buf) >= options.max_head_bytes:
                raise malformed(
                    f"the request head is larger than {options.max_head_bytes} bytes", 431, "head_too_large"
                )
            if incomplete_is_hopeless(buf):
                raise malformed("a line of the request head does not end in CR LF")
            if speaks_tls(buf):
                raise malformed("this is TLS, and the gateway speaks plain HTTP here: use `http://`")
            if not self._begun:
                # what was left of the time between two requests is not this head's
                self._begun = True
                self._deadline = self.plane.now() + (_LAST_S if self.plane.draining else options.head_timeout_s)
            return False
        plane = self.plane
        self._head, self._begun = None, False
        known, name, length = plane.heads.find(buf[: end + 2])
        self._buf = buf[end + 4 :] if len(buf) > end + 4 else b""
        self._known = known
        if known is not None:
            head = self._head = known.head
            self._goal, self._key = known.goal, known.key
            self._id = plane.new_request_id()
            self.keep = head.keep_alive and not plane.draining
        else:
            self._key = None
            head = self._head = read_head(buf[: end + 2])
            if head.length != length:
                # it is written in a way that `find` does not see: kept, the same head would be found with a length of 0
                length, name = head.length, b""
            self._id = head.request_id or plane.new_request_id()
            self.keep = head.keep_alive and not plane.draining
        if length > options.max_body_bytes:
            raise too_large(options.max_body_bytes)
        self._length = length
        here = not head.chunked and len(self._buf) >= length
        if known is None and not self._aim(head, buf[: end + 4], name, here):
            return True
        if here:
            if len(self._buf) == length:
                body, self._buf = self._buf, b""
            else:
                body, self._buf = self._buf[:length], self._buf[length:]
            self._go(head, body)
            return True
        self._stage = _BODY
        self._body = bytearray()
        self._chunks = ChunkedBody(options.max_body_bytes) if head.chunked else None
        expected = options.max_body_bytes if head.chunked else length
        self._deadline = self.plane.now() + options.head_timeout_s + expected / _BODY_BYTES_PER_S
        if head.expects_continue and not self._buf:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return bool(self._buf)

    def _aim(self, head: RequestHead, raw: bytes, name: bytes, here: bool) -> bool:
        """Decide by the head alone; False when it is answered already."""
        plane = self.plane
        try:
            goal, self._key = aim(plane, head)
        except RequestRefused as refused:
            goal = refused.answer
            self._count(goal)
        if isinstance(goal, Answer):
            self._early(goal, here)
            return False
        self._goal = goal
        if goal is Goal.MODEL:
            self._known = known = Known(raw, head, goal, self._key, plane.heads.epoch)
            if head.request_id or head.boundary:
                known.before = b""  # it will not come again
            else:
                plane.heads.keep(name, known)
        return True

    def _early(self, answer: Answer, here: bool) -> None:
        """Answer by the head alone; a body that is not here yet is not waited for."""
        assert self._head is not None
        if here:
            self._buf = self._buf[self._length :]
            self._stage = _BUSY
        else:
            self.keep = False
        self.answer(answer)

    def _read_body(self) -> bool:
        head, buf = self._head, self._buf
        assert head is not None
        if self._chunks is not None:
            self._buf = b""
            rest = self._chunks.feed(buf)
            if rest is None:
                return False
            body, self._buf = self._chunks.body, rest
        else:
            need = self._length - len(self._body)
            self._body += buf[:need]
            self._buf = buf[need:]
            if len(self._body) < self._length:
                return False
            body = self._body
        self._body = bytearray()
        self._go(head, body)
        return True

    def _go(self, head: RequestHead, body: bytes | bytearray) -> None:
        """The request is here whole: send it where it goes."""
        self._stage = _BUSY
        self._deadline = None
        plane, key, known = self.plane, self._key, self._known
        if self._goal is Goal.ADMIN:
            admin = AdminRelay(plane, self, head, self._id, body)
            self._begin(admin)
            admin.start()
            return
        assert known is not None
        if known.epoch is not plane.heads.epoch:
            # a snapshot came while the body did
            key = self._key = plane.keys.check(head)
            known = self._known = Known(b"", head, self._goal, key, plane.heads.epoch)
        if key is not None and key.expires is not None:
            check_expiry(key)
        asked = read_asked(body) if head.boundary is None else read_form(body, head.boundary)
        lane = known.lanes.get(asked.model)
        if lane is None:
            lane = find_lane(plane, known, asked.model or "")
        now = plane.now()
        if lane.budget is not None:
            over = lane.budget.take(now)
            if over is not None:
                raise RequestRefused(plane.keys.limited(lane.key, over))
        if lane.caps is not None:
            body = apply_caps(body, head.path, lane.caps)
        serve = lane.serve(plane, self, head, self._id, body, asked, lane, now)
        if lane.many:
            serve.prefix = prefix_of(asked)
        self._relay = serve
        if self._choked:
            serve.pause()
        plane.balance.admit(serve)

    def _begin(self, relay: Relay) -> None:
        self._relay = relay
        if self._choked:
            relay.pause()

    def _close(self, linger: bool) -> None:
        """Close; lingering reads away what is still coming, since a reset could overtake the answer."""
        self._stage = _CLOSING
        self._buf = b""
        now = self.plane.now()
        if linger and not self.transport.is_closing():
            self._deadline, self._linger_until = now + _LINGER_S, now + _LINGER_MOST_S
            if self.transport.can_write_eof():
                # who waits for this may be another's request: a client that has gone is not its fault
                with contextlib.suppress(OSError):
                    self.transport.write_eof()
        else:
            self._deadline = now + _FLUSH_S
            self.transport.close()
