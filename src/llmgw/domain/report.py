"""A node's report, and what its age means."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import field, frozen

from llmgw.domain.engines import EngineSpec, EngineStatus, Release
from llmgw.domain.facts import NodeFacts, NodeWarning, Readings, WeightsFile
from llmgw.domain.identity import Certified
from llmgw.domain.replicas import ReplicaSpec, ReplicaStatus


@frozen
class NodeReport:
    """What a node says about itself. `probed_at` None: it has not looked yet, so empty lists mean "not yet known".

    Args:
        seq: counts up per connection; every report is acknowledged.
        generation: of the desired set the agent is working on, None before the first.
        facts: None when unchanged since the last report on this connection.
    """

    seq: int
    generation: int | None
    epoch: int | None
    probed_at: float | None
    facts: NodeFacts | None
    readings: Readings | None
    engines: tuple[EngineStatus, ...] = ()
    replicas: tuple[ReplicaStatus, ...] = ()
    weights: tuple[WeightsFile, ...] = ()
    warnings: tuple[NodeWarning, ...] = ()


@frozen
class Desired:
    """The full desired set for one node: a snapshot, never a difference.

    Args:
        generation: counts up whenever the content changes.
        epoch: fencing; an agent obeys no epoch lower than the highest it has seen.
        releases: what the server found out about engines that are fetched from it.
        assets_at: `http://HOST:PORT` or `https://…` where it serves their archives; `*` stands for the host dialled.
    """

    generation: int
    epoch: int
    engines: tuple[EngineSpec, ...] = ()
    replicas: tuple[ReplicaSpec, ...] = ()
    releases: tuple[Release, ...] = ()
    assets_at: str = ""


class Presence(StrEnum):
    """How fresh the last report is."""

    NEVER = "never"
    CONNECTED = "connected"
    STALE = "stale"
    LOST = "lost"


@frozen
class NodeView:
    """One node as the server sees it: the last report and how old it is.

    `facts` survive from report to report; `presence_words` says in a sentence why it is not `connected`.
    """

    node_id: str
    presence: Presence
    presence_words: str
    facts: NodeFacts | None = None
    report: NodeReport | None = None
    draining: bool = False
    version: str | None = None
    last_seen: float | None = None
    claims: Mapping[str, int] = field(factory=dict)
    certificate: Certified | None = None


def agreed_interval(asked_s: float) -> float:
    """The heartbeat interval for a node whose configuration asks for `asked_s` seconds; NaN and nonsense give 5 s."""
    return min(max(asked_s, 0.05), 600.0) if asked_s > 0 else 5.0


def judge_presence(
    last_seen: float | None, connected: bool, now: float, interval_s: float, lost_after: int
) -> tuple[Presence, str]:
    """Decide how fresh a node is from when its last report arrived.

    Args:
        last_seen: arrival of the last report, seconds on the clock of `now`; None before the first.
        connected: its socket is open.
        interval_s: heartbeat interval.
        lost_after: missed beats until lost.

    Returns:
        The presence and its sentence.
    """
    if last_seen is None:
        if connected:
            return Presence.STALE, "connected, has not reported yet"
        return Presence.NEVER, "has never reported"
    age = max(0.0, now - last_seen)
    missed = age / interval_s
    if missed >= lost_after:
        return Presence.LOST, f"lost: no report for {age:.0f} s ({lost_after} beats of {interval_s:g} s)"
    if not connected:
        return Presence.STALE, f"stale: disconnected, last report {age:.0f} s ago"
    if missed >= 1.5:
        return Presence.STALE, f"stale: last report {age:.0f} s ago, one is due every {interval_s:g} s"
    return Presence.CONNECTED, "connected"
