"""A request for a model: wait for a slot, ask a replica, retry only what no engine can have begun."""

from __future__ import annotations

import logging
from collections.abc import Set
from functools import lru_cache
from typing import TYPE_CHECKING

from llmgw.domain.routing import PickReason, RouteKey, RouteModel, RouteReplica
from llmgw.gateway import errors
from llmgw.gateway.bodies import Asked
from llmgw.gateway.engine_words import engine_words
from llmgw.gateway.errors import Answer
from llmgw.gateway.frames import deframe
from llmgw.gateway.head import RequestHead
from llmgw.gateway.relay import Relay
from llmgw.gateway.reply import Reply
from llmgw.gateway.stats import ModelStats
from llmgw.gateway.upstream import Upstream
from llmgw.gateway.usage import Tokens, ask_for_usage, strip_usage

if TYPE_CHECKING:
    from llmgw.gateway.plane import Plane
    from llmgw.gateway.protocol import Client

_LOG = logging.getLogger("llmgw.gateway")
_USAGE_PATHS = ("/v1/chat/completions", "/v1/completions")
_EVENT_END = b"\n\n\r\n"
_EDGE = 64 << 10
_CUT_LIMIT = 64 << 10
_WHY = {
    None: b"",
    PickReason.ONLY: b"only",
    PickReason.LEAST_LOADED: b"least-loaded",
    PickReason.AFFINITY: b"affinity",
}


