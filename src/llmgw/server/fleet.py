"""The fleet in memory: what each node last said, and when that arrived. Heartbeats end here, never in the database."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Protocol

from attrs import define, evolve, field

from llmgw import __version__
from llmgw.domain.facts import NodeFacts, NodeWarning
from llmgw.domain.identity import Certified
from llmgw.domain.report import Desired, NodeReport, NodeView, Presence, agreed_interval, judge_presence
from llmgw.errors import LinkError, LlmgwError
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
    certificate: Certified | None = None
    presence: Presence = Presence.NEVER
    draining: bool = False
    view: NodeView | None = None


class Fleet:
    """All nodes that ever connected. Any thread may call; nothing blocks but `ask`.

    Args:
        known: ids of nodes that connected to an earlier server on the same state.
        lost_after: missed beats until a node is lost.
        on_change: called, without a lock held, when something changed that may matter to placement or routes.
        on_new: called with the id of a node that was never seen before.
        draining: ids of nodes that are being emptied.
        tell: called with a node's id and words when it came, went, was lost or came back.
    """

    def __init__(
        self,
        clock: Clock,
        known: Iterable[str],
        *,
        lost_after: int,
        on_change: Callable[[], None],
        on_new: Callable[[str], None],
        draining: Container[str] = (),
        tell: Callable[[str, str], None] = lambda _node_id, _words: None,
    ) -> None:
        self._clock = clock
        self._lost_after = lost_after
        self._on_change = on_change
        self._on_new = on_new
        self._lock = threading.Lock()
        self._tell = tell
        self._nodes = {node_id: _Node(node_id, draining=node_id in draining) for node_id in sorted(known)}
        self._sorted = True
        self._revision = 0
        self._started = clock.monotonic()
        self._stood_still = False

    @property
    def revision(self) -> int:
        """Differs when something changed that may matter to placement or routes; presence is judged by `views`."""
        return self._revision

    def stood_still(self) -> None:
        """This server itself stood still until now: silence before now is not held against any node."""
        with self._lock:
            self._started = self._clock.monotonic()
            self._stood_still = True
            self._revision += 1

    def knows(self, node_id: str) -> bool:
        """Whether that node ever connected."""
        with self._lock:
            return node_id in self._nodes

    def set_draining(self, node_id: str, draining: bool) -> bool:
        """Note that a node is being emptied, or no longer; False when there is no such node."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None:
                return False
            node.draining, node.view = draining, None
            self._revision += 1
        self._on_change()
        return True

    def forget(self, node_id: str) -> bool:
        """Forget a node that is away, until it connects again; False when it is connected, or was forgotten."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None or node.agent is not None:
                return False
            del self._nodes[node_id]
            self._revision += 1
        self._on_change()
        return True

    def admit(self, node_id: str, hello: Greeting, address: str, agent: AgentHandle) -> None:
        """A node has connected and is welcome; it takes the place of an older connection of the same id."""
        warnings = self._greeting_warnings(hello)
        with self._lock:
            new = node_id not in self._nodes
            node = self._nodes.setdefault(node_id, _Node(node_id))
            self._sorted = self._sorted and not new
            self._revision += 1
            node.view = None
            node.agent, node.instance_id, node.address = agent, hello.instance_id, address
            node.version, node.facts, node.left_words = hello.version, hello.facts or node.facts, ""
            node.own_warnings = warnings
            node.interval_s = agreed_interval(hello.heartbeat_interval_s)
        log.info("node %s connected from %s, llmgw %s", node_id, address, hello.version)
        if new:
            self._on_new(node_id)
        self._tell(node_id, f"connected from {address}, llmgw {hello.version}")
        self._on_change()

    def certified(self, node_id: str, certificate: Certified | None) -> None:
        """What certificate a node has now: the one it showed, or one just issued to it; None without TLS."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is not None:
                node.certificate, node.view = certificate, None

    def reported(self, node_id: str, report: NodeReport) -> None:
        """A heartbeat has arrived."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None:
                return
            before, node.report, node.view = node.report, report, None
            node.facts = report.facts or node.facts
            node.arrived, node.last_seen = self._clock.monotonic(), self._clock.now()
            was, node.presence = node.presence, Presence.CONNECTED
            changed = was is not Presence.CONNECTED or _differs(before, report)
            self._revision += changed
        if was is Presence.LOST:
            self._tell(node_id, "is back: it reports again")
        if changed:
            self._on_change()

    def left(self, node_id: str, instance_id: str, words: str) -> None:
        """A connection has ended; ignored when a newer one of the same node is there."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None or node.instance_id != instance_id:
                return
            node.agent, node.left_words, node.view = None, words, None
            self._revision += 1
        log.info("node %s disconnected: %s", node_id, words)
        self._tell(node_id, f"disconnected: {words}")
        self._on_change()

    def views(self) -> tuple[NodeView, ...]:
        """Every node as it is now, by id. A view is the same object as before while nothing about it changed."""
        now = self._clock.monotonic()
        with self._lock:
            if not self._sorted:
                self._nodes = dict(sorted(self._nodes.items()))
                self._sorted = True
            return tuple([self._view(node, now) for node in self._nodes.values()])

    def agents(self) -> dict[str, AgentHandle]:
        """The connected agents by node id."""
        with self._lock:
            return {node.node_id: node.agent for node in self._nodes.values() if node.agent is not None}

    def ask(self, node_id: str, what: str, args: Mapping[str, str], timeout_s: float) -> Any:
        """Ask a node and wait for its answer.

        Raises:
            LlmgwError: there is no such node.
            LinkError: the node is not connected, or gave no answer in time.
            ApiError: the node answered that it cannot, in its own words.
        """
        agent = self.agents().get(node_id)
        if agent is None:
            with self._lock:
                known = node_id in self._nodes
            if not known:
                raise no_node(node_id)
            raise LinkError(
                f"cannot ask node `{node_id}` for `{what}`",
                cause="it is not connected",
                hint=f"`llmgw ctl nodes {node_id}` says since when, and what it said last",
                code="node-away",
            )
        return agent.ask(what, args, timeout_s)

    def _view(self, node: _Node, now: float) -> NodeView:
        presence, words = self._presence(node, now)
        if presence is not node.presence:
            self._revision += 1
            if presence is Presence.LOST:
                self._tell(node.node_id, words)
            node.presence = presence
        last = node.view
        if last is not None and last.presence is presence and last.presence_words == words:
            return last
        report = node.report
        own = (*node.own_warnings.values(), *_certificate_warnings(node.certificate, self._clock.now()))
        if report is not None and own:
            report = evolve(report, warnings=(*report.warnings, *own))
        node.view = NodeView(
            node_id=node.node_id,
            presence=presence,
            presence_words=words,
            facts=node.facts,
            report=report,
            draining=node.draining,
            version=node.version,
            last_seen=node.last_seen,
            certificate=node.certificate,
        )
        return node.view

    def _presence(self, node: _Node, now: float) -> tuple[Presence, str]:
        arrived, silent = node.arrived, False
        if arrived is not None and arrived < self._started:
            arrived, silent = self._started, True
        presence, words = judge_presence(arrived, node.agent is not None, now, node.interval_s, self._lost_after)
        if presence is Presence.NEVER:
            presence, words = self._unseen(now)
        elif presence is Presence.LOST and silent and now - self._started < self._patience_s(node):
            presence = Presence.STALE
            words = f"stale: no report since this server stood still, {format_duration(now - self._started)} ago"
        elif presence is not Presence.CONNECTED and node.agent is None and node.left_words:
            words = f"{words}: {node.left_words}"
        return presence, words

    def _patience_s(self, node: _Node) -> float:
        """How long a node may take to come back to a server that was away: agents pause up to 30 s between attempts."""
        return _RETURN_S + max(3, self._lost_after) * node.interval_s

    def _unseen(self, now: float) -> tuple[Presence, str]:
        """A node known from before this server started. Agents wait up to 30 s between attempts to come back."""
        age = now - self._started
        since = "stood still until" if self._stood_still else "started"
        words = f"not seen since this server {since} {format_duration(age)} ago"
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


