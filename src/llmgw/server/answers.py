"""The answers of the admin API as plain data; shapes are in docs/architecture.md. Words of nodes pass unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmgw.config import profile_to_json
from llmgw.domain.ids import replica_id
from llmgw.domain.placement import Refusal
from llmgw.domain.replicas import ReplicaState, ReplicaStatus
from llmgw.domain.report import NodeView
from llmgw.domain.rollout import Assignment
from llmgw.domain.standing import Standing, drain_words
from llmgw.server.deploy import Outlook
from llmgw.server.events import Event
from llmgw.server.state import StoredKey
from llmgw.wire.shapes import to_full_json


def node(
    view: NodeView, assignments: Iterable[Assignment] = (), notes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """One node: everything it said, how fresh that is, and how far its draining."""
    report = view.report
    return {
        "node_id": view.node_id,
        "presence": view.presence.value,
        "words": view.presence_words,
        "version": view.version,
        "last_seen": view.last_seen,
        "draining": view.draining,
        "certificate": to_full_json(view.certificate),
        "drain_words": drain_words(view, assignments, notes),
        "probed_at": report.probed_at if report is not None else None,
        "facts": to_full_json(view.facts),
        "readings": to_full_json(report.readings) if report is not None else None,
        "engines": to_full_json(report.engines) if report is not None else [],
        "replicas": to_full_json(report.replicas) if report is not None else [],
        "weights": to_full_json(report.weights) if report is not None else [],
        "warnings": to_full_json(report.warnings) if report is not None else [],
    }


def engines(outlook: Outlook) -> list[dict[str, Any]]:
    """Every engine of every node."""
    return [
        {"node_id": view.node_id, "presence": view.presence.value, **to_full_json(status)}
        for view in outlook.nodes
        for status in (view.report.engines if view.report is not None else ())
    ]


def profile(standing: Standing) -> dict[str, Any]:
    """A profile and how it stands."""
    return {
        "profile": profile_to_json(standing.profile),
        "state": standing.state,
        "words": standing.words,
        "note": standing.note,
        "replicas_ready": standing.ready,
        "replicas_wanted": standing.profile.replicas,
        "refusal": refusal(standing.refusal),
    }


def explain(standing: Standing) -> dict[str, Any]:
    """Why a profile stands as it does."""
    return {
        "profile": standing.profile.name,
        "state": standing.state,
        "words": standing.words,
        "lines": list(standing.lines()),
        "placements": [
            {"node_id": item.assignment.node_id, "words": item.own_words, "replica_id": item.assignment.spec.replica_id}
            for item in standing.replicas
        ],
        "refusal": refusal(standing.refusal),
    }


def refusal(value: Refusal | None) -> dict[str, Any] | None:
    """A refusal, with a line for each node."""
    return None if value is None else {"words": value.words, "nodes": to_full_json(value.nodes)}


def replicas(outlook: Outlook) -> list[dict[str, Any]]:
    """Every replica wanted, where it is or why it is nowhere; then those nodes still have that are wanted no more."""
    listed: list[dict[str, Any]] = []
    wanted: set[tuple[str, int]] = set()
    presence = {view.node_id: view.presence.value for view in outlook.nodes}
    for standing in outlook.standings:
        for item in standing.replicas:
            spec = item.assignment.spec
            wanted.add((spec.replica_id, spec.epoch))
            status = item.status or ReplicaStatus(
                spec.replica_id, spec.epoch, spec.profile, ReplicaState.PENDING, item.own_words, 0.0, engine=spec.engine
            )
            node_id = item.assignment.node_id
            row = _replica(node_id, presence.get(node_id), status)
            listed.append(row | {"words": item.own_words} | ({} if item.status else {"since": None}))
        listed.extend(_unplaced(standing))
    for view in outlook.nodes:
        for status in view.report.replicas if view.report is not None else ():
            if (status.replica_id, status.epoch) not in wanted:
                listed.append(_replica(view.node_id, view.presence.value, status))
    return listed


def key(stored: StoredKey) -> dict[str, Any]:
    """A client's key, without the key."""
    given = stored.key
    return {
        "name": given.name,
        "models": list(given.models),
        "created": stored.created,
        "rpm": given.rpm,
        "tpm": given.tpm,
        "expires": given.expires,
    }


def event(value: Event) -> dict[str, Any]:
    """One thing that happened."""
    return {"seq": value.seq, "at": value.at, "kind": value.kind, "subject": value.subject, "words": value.words}


def presences(views: Iterable[NodeView]) -> Mapping[str, int]:
    """How many nodes are how fresh."""
    counts: dict[str, int] = {}
    for view in views:
        counts[view.presence.value] = counts.get(view.presence.value, 0) + 1
    return counts


def _replica(node_id: str | None, presence: str | None, status: ReplicaStatus) -> dict[str, Any]:
    return {"node_id": node_id, "presence": presence, **to_full_json(status)}


def _unplaced(standing: Standing) -> list[dict[str, Any]]:
    placed = [item.assignment.index for item in standing.replicas]
    words = standing.refusal.words if standing.refusal is not None else "not placed yet"
    wanted = standing.profile
    rows = []
    free = [index for index in range(wanted.replicas + len(placed)) if index not in placed]
    for index in free[: max(0, wanted.replicas - len(placed))]:
        status = ReplicaStatus(
            replica_id(wanted.name, index), 0, wanted.name, ReplicaState.PENDING, words, 0.0, engine=wanted.engine
        )
        rows.append(_replica(None, None, status) | {"since": None, "epoch": None})
    return rows
