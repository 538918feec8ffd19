"""Who gets the next request: counts, ejections and the queue around the pure rule `domain.routing.pick`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from attrs import define

from llmgw.domain.routing import PickWhy, RouteModel, RouteReplica, RouteTable, pick
from llmgw.gateway import errors
from llmgw.gateway.errors import Answer
from llmgw.gateway.settings import Options

_LOG = logging.getLogger("llmgw.gateway")
_EJECT_MAX_S = 60.0


class Waiter(Protocol):
    """A request that wants a replica. Exactly one of `start` and `refused` is called, unless it leaves."""

    model_name: str
    tried: set[str]

    def start(self, model: RouteModel, replica: RouteReplica) -> None:
        """A slot of `replica` is yours; give it back by `Balance.release`."""
        ...

    def refused(self, answer: Answer) -> None:
        """There is none; tell the client this."""
        ...

    def exhausted(self, model: RouteModel) -> None:
        """Every ready replica has had this request already."""
        ...


@define
class _Sick:
    """A replica whose connections failed: how often in a row, and until when it is passed over."""

    host: str
    port: int
    fails: int = 0
    until: float = 0.0


class Balance:
    """The routing table, requests in flight per replica, and one queue per model in order of arrival."""

    def __init__(self, options: Options, now: Callable[[], float]) -> None:
        self.table: RouteTable | None = None
        self.models: dict[str, RouteModel] = {}
        self.paths: frozenset[str] = frozenset()
        self.in_flight: dict[str, int] = {}
        self.busy: dict[str, int] = {}
        self.ejections = 0
        self._options = options
        self._now = now
        self._sick: dict[str, _Sick] = {}
        self._turn = 0
        self._queues: dict[str, dict[Waiter, float]] = {}

    def apply(self, table: RouteTable) -> None:
        """Take over a snapshot and let those who wait look again: any change may be what they wait for."""
        self.table = table
        self.models = {alias: model for model in table.models for alias in model.aliases}
        self.models.update({model.name: model for model in table.models})
        self.paths = frozenset(path for model in table.models for path in model.endpoints)
        where = {replica.replica_id: replica for model in table.models for replica in model.replicas}
        for replica_id, sick in list(self._sick.items()):
            replica = where.get(replica_id)
            if replica is None or (replica.host, replica.port) != (sick.host, sick.port):
                del self._sick[replica_id]
        for name in list(self._queues):
            self._look_again(name)

    def queued(self) -> dict[str, int]:
        """How many requests wait, by model."""
        return {name: len(queue) for name, queue in self._queues.items() if queue}

    def admit(self, waiter: Waiter) -> None:
        """Start the request on a replica, let it wait in its model's queue, or refuse it."""
        model = self.models.get(waiter.model_name)
        if model is None:
            waiter.refused(errors.model_not_found(waiter.model_name, self.names()))
            return
        queue = self._queues.get(model.name)
        if (queue and not waiter.tried) or not self._try(waiter, model):
            self._wait(waiter, model)

    def find(self, name: str) -> RouteModel | None:
        """The model of that name or alias."""
        return self.models.get(name)

    def names(self) -> list[str]:
        """The models there are, without aliases."""
        return [model.name for model in self.table.models] if self.table else []

    def release(self, model_name: str, replica_id: str) -> None:
        """Give a slot back; the first waiter gets it."""
        _down(self.in_flight, replica_id)
        _down(self.busy, model_name)
        if self._queues.get(model_name):
            self._look_again(model_name)

    def leave(self, waiter: Waiter) -> None:
        """The client of a waiting request has gone."""
        for queue in self._queues.values():
            queue.pop(waiter, None)

    def expire(self) -> None:
        """Refuse those whose time in the queue is over."""
        now = self._now()
        for name, queue in list(self._queues.items()):
            late = [waiter for waiter, deadline in queue.items() if deadline <= now]
            for waiter in late:
                if queue.pop(waiter, None) is None:
                    continue
                model = self.models.get(name)
                waited = self._options.queue_timeout_s
                if model is None:
                    waiter.refused(errors.model_not_found(name, self.names()))
                elif any(replica.ready for replica in model.replicas):
                    waiter.refused(errors.queue_deadline(model, waited))
                else:
                    waiter.refused(errors.not_ready(model, waited))

    def failed(self, replica: RouteReplica, words: str) -> None:
        """A connection to the replica failed: pass it over for 1 s, 2 s, 4 s … 60 s."""
        sick = self._sick.setdefault(replica.replica_id, _Sick(replica.host, replica.port))
        sick.fails += 1
        pause = min(_EJECT_MAX_S, 2.0 ** (sick.fails - 1))
        sick.until = self._now() + pause
        self.ejections += 1
        _LOG.warning("replica `%s` is passed over for %g s: %s", replica.replica_id, pause, words)

    def worked(self, replica_id: str) -> None:
        """The replica answered: its earlier failures are forgotten."""
        if self._sick:
            self._sick.pop(replica_id, None)

    def _ejected(self) -> frozenset[str]:
        if not self._sick:
            return frozenset()
        now = self._now()
        return frozenset(replica_id for replica_id, sick in self._sick.items() if sick.until > now)

    def _try(self, waiter: Waiter, model: RouteModel) -> bool:
        """True when the waiter's fate is decided, False when it has to wait."""
        self._turn += 1
        chosen = pick(model, self.in_flight, waiter.tried, self._ejected(), self._turn)
        if chosen.replica is not None:
            replica_id = chosen.replica.replica_id
            self.in_flight[replica_id] = self.in_flight.get(replica_id, 0) + 1
            self.busy[model.name] = self.busy.get(model.name, 0) + 1
            waiter.start(model, chosen.replica)
        elif chosen.why is PickWhy.ALL_TRIED:
            waiter.exhausted(model)
        elif chosen.why is PickWhy.NONE_READY and (model.state != "loading" or self._options.queue <= 0):
            waiter.refused(errors.not_ready(model))
        else:
            return False
        return True

    def _wait(self, waiter: Waiter, model: RouteModel) -> None:
        queue = self._queues.setdefault(model.name, {})
        if len(queue) >= self._options.queue:
            waiter.refused(errors.queue_full(model, len(queue)))
            return
        queue[waiter] = self._now() + self._options.queue_timeout_s

    def _look_again(self, name: str) -> None:
        queue = self._queues[name]
        for waiter in list(queue):
            deadline = queue.pop(waiter, None)
            if deadline is None:
                continue
            model = self.models.get(waiter.model_name)
            if model is None:
                waiter.refused(errors.model_not_found(waiter.model_name, self.names()))
            elif not self._try(waiter, model):
                self._put_back(queue, waiter, deadline)
                if not waiter.tried:
                    return

    @staticmethod
    def _put_back(queue: dict[Waiter, float], waiter: Waiter, deadline: float) -> None:
        others = list(queue.items())
        queue.clear()
        queue[waiter] = deadline
        queue.update(others)


def _down(counts: dict[str, int], name: str) -> None:
    left = counts.get(name, 0) - 1
    if left > 0:
        counts[name] = left
    else:
        counts.pop(name, None)
