"""How a profile stands, in one state and one sentence: `ctl`, the page, `explain` and the 503 of the gateway say it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from attrs import frozen

from llmgw.domain.placement import Refusal
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaState, ReplicaStatus
from llmgw.domain.report import NodeView, Presence
from llmgw.domain.rollout import Assignment, status_of
from llmgw.domain.routing import Caps, RouteModel, RouteReplica

_LINES_TO_CLIENTS = 50


@frozen
class ReplicaStanding:
    """One replica of a profile: where it was put and what its node says of it (None: nothing yet).

    `own_words` are the node's, after its presence when it is away; `words` name replica and node before them.
    `serves`: by the node's last word; by what it said to an earlier server while this one has not heard from it.
    """

    assignment: Assignment
    status: ReplicaStatus | None
    words: str
    own_words: str
    serves: bool
    host: str | None
    port: int | None
    node_lost: bool = False

    @property
    def known_ready(self) -> bool:
        """It serves, and its node said so itself and not long ago."""
        return self.serves and self.status is not None and not self.node_lost


@frozen
class Standing:
    """One profile.

    Args:
        state: `ready`, `loading`, `refused`, `failed`, or `off` (nothing is wanted).
        words: the sentence.
        note: why a change of it waits, empty when nothing waits.
        refusal: why a replica (or its replacement) has no node.
    """

    profile: Profile
    state: str
    words: str
    replicas: tuple[ReplicaStanding, ...]
    refusal: Refusal | None = None
    note: str = ""

    @property
    def ready(self) -> int:
        """How many replicas serve on nodes that are heard from; one more that takes another's place is not counted."""
        return min(self.profile.replicas, sum(item.known_ready for item in self.replicas))

    def lines(self) -> tuple[str, ...]:
        """All there is to say, one line each; what `explain` prints."""
        lines = [self.words, *(item.words for item in self.replicas)]
        if self.note:
            lines.append(self.note)
        if self.refusal is not None:
            lines.extend(self.refusal.lines())
        return tuple(dict.fromkeys(lines))


def judge(
    profile: Profile,
    assignments: Sequence[Assignment],
    fleet: Mapping[str, NodeView],
    refusal: Refusal | None,
    note: str = "",
) -> Standing:
    """How `profile` stands.

    Args:
        assignments: those of this profile.
        fleet: nodes by id.
        refusal, note: of the last plan.
    """
    replicas = tuple(
        _replica(item, fleet.get(item.node_id)) for item in sorted(assignments, key=lambda item: item.index)
    )
    state, words = _state(profile, replicas, refusal)
    return Standing(profile, state, words, replicas, refusal, note)


def _replica(item: Assignment, node: NodeView | None) -> ReplicaStanding:
    status = status_of(item, node)
    prefix = f"replica {item.spec.replica_id} on node {item.node_id}: "
    lost = node is None or node.presence is Presence.LOST
    host, port = (status.host, status.port) if status is not None else (None, None)
    serves = status is not None and status.state is ReplicaState.READY and port is not None
    if node is not None and node.report is None and item.port is not None:
        host, port, serves = item.host, item.port, True
    if node is None or node.presence is not Presence.CONNECTED:
        presence = node.presence_words if node is not None else "the node is not known"
        said = status.words if status is not None else "ready" if serves else ""
        words = f"{presence}; it said last: {said}" if said else presence
    else:
        words = status.words if status is not None else "sent to the node, which has not said anything about it yet"
    return ReplicaStanding(item, status, prefix + words, words, serves, host, port, lost)


def _state(profile: Profile, replicas: Sequence[ReplicaStanding], refusal: Refusal | None) -> tuple[str, str]:
    if profile.replicas == 0:
        return "off", f"`{profile.name}` is scaled to `replicas: 0`"
    serving = [item for item in replicas if item.serves]
    if serving:
        heard = [item for item in serving if item.known_ready]
        if not heard:
            return "ready", serving[0].words
        count = min(len(heard), profile.replicas)
        return "ready", f"{count} of {profile.replicas} replica{'s' if profile.replicas > 1 else ''} ready"
    failed = [item for item in replicas if item.status is not None and item.status.state is ReplicaState.FAILED]
    coming = [item for item in replicas if item not in failed and not item.node_lost]
    if coming:
        return "loading", coming[0].words
    if failed:
        return "failed", failed[0].words
    if refusal is not None:
        return "refused", refusal.words
    if replicas:
        return "failed", replicas[0].words
    return "loading", f"`{profile.name}` has not been placed yet"


