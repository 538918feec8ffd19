"""A request for a model: wait for a slot, ask a replica, retry only what no engine can have begun."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from llmgw.domain.routing import RouteModel, RouteReplica
from llmgw.gateway import errors
from llmgw.gateway.bodies import Asked
from llmgw.gateway.errors import Answer
from llmgw.gateway.head import RequestHead
from llmgw.gateway.relay import Relay
from llmgw.gateway.upstream import Upstream

if TYPE_CHECKING:
    from llmgw.gateway.plane import Plane
    from llmgw.gateway.protocol import Client

_LOG = logging.getLogger("llmgw.gateway")
_UNSAFE = re.compile(r"[^\x21-\x7e]")
_VALUE = re.compile(rb"[\t\x20-\x7e]{0,256}")
_PASSED = frozenset((b"content-type", b"content-encoding", b"cache-control", b"content-disposition", b"retry-after"))


def safe(text: str) -> bytes:
    """A node's own string as a header value: printable ASCII, at most 128 characters."""
    return _UNSAFE.sub("?", text[:128]).encode("ascii")


class ReplicaLines:
    """The header lines that are the same for every request to a replica, made once per snapshot."""

    def __init__(self) -> None:
        self._asked: dict[str, bytes] = {}
        self._answered: dict[str, bytes] = {}

    def clear(self) -> None:
        """A new snapshot: addresses and keys may differ."""
        self._asked.clear()
        self._answered.clear()

    def asked(self, replica: RouteReplica) -> bytes:
        """Host and Authorization of the request to the engine."""
        return self._cached(self._asked, replica, self._make_asked)

    def answered(self, replica: RouteReplica) -> bytes:
        """What the client is told about who answered."""
        return self._cached(self._answered, replica, self._make_answered)

    @staticmethod
    def _cached(cache: dict[str, bytes], replica: RouteReplica, make: Callable[[RouteReplica], bytes]) -> bytes:
        lines = cache.get(replica.replica_id)
        if lines is None:
            lines = cache[replica.replica_id] = make(replica)
        return lines

    @staticmethod
    def _make_asked(replica: RouteReplica) -> bytes:
        host = f"[{replica.host}]" if ":" in replica.host else replica.host
        lines = b"Host: %b:%d\r\n" % (safe(host), replica.port)
        if replica.key and not _UNSAFE.search(replica.key):
            lines += b"Authorization: Bearer %b\r\n" % replica.key.encode("ascii")
        return lines

    @staticmethod
    def _make_answered(replica: RouteReplica) -> bytes:
        return b"x-llmgw-replica: %b\r\nx-llmgw-node: %b\r\n" % (safe(replica.replica_id), safe(replica.node_id))