def _certificate_warnings(certificate: Certified | None, now: float) -> tuple[NodeWarning, ...]:
    if certificate is None or now < certificate.worry_at:
        return ()
    words = f"its certificate {certificate.words(now)}: see why it was not renewed, or issue a new one by hand"
    return (NodeWarning("certificate-expiring", words, certificate.worry_at),)


def _differs(before: NodeReport | None, report: NodeReport) -> bool:
    """Whether the reconciler has to look: not for readings, not for the counting of bytes."""
    if before is None or (before.probed_at is None) != (report.probed_at is None):
        return True
    if report.facts is not None or before.weights != report.weights:
        return True
    if before.engines != report.engines and _engines(before) != _engines(report):
        return True
    return before.replicas != report.replicas and _replicas(before) != _replicas(report)


def _engines(report: NodeReport) -> object:
    return [(item.name, item.version, item.build, item.state, item.usable, item.words) for item in report.engines]


def _replicas(report: NodeReport) -> object:
    return [evolve(item, progress=None, last_log=()) for item in report.replicas]


def no_node(node_id: str) -> LlmgwError:
    """That nobody ever connected under this name."""
    hint = "`llmgw ctl nodes` lists all that ever connected"
    return LlmgwError(f"there is no node `{node_id[:253]}`", hint=hint, code="not-found")
