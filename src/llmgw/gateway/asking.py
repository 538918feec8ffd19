"""A request for a model on its way: wait for a slot, ask a replica, retry only what no engine can have begun."""

from __future__ import annotations

import logging
from collections.abc import Set
from functools import lru_cache
from typing import TYPE_CHECKING

from llmgw.domain.routing import PickReason, RouteModel, RouteReplica
from llmgw.gateway import errors
from llmgw.gateway.errors import Answer
from llmgw.gateway.head import RequestHead
from llmgw.gateway.relay import Relay
from llmgw.gateway.upstream import Upstream
from llmgw.gateway.usage import Tokens, ask_for_usage

if TYPE_CHECKING:
    from llmgw.gateway.bodies import Asked
    from llmgw.gateway.lane import Lane
    from llmgw.gateway.limits import Budget
    from llmgw.gateway.plane import Plane
    from llmgw.gateway.protocol import Client

_LOG = logging.getLogger("llmgw.gateway")
_USAGE_PATHS = ("/v1/chat/completions", "/v1/completions")
_WHY = {
    None: b"",
    PickReason.ONLY: b"only",
    PickReason.LEAST_LOADED: b"least-loaded",
    PickReason.AFFINITY: b"affinity",
}


class Asking(Relay):
    """The way to a replica, and the end. Implements `balance.Waiter`; `serve.Serve` has the way back.

    Attributes:
        budget, key_name: what bounds the key whose request it is, and its name; "" for an anonymous one.
        tokens: what the engine said about tokens, None while it said nothing.
        several: choices asked for each prompt where the answer has several (`Asked.several`), else 0.
        events: data events of a stream so far; where the answer is `partial`, see `usage.passed_on`.
        ended_at, ended_model: when it ended, and the name under which it is counted.
    """

    model: RouteModel | None = None
    replica: RouteReplica | None = None
    budget: Budget | None = None
    key_name = ""
    prefix = b""
    tokens: Tokens | None = None
    events = 0
    partial = False
    several = 0
    first_at: float | None = None
    queue_ms = 0
    why = b""
    last_replica: str | None = None
    last_node: str | None = None
    tried: Set[str] = frozenset()
    ended_at = 0.0
    ended_model = ""
    _sent_at: float | None = None
    _refusal = ""
    _strip = False

    def __init__(
        self,
        plane: Plane,
        client: Client,
        head: RequestHead,
        request_id: bytes,
        body: bytes | bytearray,
        asked: Asked,
        lane: Lane,
        now: float,
    ) -> None:
        # all of `Relay.__init__`, without the call
        self.plane = plane
        self.client = client
        self.head = head
        self.request_id = request_id
        self.body = body
        self.began = self.last = now
        self.model_name = asked.model or ""
        self.stream = bool(asked.stream)
        if asked.n or asked.prompt:
            self.several = asked.several()
        self.budget = lane.budget
        self.key_name = lane.key_name
        plane.active.add(self)

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
        now = self.plane.now()
        upstream = self.plane.pool.take(address, now)
        if upstream is None:
            self._task = self.plane.pool.dial(address, self._connected, self._unreachable)
        else:
            self._ask(upstream, now)

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

    def _connected(self, upstream: Upstream) -> None:
        self._task = None
        try:
            self._ask(upstream, self.plane.now())
        except Exception as error:
            self.broke(error)

    def _unreachable(self, error: OSError) -> None:
        replica = self.replica
        assert replica is not None
        self._task = None
        words = f"`{replica.host}:{replica.port}` cannot be reached: {error.strerror or error}"
        try:
            self._not_begun(words)
        except Exception as unexpected:
            self.broke(unexpected)

    def _ask(self, upstream: Upstream, now: float) -> None:
        replica, head, body = self.replica, self.head, self.body
        assert replica is not None
        self.upstream = upstream
        if self._paused:
            upstream.pause()
        self._sent_at = self.last = now
        if now - self.began >= 0.0005:
            self.queue_ms = round((now - self.began) * 1000)
        if self.stream and head.path in _USAGE_PATHS:
            body, self._strip = ask_for_usage(body)
        upstream.ask(
            self,
            b"%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n"
            % (self.plane.lines.asked(head.engine_lines(), replica), self.request_id, len(body)),
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

    def _blame(self, words: str) -> str:
        if self.replica is None:
            return words
        where = f"replica `{self.replica.replica_id}` on node `{self.replica.node_id}`"
        words = f"{where} of the model `{self.model_name}` broke off: {words}"
        _LOG.warning("request `%s`: %s", self.request_id.decode("ascii"), words)
        return words

    def cancel(self) -> None:
        """The client has gone: what it has got so far is counted, and marked as partial."""
        self.partial = self._sent_at is not None
        super().cancel()

    def _end(self) -> None:
        if not self._ended:
            super()._end()
            self._count(self.plane.now())

    def _count(self, now: float) -> None:
        """Ended: the books, and the slot to the next one."""
        self.body = b""  # it is kept until it is counted
        replica, self.replica = self.replica, None
        plane, model = self.plane, self.model
        name = model.name if model is not None else self._known_name()
        plane.finished(self, name, now)
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
