"""Who gets the next request: counts, ejections and the queue around the pure rule `domain.routing.pick`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from attrs import define

from llmgw.domain.routing import PickReason, PickWhy, RouteModel, RouteReplica, RouteTable, Rows, choose, rows_of, usual
from llmgw.gateway import errors
from llmgw.gateway.settings import Options
from llmgw.gateway.shared import Shared
from llmgw.gateway.waiting import Queue, Waiter

_LOG = logging.getLogger("llmgw.gateway")
_EJECT_MAX_S = 60.0
_TURN_S = 0.1
_PATIENCE_S = 0.2


@define
class _Sick:
    """A replica whose connections failed: how often in a row, and until when it is passed over."""

    fails: int = 0
    until: float = 0.0


class Balance:
    """The routing table, requests in flight per replica, and one queue per model."""

    def __init__(self, options: Options, now: Callable[[], float], shared: Shared | None = None) -> None:
        self.table: RouteTable | None = None
        self.models: dict[str, RouteModel] = {}
        self.paths: frozenset[str] = frozenset()
        self.in_flight: dict[str, int] = {}
        self.ejections = 0
        self._options = options
        self._now = now
        self._shared = shared
        self.sick: dict[str, _Sick] = {}
        self._rows: dict[str, Rows] = {}
        self._turn = 0
        self._queues: dict[str, Queue] = {}
        self._where: dict[str, RouteReplica] = {}
        self._yielded: dict[str, tuple[float, float]] = {}
        self._key_busy: dict[str, dict[str, int]] = {}

    def apply(self, table: RouteTable) -> None:
        """Take over a snapshot and let those who wait look again: any change may be what they wait for."""
        self.table = table
        self.models = {alias: model for model in table.models for alias in model.aliases}
        self.models.update({model.name: model for model in table.models})
        self._rows = {model.name: rows for model in table.models if (rows := rows_of(model))[0]}
        if self._shared is not None:
            self._shared.clear()
        self.paths = frozenset(path for model in table.models for path in model.endpoints)
        where = {replica.replica_id: replica for model in table.models for replica in model.replicas}
        for counts in (self.in_flight, *self._key_busy.values()):
            for name in [name for name, count in counts.items() if not count]:
                del counts[name]
        before, self._where = self._where, where
        for replica_id in list(self.sick):
            old, new = before[replica_id], where.get(replica_id)
            if new is None or _address(new) != _address(old) or (new.ready and not old.ready):
                del self.sick[replica_id]
        self._follow_names()
        for name in list(self._queues):
            self._look_again(name)

    def _follow_names(self) -> None:
        """A name may lead to another model now, or to none: those who wait follow it."""
        for name, queue in list(self._queues.items()):
            for waiter, deadline in queue.all():
                model = self.models.get(waiter.model_name)
                if model is None:
                    queue.remove(waiter)
                    waiter.refused(errors.model_not_found(waiter.model_name, self.names()))
                elif model.name != name:
                    queue.remove(waiter)
                    self._queue(model).add(waiter, deadline, self._now())
                    self._tell(model.name)
            self._tell(name)
            if name not in self.models:
                del self._queues[name]

    def running(self) -> dict[str, int]:
        """Requests at engines, by model."""
        return {name: count for name, keys in self._key_busy.items() if (count := sum(keys.values()))}

    def queued(self) -> dict[str, int]:
        """How many requests wait, by model."""
        return {name: queue.size for name, queue in self._queues.items() if queue.size}

    def admit(self, waiter: Waiter) -> None:
        """Start the request on a replica, let it wait in its model's queue, or refuse it."""
        model = self.models.get(waiter.model_name)
        if model is None:
            waiter.refused(errors.model_not_found(waiter.model_name, self.names()))
            return
        queue = self._queues.get(model.name) if self._queues else None
        # who was tried may be waiting for a replica that it has not had; others need not wait behind it
        if (queue is not None and queue.size > queue.again and not waiter.tried) or not self._try(waiter, model):
            self._wait(waiter, model)

    def find(self, name: str) -> RouteModel | None:
        """The model of that name or alias."""
        return self.models.get(name)

    def names(self) -> list[str]:
        """The models there are, without aliases."""
        return [model.name for model in self.table.models] if self.table else []

    def release(self, model_name: str, replica_id: str, key_name: str = "") -> None:
        """Give a slot back; the next waiter gets it."""
        self.in_flight[replica_id] -= 1
        if self._shared is not None:
            self._shared.add(replica_id, -1)
        self._key_busy[model_name][key_name] -= 1
        if self._queues:
            queue = self._queues.get(model_name)
            if queue is not None and queue.size:
                self._look_again(model_name)

    def leave(self, waiter: Waiter) -> None:
        """The client of a waiting request has gone."""
        for name, queue in self._queues.items():
            if queue.remove(waiter):
                self._tell(name)

    def expire(self) -> None:
        """Refuse those whose time in the queue is over.

        Look again for those who wait where nobody tells them: another process may have freed a slot, or a replica is
        passed over no longer.
        """
        now = self._now()
        for name, queue in list(self._queues.items()):
            if queue.size and (self._shared is not None or self.sick):
                self._look_again(name)
            for waiter in queue.late(now):
                if not queue.remove(waiter):
                    continue
                model = self.models[name]
                waited = self._options.queue_timeout_s
                if any(replica.ready for replica in model.replicas):
                    waiter.refused(errors.queue_deadline(model, waited))
                else:
                    waiter.refused(errors.not_ready(model, waited))
                self._tell(name)

    def polls(self) -> bool:
        """Whether somebody waits whom another process may free a slot for: then `expire` is to be called soon."""
        return self._shared is not None and any(queue.size for queue in self._queues.values())

    def failed(self, replica: RouteReplica, words: str) -> None:
        """A connection to the replica failed: pass it over for 1 s, 2 s, 4 s … 60 s.

        Many answers lost at once are one failure. What fails at an address that is over says nothing about the new one.
        """
        there = self._where.get(replica.replica_id)
        if there is None or _address(there) != _address(replica):
            return
        now = self._now()
        sick = self.sick.get(replica.replica_id)
        if sick is None:
            sick = self.sick[replica.replica_id] = _Sick()
        elif sick.until > now:
            return
        sick.fails += 1
        pause = min(_EJECT_MAX_S, 2.0 ** min(sick.fails - 1, 10))
        sick.until = now + pause
        self.ejections += 1
        _LOG.warning("replica `%s` is passed over for %g s: %s", replica.replica_id, pause, words)

    def worked(self, replica_id: str) -> None:
        """The replica answered: its earlier failures are forgotten."""
        if self.sick:
            self.sick.pop(replica_id, None)

    def _ejected(self) -> frozenset[str]:
        if not self.sick:
            return _NOBODY
        now = self._now()
        return frozenset(replica_id for replica_id, sick in self.sick.items() if sick.until > now)

    def _try(self, waiter: Waiter, model: RouteModel, deadline: float = 0.0) -> bool:
        """True when the waiter's fate is decided, False when it has to wait; `deadline`: if it waits already."""
        rows = self._rows.get(model.name)
        self._turn += 1
        counts = self.in_flight if self._shared is None else self._shared.counts(model)
        if rows is not None and not (waiter.tried or self.sick):
            found = usual(rows, counts, self._turn, waiter.prefix)
            if found is None or (self._shared is not None and self._yields(model.name, deadline)):
                return False
            self._give(waiter, model, *found)
            return True
        replica, why, reason = choose(model, counts, waiter.tried, self._ejected(), self._turn, waiter.prefix)
        if replica is not None:
            if self._shared is not None and not waiter.tried and self._yields(model.name, deadline):
                return False
            self._give(waiter, model, replica, reason)
        elif why is PickWhy.ALL_TRIED:
            waiter.exhausted(model)
        elif why is PickWhy.NONE_READY and (model.state != "loading" or self._options.queue <= 0):
            waiter.refused(errors.not_ready(model))
        else:
            return False
        return True

    def _yields(self, name: str, deadline: float) -> bool:
        """Whether a slot is left to a request of another process, which has waited longer; if it takes it soon."""
        shared = self._shared
        assert shared is not None
        other = shared.longest_wait(name)
        if not other:
            return False
        now = self._now()
        if other > (deadline or now + self._options.queue_timeout_s) - _TURN_S:
            return False
        before = self._yielded.get(name)
        if before is None or before[0] != other:
            self._yielded[name] = (other, now)
            return True
        return now - before[1] < _PATIENCE_S

    def _tell(self, name: str) -> None:
        if self._shared is not None:
            self._shared.wait(name, self._queues[name].oldest())

    def _give(self, waiter: Waiter, model: RouteModel, replica: RouteReplica, reason: PickReason | None) -> None:
        replica_id, name, key_name = replica.replica_id, model.name, waiter.key_name
        self.in_flight[replica_id] = self.in_flight.get(replica_id, 0) + 1
        if self._shared is not None:
            self._shared.add(replica_id, 1)
        mine = self._key_busy.get(name)
        if mine is None:
            mine = self._key_busy[name] = {}
        mine[key_name] = mine.get(key_name, 0) + 1
        waiter.start(model, replica, reason)

    def _queue(self, model: RouteModel) -> Queue:
        queue = self._queues.get(model.name)
        if queue is None:
            queue = self._queues[model.name] = Queue()
        return queue

    def _wait(self, waiter: Waiter, model: RouteModel) -> None:
        queue = self._queue(model)
        now = self._now()
        deadline = now + self._options.queue_timeout_s
        if queue.size < self._options.queue:
            queue.add(waiter, deadline, now)
            self._tell(model.name)
            return
        if queue.size:
            # full: the key that has most waiting gives up its last one to a key that has fewer
            flooding, count = queue.longest()
            mine = queue.by_key.get(waiter.key_name)
            if flooding != waiter.key_name and count > (len(mine) if mine else 0) + 1:
                last = next(reversed(queue.by_key[flooding]))
                size = queue.size
                queue.remove(last)
                queue.add(waiter, deadline, now)
                last.refused(errors.queue_full(model, size, queue.wait_s(now)))
                return
        waiter.refused(errors.queue_full(model, queue.size, queue.wait_s(now)))

    def _look_again(self, name: str) -> None:
        queue, model = self._queues[name], self.models[name]
        # who is looked at is not in the queue, so that what its fate sets off cannot find it there
        held: list[tuple[Waiter, float]] = []
        try:
            while queue.size:
                waiter, deadline = queue.take(self._key_busy.get(name, _NONE))
                if self._try(waiter, model, deadline):
                    queue.served(waiter.key_name, self._now())
                    continue
                held.append((waiter, deadline))
                if not waiter.tried:
                    break
        finally:
            for waiter, deadline in reversed(held):
                queue.put_back(waiter, deadline)
            self._tell(name)


def _address(replica: RouteReplica) -> tuple[str, int]:
    return replica.host, replica.port


_NOBODY: frozenset[str] = frozenset()
_NONE: dict[str, int] = {}
