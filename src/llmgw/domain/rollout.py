"""What has to change so that the replicas that run are the replicas that are wanted.

`plan` is recomputed in full whenever something changed; carrying out a plan twice changes nothing. A replica that
serves is replaced by one of another index, so that both can run: the old one leaves when the new one is ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llmgw.domain.assignments import Assignment, Plan, Rollback, Start, Stop, status_of, wanted_digest
from llmgw.domain.engines import EngineSpec
from llmgw.domain.profiles import Profile
from llmgw.domain.report import NodeView, Presence
from llmgw.domain.rolling import Desk, Roll

__all__ = ["Assignment", "Plan", "Rollback", "Start", "Stop", "moves_held", "plan", "status_of", "wanted_digest"]


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
    rollbacks: Mapping[str, Rollback] | None = None,
) -> Plan:
    """Compare what is wanted with what is assigned.

    A missing replica is placed. A replica on a lost node is placed elsewhere, unless moves are `held`; until there is a
    place it stays where it was. A replica whose profile or engine version changed, or whose node is draining, is
    replaced: those that serve nobody at once; the serving ones one at a time, by one more replica, and each leaves when
    that one is ready. Where there is no room for both, the old one leaves first. A replacement that fails holds the
    rest; one that failed twice with a new engine version goes, and the profile stays with the version before.

    Args:
        engines: wanted engines by name.
        held: why moves are held now, empty when they are not.
        formats: weights formats by engine name, where known.
        rollbacks: of earlier plans, by profile name; those that no longer hold are passed over.
    """
    wanted = {profile.name: profile for profile in profiles}
    by_id = {node.node_id: node for node in fleet}
    stops = [
        Stop(item, f"profile `{item.spec.profile}` was deleted")
        for item in assignments
        if item.spec.profile not in wanted
    ]
    mine: dict[str, list[Assignment]] = {}
    for item in sorted(assignments, key=lambda item: item.index):
        if item.spec.profile in wanted:
            mine.setdefault(item.spec.profile, []).append(item)
    desk = Desk(engines, fleet, by_id, formats, [item for items in mine.values() for item in items], rollbacks or {})
    desk.stops += stops
    for profile in sorted(profiles, key=lambda item: item.name):
        Roll(desk, profile, mine.get(profile.name, []), held).decide()
    return Plan(tuple(desk.starts), tuple(desk.stops), desk.refusals, desk.notes, tuple(desk.rollbacks))