def drained(node: NodeView, assignments: Iterable[Assignment]) -> bool:
    """Whether nothing is assigned to a node and, by its own word, nothing runs there."""
    return not any(item.node_id == node.node_id for item in assignments) and not _running(node)


def drain_words(node: NodeView, assignments: Iterable[Assignment], notes: Mapping[str, str] | None = None) -> str:
    """How far the draining of a node is; empty when it is not being drained.

    Args:
        notes: by profile, why a change of it waits.
    """
    if not node.draining:
        return ""
    mine = [item for item in assignments if item.node_id == node.node_id]
    here = sorted(item.spec.replica_id for item in mine)
    if here:
        words = f"draining: {len(here)} replica{'s' if len(here) > 1 else ''} to move: {', '.join(here)}"
        for profile in sorted({item.spec.profile for item in mine}):
            if note := (notes or {}).get(profile):
                words += f"; {note} (see `llmgw ctl explain {profile}`)"
        return words
    running = _running(node)
    if running:
        return f"draining: nothing is assigned to it any more, {', '.join(running)} still stops"
    return "drained: nothing of llmgw serves here; it takes replicas again after `llmgw ctl undrain`"


def _running(node: NodeView) -> list[str]:
    ended = (ReplicaState.STOPPED, ReplicaState.FAILED)
    said = node.report.replicas if node.report is not None and node.presence is not Presence.LOST else ()
    return sorted(status.replica_id for status in said if status.state not in ended)


def route(standing: Standing, endpoints: Sequence[str], created: int, leaving: Container[str] = ()) -> RouteModel:
    """What the gateway has to know of a profile.

    A replica on a lost node is routed to only when no other serves: its engine outlives its agent, and a request that
    may fail is better than one that certainly does.

    Args:
        endpoints: paths the engine answers.
        created: seconds since the epoch, told to clients by `/v1/models`.
        leaving: ids of replicas that finish what they have and get no new requests.
    """
    profile = standing.profile
    serving = [item for item in standing.replicas if item.serves]
    heard = any(not item.node_lost for item in serving)
    # an engine may have made less of it: a client must not be promised what a replica does not have
    told = [item.status.context for item in serving if item.status is not None]
    replicas = []
    for item in standing.replicas:
        if item.host is None or item.port is None:
            continue
        slots = item.status.slots if item.status is not None else None
        replicas.append(
            RouteReplica(
                replica_id=item.assignment.spec.replica_id,
                node_id=item.assignment.node_id,
                host=item.host,
                port=item.port,
                slots=slots or profile.slots,
                ready=item.serves and not (item.node_lost and heard) and item.assignment.spec.replica_id not in leaving,
                key=item.assignment.spec.api_key,
            )
        )
    caps = Caps(
        profile.max_tokens,
        profile.default_max_tokens,
        profile.default_temperature,
        profile.min_temperature,
        profile.max_temperature,
    )
    return RouteModel(
        name=profile.name,
        aliases=profile.aliases,
        engine=profile.engine,
        state=standing.state,
        words=standing.words,
        context=min([profile.context, *(context for context in told if context)]),
        endpoints=tuple(endpoints),
        replicas=tuple(replicas),
        created=created,
        refusal=_told(standing.refusal) if standing.refusal is not None and standing.state != "ready" else (),
        caps=caps if caps != Caps() else None,
    )


def _told(refusal: Refusal) -> tuple[str, ...]:
    """The refusal's lines for clients; of a large fleet the first ones, and where the others are."""
    lines = refusal.lines()
    left = len(lines) - 1 - _LINES_TO_CLIENTS
    if left <= 0:
        return lines
    return (*lines[: 1 + _LINES_TO_CLIENTS], f"{left} more nodes: `llmgw ctl explain {refusal.profile}` lists them")
