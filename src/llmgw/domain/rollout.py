"""What has to change so that the replicas that run are the replicas that are wanted.

`plan` is recomputed in full whenever something changed; carrying out a plan twice changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, frozen

from llmgw.domain.engines import EngineSpec, EngineState
from llmgw.domain.ids import replica_id
from llmgw.domain.placement import Claim, Placement, Refusal, label_words, place
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaSpec, ReplicaState, ReplicaStatus
from llmgw.domain.report import NodeView, Presence

_COMING = (ReplicaState.PENDING, ReplicaState.FETCHING, ReplicaState.STARTING, ReplicaState.LOADING)
_UP = (ReplicaState.READY, ReplicaState.UNRESPONSIVE, ReplicaState.DRAINING)


@frozen
class Assignment:
    """One replica given to one node.

    Args:
        memory_bytes: the estimate it was placed by, None when unknown.
        host, port: where it served when its node last spoke of it; None while it does not serve.
    """

    index: int
    node_id: str
    spec: ReplicaSpec
    memory_bytes: int | None = None
    host: str | None = None
    port: int | None = None


@frozen
class Start:
    """A replica to be given to a node under a new epoch, in place of `replaces` when that is set."""

    profile: Profile
    index: int
    placement: Placement
    digest: str
    replaces: Assignment | None
    words: str


@frozen
class Stop:
    """An assignment to be taken back, and why."""

    assignment: Assignment
    words: str


@frozen
class Plan:
    """What to do now. `refusals` and `notes` (why a change waits) are by profile name."""

    starts: tuple[Start, ...]
    stops: tuple[Stop, ...]
    refusals: Mapping[str, Refusal]
    notes: Mapping[str, str]


def wanted_digest(profile: Profile) -> str:
    """Changes when anything of a profile changes that needs new engine processes (not the count, aliases or labels)."""
    parts = {
        "name": profile.name,
        "model": profile.model,
        "engine": profile.engine,
        "context": profile.context,
        "slots": profile.slots,
        "gpus": profile.gpus,
        "nodes": profile.nodes,
        "args": list(profile.args),
        "env": dict(profile.env),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def status_of(assignment: Assignment, node: NodeView | None) -> ReplicaStatus | None:
    """What the node says about this very replica; None when it says nothing, or speaks of another epoch."""
    if node is None or node.report is None:
        return None
    wanted = (assignment.spec.replica_id, assignment.spec.epoch)
    return next((item for item in node.report.replicas if (item.replica_id, item.epoch) == wanted), None)


def moves_held(fleet: Sequence[NodeView], assignments: Iterable[Assignment], fraction: float) -> str:
    """Why no replica is moved off a lost node now, empty when moves may go on.

    When most of the fleet falls silent at once the fault is more likely here than there. Lost nodes without a replica
    are not counted: they were dealt with before.

    Args:
        fraction: of the nodes; at or above it nothing moves.
    """
    used = {assignment.node_id for assignment in assignments}
    lost = [node for node in fleet if node.presence is Presence.LOST and node.node_id in used]
    silent = [node for node in fleet if node.presence is Presence.STALE]
    others = [node for node in fleet if node.presence is Presence.CONNECTED]
    total = len(lost) + len(silent) + len(others)
    if not lost or (len(lost) + len(silent)) / total < fraction:
        return ""
    return (
        f"{len(lost) + len(silent)} of {total} nodes are silent at once, so nothing is moved: "
        "look at the network between this server and the nodes first"
    )


def plan(
    profiles: Sequence[Profile],
    engines: Mapping[str, EngineSpec],
    fleet: Sequence[NodeView],
    assignments: Sequence[Assignment],
    *,
    held: str,
    formats: Mapping[str, Sequence[str]],
) -> Plan:
    """Compare what is wanted with what is assigned.

    A missing replica is placed. A replica on a lost node is placed elsewhere, unless moves are `held`; until there is a
    place it stays where it was. A replica whose profile or engine version changed is replaced: those that serve nobody
    at once, the serving ones one at a time, each when all replaced before it are ready; a replacement that fails holds
    the rest.

    Args:
        engines: wanted engines by name.
        held: why moves are held now, empty when they are not.
        formats: weights formats by engine name, where known.
    """
    wanted = {profile.name: profile for profile in profiles}
    by_id = {node.node_id: node for node in fleet}
    stops: list[Stop] = []
    kept: list[Assignment] = []
    for item in assignments:
        profile = wanted.get(item.spec.profile)
        if profile is None:
            stops.append(Stop(item, f"profile `{item.spec.profile}` was deleted"))
        elif item.index >= profile.replicas:
            stops.append(Stop(item, f"`{profile.name}` wants {profile.replicas} replicas"))
        else:
            kept.append(item)
    desk = _Desk(engines, fleet, by_id, formats, {item.spec.replica_id: _claim(item, by_id) for item in kept})
    for profile in sorted(profiles, key=lambda item: item.name):
        mine = sorted((item for item in kept if item.spec.profile == profile.name), key=lambda item: item.index)
        _fill(desk, profile, mine, held)
        _roll(desk, profile, mine)
    return Plan(tuple(desk.starts), tuple(stops), desk.refusals, desk.notes)


class _Desk:
    """What one run of `plan` has decided so far; later decisions see the claims of earlier ones."""

    def __init__(
        self,
        engines: Mapping[str, EngineSpec],
        fleet: Sequence[NodeView],
        by_id: Mapping[str, NodeView],
        formats: Mapping[str, Sequence[str]],
        claims: dict[str, Claim],
    ) -> None:
        self.engines = engines
        self.fleet = fleet
        self.by_id = by_id
        self.formats = formats
        self.claims = claims
        self.starts: list[Start] = []
        self.refusals: dict[str, Refusal] = {}
        self.notes: dict[str, str] = {}

    def place(self, profile: Profile, index: int, replaces: Assignment | None, words: str) -> bool:
        """Place one replica; False, with the refusal kept, when no node takes it."""
        name = replica_id(profile.name, index)
        claims = [claim if claim.replica_id != name else evolve(claim, leaving=True) for claim in self.claims.values()]
        spec = self.engines.get(profile.engine)
        outcome = place(profile, spec, self.fleet, claims, self.formats.get(profile.engine))
        if isinstance(outcome, Refusal):
            self.refusals[profile.name] = outcome
            return False
        self.starts.append(Start(profile, index, outcome, wanted_digest(profile), replaces, words))
        self.claims[name] = Claim(name, profile.name, outcome.node_id, outcome.gpus, outcome.memory_bytes)
        return True


def _claim(item: Assignment, by_id: Mapping[str, NodeView]) -> Claim:
    status = status_of(item, by_id.get(item.node_id))
    settled = status is not None and status.state in _UP
    return Claim(
        item.spec.replica_id, item.spec.profile, item.node_id, item.spec.gpus, item.memory_bytes, settled=settled
    )


def _is_lost(item: Assignment, by_id: Mapping[str, NodeView]) -> bool:
    node = by_id.get(item.node_id)
    return node is None or node.presence is Presence.LOST


def _fill(desk: _Desk, profile: Profile, mine: Sequence[Assignment], held: str) -> None:
    present = {item.index: item for item in mine}
    for index in range(profile.replicas):
        item = present.get(index)
        if item is None:
            desk.place(profile, index, None, "wanted and not placed yet")
        elif _is_lost(item, desk.by_id):
            if held:
                desk.notes[profile.name] = f"replica {item.spec.replica_id} stays on node {item.node_id}: {held}"
            elif not desk.place(profile, index, item, f"node {item.node_id} is lost"):
                desk.notes[profile.name] = (
                    f"replica {item.spec.replica_id} stays on lost node {item.node_id}: no other node takes it"
                )


def _roll(desk: _Desk, profile: Profile, mine: Sequence[Assignment]) -> None:
    reasons = {item.index: _why_stale(desk, profile, item) for item in mine if not _is_lost(item, desk.by_id)}
    stale = [item for item in mine if reasons.get(item.index)]
    if not stale:
        return
    states = {item.index: _state(desk, item) for item in mine}
    idle = [item for item in stale if states[item.index] is not ReplicaState.READY]
    for item in idle:
        desk.place(profile, item.index, item, reasons[item.index])
    serving = [item for item in stale if item not in idle]
    if not serving or any(start.profile.name == profile.name for start in desk.starts):
        return
    for item in mine:
        if item in stale or states[item.index] is ReplicaState.READY:
            continue
        waits = f"{len(serving)} of {profile.replicas} replicas still run as before"
        status = status_of(item, desk.by_id.get(item.node_id))
        if status is not None and status.state not in _COMING:
            waits += f", because replica {item.spec.replica_id} on node {item.node_id}: {status.words}"
        desk.notes[profile.name] = waits
        return
    desk.place(profile, serving[0].index, serving[0], reasons[serving[0].index])


def _state(desk: _Desk, item: Assignment) -> ReplicaState | None:
    status = status_of(item, desk.by_id.get(item.node_id))
    return status.state if status is not None else None


def _why_stale(desk: _Desk, profile: Profile, item: Assignment) -> str:
    """Why a replica on a node that is there has to be replaced; empty when it is as wanted."""
    node = desk.by_id[item.node_id]
    if node.draining:
        return f"node {node.node_id} is draining"
    if item.spec.digest != wanted_digest(profile):
        return f"`{profile.name}` was changed"
    labels = label_words(profile.node_selector, node) if node.facts is not None else ""
    if labels:
        return f"node {node.node_id} {labels}"
    spec = desk.engines.get(profile.engine)
    said = node.report.engines if node.report is not None else ()
    named = any(status.name == profile.engine and status.state is EngineState.NAMED for status in said)
    if spec is not None and not named and item.spec.engine_version != spec.version:
        return f"engine `{profile.engine}` {spec.version} is wanted, it runs {item.spec.engine_version}"
    return ""