class Serve(Relay):
    """One request for a model. Implements `balance.Waiter`, and `upstream.Receiver` through `Relay`.

    Attributes:
        key: whose request it is, None for an anonymous one.
        tokens: what the engine said about tokens, None while it said nothing.
        events: data events of a stream so far; stands for completion tokens where the answer is `partial`.
    """

    model: RouteModel | None = None
    replica: RouteReplica | None = None
    key: RouteKey | None = None
    key_name = ""
    prefix = b""
    tokens: Tokens | None = None
    events = 0
    partial = False
    first_at: float | None = None
    queue_ms = 0
    why = b""
    last_replica: str | None = None
    last_node: str | None = None
    tried: Set[str] = frozenset()
    _sent_at: float | None = None
    _token_at: float | None = None
    _tail = b""
    _refusal = ""
    _reply: Reply | None = None
    _strip = False
    _stats: ModelStats | None = None
    _cut = b""

    def __init__(
        self,
        plane: Plane,
        client: Client,
        head: RequestHead,
        request_id: bytes,
        body: bytes | bytearray,
        asked: Asked,
    ) -> None:
        super().__init__(plane, client, head, request_id, body)
        self.model_name = asked.model or ""
        self.stream = bool(asked.stream)

    def start(self, model: RouteModel, replica: RouteReplica, reason: PickReason | None) -> None:
        """A slot of `replica` is ours: ask it."""
        self.model, self.replica = model, replica
        self.last_replica, self.last_node = replica.replica_id, replica.node_id
        if self.tried:
            self.plane.stats.retries += 1
            self.tried = {*self.tried, replica.replica_id}
            self.why = b"retry"
        else:
            self.tried = replica_set(replica.replica_id)
            self.why = _WHY[reason]
        address = (replica.host, replica.port)
        upstream = self.plane.pool.take(address)
        if upstream is None:
            self._spawn(self._connect(address))
        else:
            self._ask(upstream)

    def refused(self, answer: Answer) -> None:
        """There is no replica for us."""
        self._fail(answer)

    def exhausted(self, model: RouteModel) -> None:
        """Every ready replica was tried and could not begin."""
        words = f"no replica of the model `{model.name}` could take the request; {self._refusal}"
        self._fail(
            errors.refuse(
                503,
                words,
                kind="server_error",
                code="no_replica",
                retry_after_s=2,
                extra={"state": model.state, "refusal": list(model.refusal)},
            )
        )

    def on_whole(self, upstream: Upstream, reply: Reply, body: bytes) -> None:
        """The usual end of a request that is no stream: in one piece, out in one piece."""
        if reply.status != 200 or reply.events or not self.head.http11:
            super().on_whole(upstream, reply, body)
            return
        plane, client, replica = self.plane, self.client, self.replica
        assert replica is not None
        self.status = 200
        self.tokens = Tokens()
        self.tokens.read(body if len(body) <= 2 * _EDGE else body[:_EDGE] + b"\n" + body[-_EDGE:])
        plane.balance.worked(replica.replica_id)
        client.transport.write(
            b"HTTP/1.1 200 OK\r\n%b%bx-request-id: %b\r\nx-llmgw-queue-ms: %d\r\nx-llmgw-retries: %d\r\n"
            b"x-llmgw-why: %b\r\ncontent-length: %d\r\n%b%b\r\n%b"
            % (
                reply.passed,
                plane.lines.answered(replica),
                self.request_id,
                self.queue_ms,
                len(self.tried) - 1,
                self.why,
                len(body),
                plane.cors,
                b"" if client.keep else b"connection: close\r\n",
                body,
            )
        )
        self.upstream = None
        plane.pool.give(upstream)
        self._end()
        client.answered()

    def on_data(self, upstream: Upstream, data: bytes, ended: bool) -> None:
        """A part of the body: watched for tokens, and written at once where it is a stream."""
        if not self._events:
            super().on_data(upstream, data, ended)
            return
        now = self.last = self.plane.now()
        framed = upstream.framed
        if data:
            if b'"usage"' in data or self._cut or (self._strip and not data.endswith(_EVENT_END)):
                data, framed = self._look(deframe(data) if framed else data, ended), False
            elif framed:
                self._clean = data.endswith(_EVENT_END)
            else:
                self._clean = data.endswith(b"\n\n")
            if data:
                self._tail = data
                count = data.count(b"data: {")
                if count:
                    self.events += count
                    stats = self._stats
                    assert stats is not None
                    if self.first_at is None:
                        self.first_at = now
                        stats.first.add(now - self.began)
                    elif self._token_at is not None:
                        stats.gap.add(now - self._token_at)
                    self._token_at = now
                elif not data.startswith(b":") and b"\n:" not in data:
                    self._token_at = now
        if ended or self._prefix or not framed or not self._chunked:
            self._send(data, framed, ended)
            if ended:
                self._finish()
        elif data:
            self.client.transport.write(data)

    def lost(self, words: str) -> None:
        """The engine broke off: it may be about to fail others too."""
        if self.replica is not None and not self._ended:
            self.plane.balance.failed(self.replica, words)
        super().lost(words)

    def may_end_by_close(self) -> bool:
        """A stream that just stops is not a finished one."""
        return not self._events or b"[DONE]" in self._tail or b"event: message_stop" in self._tail

    def resume(self) -> None:
        """The client has caught up: its own delay is not the engine's."""
        super().resume()
        if self._token_at is not None:
            self._token_at = self.last

    def check(self, now: float) -> None:
        """Judge the deadlines of a stream's tokens, then the common ones."""
        if self._sent_at is None or self._ended or self._paused:
            super().check(now)
            return
        options = self.plane.options
        if self.stream and self._token_at is None and now - self._sent_at > options.first_token_timeout_s:
            self._late(f"it sent no token within {options.first_token_timeout_s:g} s")
        elif self._token_at is not None and now - self._token_at > options.token_gap_timeout_s:
            self._late(f"it sent no token for {options.token_gap_timeout_s:g} s")
        else:
            super().check(now)

    async def _connect(self, address: tuple[str, int]) -> None:
        try:
            upstream = await self.plane.pool.connect(address)
        except (OSError, ValueError, OverflowError) as error:
            self._task = None
            words = str(error) or f"no connection within {self.plane.options.connect_timeout_s:g} s"
            self._not_begun(f"`{address[0]}:{address[1]}` cannot be reached: {words}")
            return
        self._task = None
        self._ask(upstream)

    def _ask(self, upstream: Upstream) -> None:
        replica, head, body = self.replica, self.head, self.body
        assert replica is not None
        self.upstream = upstream
        if self._paused:
            upstream.pause()
        now = self._sent_at = self.last = self.plane.now()
        self.queue_ms = round((now - self.began) * 1000)
        if self.stream and head.path in _USAGE_PATHS:
            body, self._strip = ask_for_usage(body)
        upstream.ask(
            self,
            b"%b%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n"
            % (head.engine_lines(), self.plane.lines.asked(replica), self.request_id, len(body)),
            body,
        )

    def _not_begun(self, words: str) -> None:
        """The replica cannot have started the work: another one may have the request."""
        replica, self.replica = self.replica, None
        assert replica is not None
        assert self.model is not None
        self._drop()
        self._headed, self._hold, self._held, self._held_size, self._sent_at = False, False, None, 0, None
        self._refusal = f"replica `{replica.replica_id}` on node `{replica.node_id}`: {words}"
        self.plane.balance.failed(replica, words)
        self.plane.balance.release(self.model.name, replica.replica_id, self.key_name)
        if not self._ended:
            self.plane.balance.admit(self)

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
        self._stats = self.plane.stats.of(model.name)
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
        return b"%b%bx-request-id: %b\r\nx-llmgw-queue-ms: %d\r\nx-llmgw-retries: %d\r\nx-llmgw-why: %b\r\n%b%b" % (
            self._reply.passed,
            self.plane.lines.answered(self.replica),
            self.request_id,
            self.queue_ms,
            len(self.tried) - 1,
            self.why,
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
        if b'"usage"' in body:
            self._read_usage(body)
            if self._strip:
                body = strip_usage(body)
        if body:
            self._clean = body.endswith(b"\n\n")
        return body

    def _read_usage(self, data: bytes) -> None:
        if self.tokens is None:
            self.tokens = Tokens()
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
        """A large answer on its way through: usage is looked for at the edges of what is read."""
        window = self._tail[-_EDGE:] + data
        if b'"usage"' in window:
            self._read_usage(window if len(window) <= 2 * _EDGE else window[:_EDGE] + b"\n" + window[-_EDGE:])
        self._tail = data

    def _blame(self, words: str) -> str:
        if self.replica is None:
            return words
        where = f"replica `{self.replica.replica_id}` on node `{self.replica.node_id}`"
        words = f"{where} of the model `{self.model_name}` broke off: {words}"
        _LOG.warning("request `%s`: %s", self.request_id.decode("ascii"), words)
        return words

    def _event(self, answer: Answer) -> bytes:
        if self.head.path.startswith("/v1/messages"):
            return b"event: error\ndata: " + answer.body + b"\n\n"
        return super()._event(answer)

    def _fail(self, answer: Answer) -> None:
        self.partial = self._written or self.partial
        self._cut = b""  # half an event is of no use to anybody
        super()._fail(answer)

    def cancel(self) -> None:
        """The client has gone: what it has got so far is counted, and marked as partial."""
        self.partial = self._sent_at is not None
        super().cancel()

    def _end(self) -> None:
        if self._ended:
            return
        super()._end()
        replica, self.replica = self.replica, None
        plane = self.plane
        name = self.model.name if self.model is not None else self._known_name()
        plane.finished(self, name)
        if replica is not None:
            plane.balance.release(name, replica.replica_id, self.key_name)
        else:
            plane.balance.leave(self)

    def _known_name(self) -> str:
        model = self.plane.balance.find(self.model_name)
        return model.name if model is not None else ""


@lru_cache(4096)
def replica_set(replica_id: str) -> frozenset[str]:
    """The set of one replica: most requests try no other."""
    return frozenset((replica_id,))
