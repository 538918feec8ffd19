"""Turns what changed between two passes of the reconciler into events."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.domain.replicas import ReplicaState
from llmgw.domain.report import NodeView
from llmgw.domain.rollout import Assignment
from llmgw.domain.standing import Standing, drained
from llmgw.server.events import Events

_TOLD = (ReplicaState.READY, ReplicaState.FAILED, ReplicaState.UNRESPONSIVE)


class Chronicle:
    """Owned by the reconciler's thread."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._replicas: dict[tuple[str, int], ReplicaState] = {}
        self._profiles: dict[str, str] = {}
        self._drained: set[str] = set()
        self._held = ""

    def observe(
        self, fleet: Sequence[NodeView], standings: Sequence[Standing], assigned: Sequence[Assignment], held: str
    ) -> None:
        """Tell what is different from the last time.

        Args:
            held: why moves are held though the server has run for a while, empty when they are not.
        """
        replicas: dict[tuple[str, int], ReplicaState] = {}
        profiles: dict[str, str] = {}
        for standing in standings:
            name = standing.profile.name
            profiles[name] = standing.state
            if self._profiles.get(name) != standing.state and standing.state in ("refused", "failed", "ready", "off"):
                self._events.record("profile", name, f"{standing.state}: {standing.words}")
            for item in standing.replicas:
                if item.status is None:
                    continue
                spec = item.assignment.spec
                key = (spec.replica_id, spec.epoch)
                replicas[key] = item.status.state
                if self._replicas.get(key) is not item.status.state and item.status.state in _TOLD:
                    words = f"{item.status.state.value} on node {item.assignment.node_id}: {item.status.words}"
                    self._events.record("replica", spec.replica_id, words)
        self._replicas, self._profiles = replicas, profiles
        now_drained = {node.node_id for node in fleet if node.draining and drained(node, assigned)}
        for node_id in sorted(now_drained - self._drained):
            self._events.record("node", node_id, "is drained: nothing of llmgw serves there any more")
        self._drained = now_drained
        if bool(held) != bool(self._held):
            self._events.record("server", "", f"moves are held: {held}" if held else "moves go on")
        self._held = held
