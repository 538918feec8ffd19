"""Replicas that are to leave finish what they have begun: no new requests, and the stop waits for the last answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import evolve

from llmgw.domain.replicas import ReplicaState
from llmgw.domain.report import NodeView, Presence
from llmgw.domain.rollout import Assignment, Plan, status_of

FINISH_S = 120.0
"""Longest wait for answers that are on their way."""

_SURE_S = 2.5  # gateways count once a second: one that had not heard of the leaving yet is heard after this


class Finishing:
    """Owned by the reconciler's thread.

    Args:
        in_flight: requests at each replica by the gateways' last counts; None when no gateway is connected.
    """

    def __init__(self, in_flight: Callable[[], Mapping[str, int] | None]) -> None:
        self._in_flight = in_flight
        self._since: dict[tuple[str, int], float] = {}

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of replicas that finish: they get no new requests."""
        return frozenset(name for name, _ in self._since)

    def hold_back(self, decided: Plan, fleet: Mapping[str, NodeView], now: float) -> Plan:
        """The plan without the stops that have to wait; it is made anew in each pass, and so is this.

        Args:
            now: monotonic seconds.
        """
        busy = self._in_flight()
        since: dict[tuple[str, int], float] = {}
        notes = dict(decided.notes)

        def finishes(item: Assignment) -> bool:
            node = fleet.get(item.node_id)
            status = status_of(item, node)
            if busy is None or node is None or node.presence is Presence.LOST:
                return False
            if status is None or status.state is not ReplicaState.READY:
                return False
            key = (item.spec.replica_id, item.spec.epoch)
            began = self._since.get(key, now)
            count = busy.get(item.spec.replica_id, 0)
            if now - began >= (FINISH_S if count else _SURE_S):
                return False
            since[key] = began
            if count:
                what = f"{count} request{'s' if count > 1 else ''}"
                words = f"replica {item.spec.replica_id} on node {item.node_id} finishes {what} before it leaves"
                notes.setdefault(item.spec.profile, words)
            return True

        starts = tuple(each for each in decided.starts if each.replaces is None or not finishes(each.replaces))
        stops = tuple(each for each in decided.stops if not finishes(each.assignment))
        self._since = since
        return evolve(decided, starts=starts, stops=stops, notes=notes)
