"""The answer to a request for a model: watched for tokens and usage, written to the client as it comes."""

from __future__ import annotations

from llmgw.gateway import errors, pump
from llmgw.gateway.asking import Asking
from llmgw.gateway.engine_words import engine_words
from llmgw.gateway.errors import Answer
from llmgw.gateway.frames import deframe
from llmgw.gateway.reply import Reply
from llmgw.gateway.stats import ModelStats
from llmgw.gateway.upstream import Upstream
from llmgw.gateway.usage import ManyTokens, Tokens, strip_usage

_EVENT_END = b"\n\n\r\n"
_EDGE = 64 << 10
_USAGE = 4 << 10
# how a stream of each API says that it is complete, and the longest of these
_ENDS = (b"[DONE]", b"event: message_stop", b"event: response.completed")
_END_MARK = 32
_CUT_LIMIT = 64 << 10


class Serve(Asking):
    """One request for a model: `Asking`, and the way back of its answer, watched for tokens."""

    token_at: float | None = None
    _tail = b""
    _reply: Reply | None = None
    stats: ModelStats | None = None
    _pumped = False
    _pump: pump.Pump | None = None
    _cut = b""
    _half = b""

    def on_whole(self, upstream: Upstream, reply: Reply, body: bytes) -> None:
        """The usual end of a request that is no stream: in one piece, out in one piece."""
        if reply.status != 200 or reply.events or not self.head.http11 or self.several:
            super().on_whole(upstream, reply, body)
            return
        plane, client, replica = self.plane, self.client, self.replica
        assert replica is not None
        self.status = 200
        tokens = self.tokens = Tokens()
        tokens.read(body if len(body) <= 2 * _EDGE else body[:_EDGE] + b"\n" + body[-_EDGE:])
        if plane.balance.sick:
            plane.balance.worked(replica.replica_id)
        client.transport.write(
            b"HTTP/1.1 200 OK\r\n%bx-request-id: %b\r\nx-llmgw-queue-ms: %d\r\ncontent-length: %d\r\n%b%b\r\n%b"
            % (
                plane.lines.answered(reply.passed, replica, self.why, len(self.tried) - 1),
                self.request_id,
                self.queue_ms,
                len(body),
                plane.cors,
                b"" if client.keep else b"connection: close\r\n",
                body,
            )
        )
        now = plane.now()
        self.upstream = None
        plane.pool.give(upstream, now)
        self._ended = True
        plane.active.discard(self)
        self._count(now)
        client.answered(now)

    def on_data(self, upstream: Upstream, data: bytes, ended: bool) -> None:
        """A part of the body: watched for tokens, and written at once where it is a stream."""
        if not self._events:
            if self.status == 200 and not self._hold:
                self._scan(deframe(data) if upstream.framed and data else data)
            super().on_data(upstream, data, ended)
            return
        now = self.last = self.plane.now()
        framed = upstream.framed
        if data:
            if b'"usage"' in data or self._cut or not (self._clean and data.endswith(_EVENT_END)):
                data, framed = self._look(deframe(data) if framed else data, ended), False
            elif framed:
                self._clean = data.endswith(_EVENT_END)
            else:
                self._clean = data.endswith(b"\n\n")
            if data:
                if not upstream.framed:
                    self._tail = self._tail[-_END_MARK:] + data
                count = data.count(b"data: {")
                if count:
                    self.events += count
                    stats = self.stats
                    assert stats is not None
                    if self.first_at is None:
                        self.first_at = now
                        stats.first.add(now - self.began)
                    elif self.token_at is not None:
                        stats.gap.add(now - self.token_at)
                    self.token_at = now
                elif not data.startswith(b":") and b"\n:" not in data:
                    self.token_at = now
        if ended or self._prefix or not framed or not self._chunked:
            self._send(data, framed, ended)
            if ended:
                self._finish()
        elif data:
            self.client.transport.write(data)
            if not self._pumped and self.token_at is not None:
                self._pumped = True
                self._pump = pump.install(self, upstream)

    def usual(self) -> bool:
        """Whether nothing is held back and nothing half: the next event may pass on the short way (see `pump`)."""
        upstream = self.upstream
        if upstream is None or not upstream.between_chunks() or not self._clean or self._cut:
            return False
        return not self.client.transport.get_write_buffer_size()

    def fold(self) -> None:
        """Take over what the pump has counted."""
        if self._pump is not None:
            self._pump.fold()

    def lost(self, words: str) -> None:
        """The engine broke off: it may be about to fail others too."""
        if self.replica is not None and not self._ended:
            self.plane.balance.failed(self.replica, words)
        super().lost(words)

    def may_end_by_close(self) -> bool:
        """A stream that just stops is not a finished one."""
        return not self._events or any(mark in self._tail for mark in _ENDS)

    def resume(self) -> None:
        """The client has caught up: its own delay is not the engine's."""
        super().resume()
        self.fold()
        self._pumped, self._pump = False, None
        if self.token_at is not None:
            self.token_at = self.last

    def check(self, now: float) -> None:
        """Judge the deadlines of a stream's tokens, then the common ones."""
        self.fold()
        if self._sent_at is None or self._ended or self._paused:
            super().check(now)
            return
        options = self.plane.options
        if self.stream and self.token_at is None and now - self._sent_at > options.first_token_timeout_s:
            self._late(f"it sent no token within {options.first_token_timeout_s:g} s")
        elif self.token_at is not None and now - self.token_at > options.token_gap_timeout_s:
            self._late(f"it sent no token for {options.token_gap_timeout_s:g} s")
        else:
            super().check(now)

    def _end(self) -> None:
        if self._pump is not None:
            self._pump.fold()
            self._pump = None
        super()._end()

    def _on_head(self, upstream: Upstream, reply: Reply) -> None:  # noqa: ARG002
        replica, model, status = self.replica, self.model, reply.status
        assert replica is not None
        assert model is not None
        if status in (401, 403):
            self._fail(errors.upstream_failed(self._blame(f"it refused the gateway's own key ({status})")))
            return
        if 300 <= status < 400:
            self._fail(errors.upstream_failed(self._blame(f"it answered with a redirect ({status})")))
            return
        self._reply = reply
        self.stats = self.plane.stats.of(model.name)
        if status != 503:
            self.plane.balance.worked(replica.replica_id)
        if reply.events:
            self._events = True
            self._open(status, self._lines(), None)
        else:
            self._hold = True

    def _lines(self) -> bytes:
        assert self.replica is not None
        assert self._reply is not None
        return b"%bx-request-id: %b\r\nx-llmgw-queue-ms: %d\r\n%b%b" % (
            self.plane.lines.answered(self._reply.passed, self.replica, self.why, len(self.tried) - 1),
            self.request_id,
            self.queue_ms,
            b"x-accel-buffering: no\r\n" if self._events else b"",
            self.plane.cors,
        )

    def _look(self, body: bytes, ended: bool) -> bytes:
        """Read usage, and take it out of the stream where the client did not ask for it."""
        if self._cut:
            body, self._cut = self._cut + body, b""
        if self._strip and not ended:
            # an event that is not whole yet may be the one to leave out
            end = body.rfind(b"\n\n") + 2
            if end < 2:
                end = 0
            if len(body) - end <= _CUT_LIMIT:
                body, self._cut = body[:end], body[end:]
        seen = body
        if not self._strip and not self.several:
            # a chunk may come in two reads, with a part of the usage in each
            seen = self._half + body
            self._half = seen[seen.rfind(b"\n\n") + 1 :][-_CUT_LIMIT:]
        if b'"usage"' in seen or self.several:
            self._read_usage(seen)
            if self._strip:
                body = strip_usage(body)
        if body:
            self._clean = body.endswith(b"\n\n")
        return body

    def _read_usage(self, data: bytes) -> None:
        if self.tokens is None:
            self.tokens = ManyTokens(self.several, self._events) if self.several else Tokens()
        self.tokens.read(data)

    def _keep(self, upstream: Upstream, data: bytes, ended: bool) -> None:
        if not self._held and ended and self.status != 503:
            self._whole(data)
            return
        super()._keep(upstream, data, ended)

    def _settle(self) -> None:
        held = b"".join(self._held or ())
        if self.status == 503:
            self._not_begun(f"it answered 503: {engine_words(held)}")
        else:
            self._whole(held)

    def _whole(self, data: bytes) -> None:
        """The answer is here whole: one write."""
        if self.status == 200:
            self._read_usage(data if len(data) <= 2 * _EDGE else data[:_EDGE] + b"\n" + data[-_EDGE:])
        self._open(self.status, self._lines(), len(data))
        self._send(data, False, True)
        self._finish()

    def _send(self, data: bytes, framed: bool, ended: bool) -> None:
        if self._cut and ended:
            data, framed, self._cut = self._cut + (deframe(data) if framed and data else data), False, b""
        if not self._events and self.status == 200 and self._held is not None:
            self._scan(deframe(data) if framed and data else data)
        super()._send(data, framed, ended)

    def _scan(self, data: bytes) -> None:
        """A part of a large answer on its way through: usage may be cut in two."""
        window = self._tail + data
        if b'"usage"' in window:
            self._read_usage(window if len(window) <= 2 * _EDGE else window[:_EDGE] + b"\n" + window[-_EDGE:])
        self._tail = window[-_USAGE:]

    def _fail(self, answer: Answer) -> None:
        self.partial = self._written or self.partial
        self._cut = b""  # half an event is of no use to anybody
        super()._fail(answer)