class Serve(Relay):
    """One request for a model. Implements `balance.Waiter`, and `upstream.Receiver` through `Relay`."""

    def __init__(self, plane: Plane, client: Client, head: RequestHead, body: bytes | bytearray, asked: Asked) -> None:
        super().__init__(plane, client, head, body)
        self.model_name = asked.model or ""
        self.stream = bool(asked.stream)
        self.tried: set[str] = set()
        self.model: RouteModel | None = None
        self.replica: RouteReplica | None = None
        self._sent_at: float | None = None
        self._token_at: float | None = None
        self._tail = b""
        self._queue_ms = 0
        self._refusal = ""
        self._engine_lines = b""

    def start(self, model: RouteModel, replica: RouteReplica) -> None:
        """A slot of `replica` is ours: ask it."""
        self.model, self.replica = model, replica
        if self.tried:
            self.plane.stats.retries += 1
        self.tried.add(replica.replica_id)
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

    def lost(self, words: str) -> None:
        """The engine broke off: it may be about to fail others too."""
        if self.replica is not None and not self._ended:
            self.plane.balance.failed(self.replica, words)
        super().lost(words)

    def may_end_by_close(self) -> bool:
        """A stream that just stops is not a finished one."""
        return not self._events or b"[DONE]" in self._tail

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
        assert self.replica is not None
        head = self.head
        self._attach(upstream)
        self._sent_at = self.last = self.plane.now()
        self._queue_ms = round((self._sent_at - self.began) * 1000)
        upstream.ask(
            self,
            b"POST %b HTTP/1.1\r\n%bContent-Type: %b\r\nAccept: %b\r\nX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n"
            % (
                head.path.encode("ascii"),
                self.plane.lines.asked(self.replica),
                head.content_type or b"application/json",
                head.accept or b"*/*",
                head.request_id,
                len(self.body),
            ),
            self.body,
        )

    def _not_begun(self, words: str) -> None:
        """The replica cannot have started the work: another one may have the request."""
        replica, self.replica = self.replica, None
        assert replica is not None
        assert self.model is not None
        self._drop()
        self._headed, self._hold, self._held, self._held_size, self._sent_at = False, False, [], 0, None
        self._refusal = f"replica `{replica.replica_id}` on node `{replica.node_id}`: {words}"
        self.plane.balance.failed(replica, words)
        self.plane.balance.release(self.model.name, replica.replica_id)
        if not self._ended:
            self.plane.balance.admit(self)

    def _on_head(self, upstream: Upstream) -> None:
        assert self.replica is not None
        self.status = upstream.status
        if upstream.status in (401, 403):
            self._fail(errors.upstream_failed(self._blame(f"it refused the gateway's own key ({upstream.status})")))
            return
        if 300 <= upstream.status < 400:
            self._fail(errors.upstream_failed(self._blame(f"it answered with a redirect ({upstream.status})")))
            return
        lines = []
        for name, value in upstream.headers:
            if name in _PASSED and _VALUE.fullmatch(value):
                lines.append(b"%b: %b\r\n" % (name, value))
                if name == b"content-type" and value.startswith(b"text/event-stream"):
                    self._events = upstream.status == 200
        self._engine_lines = b"".join(lines)
        if upstream.status != 503:
            self.plane.balance.worked(self.replica.replica_id)
        if self._events:
            self._open(upstream.status, self._lines(), None)
        else:
            self._hold = True

    def _lines(self) -> bytes:
        assert self.replica is not None
        return b"%b%bx-request-id: %b\r\nx-llmgw-queue-ms: %d\r\n%b" % (
            self._engine_lines,
            self.plane.lines.answered(self.replica),
            self.head.request_id,
            self._queue_ms,
            b"x-accel-buffering: no\r\n" if self._events else b"",
        )

    def _on_body(self, body: bytes) -> None:
        if self._events:
            self._clean = body.endswith(b"\n\n")
            self._tail = body
            if not body.startswith(b":") or b"data:" in body:
                self._token_at = self.last

    def _settle(self, upstream: Upstream) -> None:
        if self.status == 503:
            self._not_begun(f"it answered 503: {_engine_words(b''.join(self._held))}")
        else:
            super()._settle(upstream)

    def _blame(self, words: str) -> str:
        if self.replica is None:
            return words
        where = f"replica `{self.replica.replica_id}` on node `{self.replica.node_id}`"
        words = f"{where} of the model `{self.model_name}` broke off: {words}"
        _LOG.warning("request `%s`: %s", self.head.request_id.decode("ascii"), words)
        return words

    def _end(self) -> None:
        waiting = self.replica is None and not self._ended
        super()._end()
        if waiting:
            self.plane.balance.leave(self)
        replica, self.replica = self.replica, None
        name = self.model.name if self.model is not None else ""
        self.plane.stats.count(name or self._known_name(), self.status)
        if replica is not None:
            self.plane.balance.release(name, replica.replica_id)

    def _known_name(self) -> str:
        model = self.plane.balance.find(self.model_name)
        return model.name if model is not None else ""


class _EngineError(msgspec.Struct):
    message: str = ""


class _EngineAnswer(msgspec.Struct):
    error: _EngineError | str | None = None


def _engine_words(body: bytes) -> str:
    """The sentence in an engine's error answer, else the beginning of whatever it sent."""
    try:
        error = msgspec.json.decode(body, type=_EngineAnswer).error
    except (msgspec.DecodeError, RecursionError):
        return ascii(body[:200].decode("utf-8", "replace"))
    words = (error.message if isinstance(error, _EngineError) else error) or "no words"
    return "".join(each if each.isprintable() else " " for each in words[:500])
