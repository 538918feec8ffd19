"""Requests that wait for a slot, fairly between keys."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from llmgw.domain.routing import PickReason, RouteModel, RouteReplica
from llmgw.gateway.errors import Answer


class Waiter(Protocol):
    """A request that wants a replica. Exactly one of `start` and `refused` is called, unless it leaves."""

    model_name: str
    key_name: str
    prefix: bytes
    tried: Set[str]

    def start(self, model: RouteModel, replica: RouteReplica, reason: PickReason | None) -> None:
        """A slot of `replica` is yours; give it back by `Balance.release`."""
        ...

    def refused(self, answer: Answer) -> None:
        """There is none; tell the client this."""
        ...

    def exhausted(self, model: RouteModel) -> None:
        """Every ready replica has had this request already."""
        ...


class Queue:
    """Those who wait for one model: first come first served within a key, and between keys the one that has least.

    The next slot goes to the key with the fewest requests at the engines; among equals to the one served longest ago.

    Attributes:
        size: how many wait. again: how many of them were tried on a replica that could not begin.
        pace_s: from one who gets a slot to the next, while somebody waits; None before the first.
    """

    __slots__ = ("_last", "_served", "_turn", "again", "by_key", "pace_s", "size")

    def __init__(self) -> None:
        self.by_key: dict[str, dict[Waiter, float]] = {}
        self.size = self.again = 0
        self._turn = 0
        self._served: dict[str, int] = {}
        self.pace_s: float | None = None
        self._last = 0.0

    def add(self, waiter: Waiter, deadline: float, now: float) -> None:
        """At the end of its key's line."""
        if not self.size:
            self._last = now
        line = self.by_key.get(waiter.key_name)
        if line is None:
            line = self.by_key[waiter.key_name] = {}
        line[waiter] = deadline
        self._count(waiter, 1)

    def put_back(self, waiter: Waiter, deadline: float) -> None:
        """At the head of its key's line, where it was."""
        line = self.by_key.get(waiter.key_name, {})
        self.by_key[waiter.key_name] = {waiter: deadline, **line}
        self._count(waiter, 1)

    def _count(self, waiter: Waiter, step: int) -> None:
        self.size += step
        if waiter.tried:
            self.again += step

    def remove(self, waiter: Waiter) -> bool:
        """False when it is not there."""
        line = self.by_key.get(waiter.key_name)
        if line is None or line.pop(waiter, None) is None:
            return False
        self._count(waiter, -1)
        if not line:
            del self.by_key[waiter.key_name]
            if not self.by_key:
                self._served.clear()
        return True

    def take(self, busy: dict[str, int]) -> tuple[Waiter, float]:
        """Take out who is next, with its deadline; there must be somebody."""
        name = min(self.by_key, key=lambda each: (busy.get(each, 0), self._served.get(each, 0)))
        waiter, deadline = next(iter(self.by_key[name].items()))
        self.remove(waiter)
        return waiter, deadline

    def served(self, key_name: str, now: float) -> None:
        """This key has just got a slot."""
        self._turn += 1
        self._served[key_name] = self._turn
        gap = now - self._last
        self.pace_s = gap if self.pace_s is None else self.pace_s + (gap - self.pace_s) / 8
        self._last = now

    def wait_s(self, now: float) -> float:
        """How long one more would wait at its end, as far as can be told by now."""
        return max(self.pace_s or 0.0, now - self._last) * self.size

    def longest(self) -> tuple[str, int]:
        """The key with most requests waiting, and how many."""
        name = max(self.by_key, key=lambda each: len(self.by_key[each]))
        return name, len(self.by_key[name])

    def late(self, now: float) -> list[Waiter]:
        """Whose deadline is over."""
        return [waiter for waiter, deadline in self.all() if deadline <= now]

    def oldest(self) -> float:
        """The earliest deadline of those who may have any replica; 0.0 when there are none."""
        if self.size == self.again:
            return 0.0
        return min(deadline for waiter, deadline in self.all() if not waiter.tried)

    def all(self) -> list[tuple[Waiter, float]]:
        """All, with their deadlines."""
        return [each for line in self.by_key.values() for each in line.items()]
