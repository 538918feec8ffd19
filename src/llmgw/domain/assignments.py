"""Which node has which replica, and what a plan says about that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from attrs import frozen

from llmgw.domain.placement import Placement, Refusal
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaSpec, ReplicaStatus
from llmgw.domain.report import NodeView


@frozen
class Assignment:
    """One replica given to one node.

    Args:
        memory_bytes: the estimate it was placed by, None when unknown.
        host, port: where it served when its node last spoke of it; None while it does not serve.
        before: the engine version it took the place of, "" when that is not why it was made.
    """

    index: int
    node_id: str
    spec: ReplicaSpec
    memory_bytes: int | None = None
    host: str | None = None
    port: int | None = None
    before: str = ""


@frozen
class Start:
    """A replica to be given to a node under a new epoch, in place of `replaces` when that is set.

    `before` is as in Assignment.
    """

    profile: Profile
    index: int
    placement: Placement
    digest: str
    replaces: Assignment | None
    words: str
    before: str = ""


@frozen
class Stop:
    """An assignment to be taken back, and why."""

    assignment: Assignment
    words: str


@frozen
class Rollback:
    """An engine version that did not become ready for a profile, which therefore keeps the version before it.

    It holds until the wanted version or the profile (its `digest`) changes.
    """

    profile: str
    engine: str
    bad: str
    good: str
    digest: str
    words: str


@frozen
class Plan:
    """What to do now. `refusals` and `notes` (why a change waits) are by profile name; `rollbacks` are new ones."""

    starts: tuple[Start, ...]
    stops: tuple[Stop, ...]
    refusals: Mapping[str, Refusal]
    notes: Mapping[str, str]
    rollbacks: tuple[Rollback, ...] = ()


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
