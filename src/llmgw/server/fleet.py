"""The fleet in memory: what each node last said, and when that arrived. Heartbeats end here, never in the database."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from attrs import define, evolve, field

from llmgw import __version__
from llmgw.domain.facts import NodeFacts, NodeWarning
from llmgw.domain.report import Desired, NodeReport, NodeView, Presence, agreed_interval, judge_presence
from llmgw.errors import LinkError
from llmgw.system.clock import Clock
from llmgw.units import format_duration

log = logging.getLogger(__name__)

SKEW_S = 30.0
INTERVAL_S = 5.0
_RETURN_S = 30.0


class Greeting(Protocol):
    """What of an agent's hello the fleet needs (`wire.messages.Hello` has it)."""

    @property
    def version(self) -> str: ...
    @property
    def instance_id(self) -> str: ...
    @property
    def clock(self) -> float: ...
    @property
    def heartbeat_interval_s(self) -> float: ...
    @property
    def facts(self) -> NodeFacts | None: ...


class AgentHandle(Protocol):
    """The way to one connected agent."""

    def send_desired(self, desired: Desired) -> None:
        """Send a snapshot; an unsent older one is replaced."""
        ...

    def ask(self, what: str, args: Mapping[str, str], timeout_s: float) -> Any:
        """Ask and wait for the answer.

        Raises:
            LinkError: no answer in time, or the connection is gone.
            ApiError: the agent answered that it cannot, in its own words.
        """
        ...

    def close(self, words: str) -> None:
        """Close the connection."""
        ...


@define
class _Node:
    """Mutable, guarded by the fleet's lock."""

    node_id: str
    agent: AgentHandle | None = None
    instance_id: str = ""
    address: str = ""
    version: str | None = None
    facts: NodeFacts | None = None
    report: NodeReport | None = None
    arrived: float | None = None
    last_seen: float | None = None
    left_words: str = ""
    interval_s: float = INTERVAL_S
    own_warnings: dict[str, NodeWarning] = field(factory=dict)
    presence: Presence = Presence.NEVER


class Fleet:
    """All nodes that ever connected. Any thread may call; nothing blocks but `ask`.

    Args:
        known: ids of nodes that connected to an earlier server on the same state.
        lost_after: missed beats until a node is lost.
        on_change: called, without a lock held, when something changed that may matter to placement or routes.
        on_new: called with the id of a node that was never seen before.
    """

    def __init__(
        self,
        clock: Clock,
        known: Iterable[str],
        *,
        lost_after: int,
        on_change: Callable[[], None],
        on_new: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._lost_after = lost_after
        self._on_change = on_change
        self._on_new = on_new
        self._lock = threading.Lock()
        self._nodes = {node_id: _Node(node_id) for node_id in known}
        self._started = clock.monotonic()

    def admit(self, node_id: str, hello: Greeting, address: str, agent: AgentHandle) -> None:
        """A node has connected and is welcome; it takes the place of an older connection of the same id."""
        warnings = self._greeting_warnings(hello)
        with self._lock:
            new = node_id not in self._nodes
            node = self._nodes.setdefault(node_id, _Node(node_id))
            node.agent, node.instance_id, node.address = agent, hello.instance_id, address
            node.version, node.facts, node.left_words = hello.version, hello.facts or node.facts, ""
            node.own_warnings = warnings
            node.interval_s = agreed_interval(hello.heartbeat_interval_s)
        log.info("node %s connected from %s, llmgw %s", node_id, address, hello.version)
        if new:
            self._on_new(node_id)
        self._on_change()

    def reported(self, node_id: str, report: NodeReport) -> None:
        """A heartbeat has arrived."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None:
                return
            before, node.report = node.report, report
            node.facts = report.facts or node.facts
            node.arrived, node.last_seen = self._clock.monotonic(), self._clock.now()
            changed = node.presence is not Presence.CONNECTED or _matters(before) != _matters(report)
            node.presence = Presence.CONNECTED
        if changed:
            self._on_change()

    def left(self, node_id: str, instance_id: str, words: str) -> None:
        """A connection has ended; ignored when a newer one of the same node is there."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None or node.instance_id != instance_id:
                return
            node.agent, node.left_words = None, words
        log.info("node %s disconnected: %s", node_id, words)
        self._on_change()

    def views(self) -> tuple[NodeView, ...]:
        """Every node as it is now, by id."""
        now = self._clock.monotonic()
        with self._lock:
            return tuple(self._view(node, now) for _, node in sorted(self._nodes.items()))

    def agents(self) -> dict[str, AgentHandle]:
        """The connected agents by node id."""
        with self._lock:
            return {node.node_id: node.agent for node in self._nodes.values() if node.agent is not None}

    def ask(self, node_id: str, what: str, args: Mapping[str, str], timeout_s: float) -> Any:
        """Ask a node and wait for its answer.

        Raises:
            LinkError: the node is not connected, or gave no answer in time.
            ApiError: the node answered that it cannot, in its own words.
        """
        agent = self.agents().get(node_id)
        if agent is None:
            raise LinkError(f"cannot ask node {node_id} for {what}", cause="it is not connected", code="node-away")
        return agent.ask(what, args, timeout_s)

    def _view(self, node: _Node, now: float) -> NodeView:
        presence, words = judge_presence(node.arrived, node.agent is not None, now, node.interval_s, self._lost_after)
        if presence is Presence.NEVER:
            presence, words = self._unseen(now)
        elif presence is not Presence.CONNECTED and node.agent is None and node.left_words:
            words = f"{words}: {node.left_words}"
        node.presence = presence
        report = node.report
        if report is not None and node.own_warnings:
            report = evolve(report, warnings=(*report.warnings, *node.own_warnings.values()))
        return NodeView(
            node_id=node.node_id,
            presence=presence,
            presence_words=words,
            facts=node.facts,
            report=report,
            version=node.version,
            last_seen=node.last_seen,
        )

    def _unseen(self, now: float) -> tuple[Presence, str]:
        """A node known from before this server started. Agents wait up to 30 s between attempts to come back."""
        age = now - self._started
        words = f"not seen since this server started {format_duration(age)} ago"
        patience = _RETURN_S + max(3, self._lost_after) * INTERVAL_S
        return (Presence.LOST, f"lost: {words}") if age >= patience else (Presence.NEVER, words)

    def _greeting_warnings(self, hello: Greeting) -> dict[str, NodeWarning]:
        now = self._clock.now()
        made: dict[str, NodeWarning] = {}
        skew = hello.clock - now
        if abs(skew) > SKEW_S:
            way = "ahead of" if skew > 0 else "behind"
            words = f"its clock is {format_duration(abs(skew))} {way} the server's: set up NTP on both"
            made["clock-skew"] = NodeWarning("clock-skew", words, now)
        if hello.version != __version__:
            words = f"runs llmgw {hello.version}, the server {__version__}: bring both to one version"
            made["version-skew"] = NodeWarning("version-skew", words, now)
        return made


def _matters(report: NodeReport | None) -> object:
    """The part of a report whose change wakes the reconciler: not readings, not the counting of bytes."""
    if report is None:
        return None
    return (
        report.probed_at is None,
        [(item.name, item.version, item.build, item.state, item.usable, item.words) for item in report.engines],
        [evolve(item, progress=None, last_log=()) for item in report.replicas],
        report.weights,
        report.facts,
    )
