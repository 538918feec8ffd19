"""Which node runs a replica, and if none: why, in each node's own words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from attrs import define, field, frozen

from llmgw.domain.engines import EngineSpec, EngineState, EngineStatus
from llmgw.domain.estimate import Estimate, estimate, find_weights
from llmgw.domain.facts import Truth, WeightsFile
from llmgw.domain.islands import islands
from llmgw.domain.profiles import Profile
from llmgw.domain.report import NodeView, Presence
from llmgw.domain.room import NoRoom, Room, Taken, find_room


@frozen
class NodeRefusal:
    """Why one node was not chosen. `code` is kebab-case; `words` are the node's own where it has any."""

    node_id: str
    code: str
    words: str


@frozen
class Refusal:
    """No node can run the replica. `words` is the one-line summary; one line per node follows."""

    profile: str
    words: str
    nodes: tuple[NodeRefusal, ...]

    def lines(self) -> tuple[str, ...]:
        """What every place prints: the summary, then `node: words` for each node."""
        return (self.words, *(f"{n.node_id}: {n.words}" for n in self.nodes))


@frozen
class Placement:
    """Where one replica goes. `gpus` are uuids; `words` says why this node."""

    profile: str
    node_id: str
    gpus: tuple[str, ...]
    engine_version: str
    words: str
    refused: tuple[NodeRefusal, ...] = ()
    memory_bytes: int | None = None


@frozen
class Claim:
    """What a replica placed earlier takes on a node.

    Args:
        memory_bytes: by estimate; None when unknown.
        settled: its engine is up, so the node's readings already count its memory.
        leaving: it stops before the replica in question starts, so what it takes counts as free.
    """

    replica_id: str
    profile: str
    node_id: str
    gpus: tuple[str, ...] = ()
    memory_bytes: int | None = None
    settled: bool = False
    leaving: bool = False


Claims: TypeAlias = Mapping[str, Mapping[str, Claim]]


def _by_node(claims: Sequence[Claim]) -> Claims:
    found: dict[str, dict[str, Claim]] = {}
    for claim in claims:
        found.setdefault(claim.node_id, {})[claim.replica_id] = claim
    return found


@frozen
class _Fit:
    """A node that can take the replica, and what decides between several."""

    node: NodeView
    room: Room
    engine_version: str
    memory_bytes: int | None
    holds_weights: bool
    same_profile: int
    load: int


_EMPTY_FLEET = (
    "no node has ever connected: start `llmgw agent` on a machine whose agent.yaml names this server under `server`"
)


def place(
    profile: Profile,
    spec: EngineSpec | None,
    fleet: Sequence[NodeView],
    claims: Sequence[Claim] | Claims = (),
    formats: Sequence[str] | None = None,
    memo: Memo | None = None,
) -> Placement | Refusal:
    """Choose the node for one replica of `profile`, or say for every node why it is not that one.

    Filters, in this order: connected and fresh, probed, not draining, engine ready at the wanted version, labels,
    model, memory free now, devices free. Among the nodes left: holds the weights, fewest replicas of this profile,
    fewest replicas at all, lowest id. Whatever a node has not said (memory, size of the weights) never refuses it.

    Args:
        profile: what is to be served.
        spec: the engine the server wants on nodes, None when the configuration does not name it.
        fleet: the nodes as they are now (presence judged by the caller).
        claims: replicas placed already; by node id and replica id when there are many.
        formats: weights formats the engine reads, None when not known.
        memo: what was found out about this very fleet for other profiles; filled further.
    """
    if not fleet:
        return Refusal(profile.name, f"no node can run `{profile.name}`: {_EMPTY_FLEET}", ())
    if profile.nodes > 1:
        return _refuse_multi_node(profile, fleet)
    by_node: Claims = _by_node(claims) if not isinstance(claims, Mapping) else claims
    fits: list[_Fit] = []
    refused: list[NodeRefusal] = []
    case = _Case(profile, spec, formats, memo or Memo())
    for node in sorted(fleet, key=lambda view: view.node_id):
        on_node = by_node.get(node.node_id)
        answer = _judge(case, node, on_node.values() if on_node else ())
        if isinstance(answer, _Fit):
            fits.append(answer)
        else:
            refused.append(answer)
    if not fits:
        count = "its only node refuses" if len(refused) == 1 else f"all {len(refused)} nodes refuse"
        return Refusal(profile.name, f"no node can run `{profile.name}`: {count}", tuple(refused))
    best = min(fits, key=lambda fit: (not fit.holds_weights, fit.same_profile, fit.load, fit.node.node_id))
    return Placement(
        profile.name,
        best.node.node_id,
        best.room.gpus,
        best.engine_version,
        "; ".join(part for part in ("holds the weights" if best.holds_weights else "", best.room.words()) if part),
        tuple(refused),
        best.memory_bytes,
    )


@define
class Memo:
    """What one pass over a fleet finds out once for all profiles; good for one snapshot of the fleet."""

    engines: dict[tuple[str, str, str], EngineStatus | NodeRefusal] = field(factory=dict)
    files: dict[str, Mapping[str, WeightsFile]] = field(factory=dict)


@define
class _Case:
    """One profile that looks for a node, and the estimates made for it so far by size of the weights."""

    profile: Profile
    spec: EngineSpec | None
    formats: Sequence[str] | None
    memo: Memo
    estimates: dict[object, Estimate] = field(factory=dict)

    def weights(self, node_id: str, files: tuple[WeightsFile, ...]) -> WeightsFile | None:
        """The file of that node the profile's `model:` names."""
        path = self.profile.model.removeprefix("file://")
        if not path.startswith("/"):
            return find_weights(self.profile.model, files)
        if node_id not in self.memo.files:
            self.memo.files[node_id] = {item.path: item for item in files}
        return self.memo.files[node_id].get(path)

    def estimate(self, weights: WeightsFile | None) -> Estimate:
        """Memory of one replica with those weights."""
        key = weights and (weights.size_bytes, weights.complete.value, weights.cache_bytes_per_token)
        if key not in self.estimates:
            self.estimates[key] = estimate(self.profile, weights)
        return self.estimates[key]

    def engine(self, node: NodeView) -> EngineStatus | NodeRefusal:
        """The node's engine, or what rules the node out for every profile on that engine."""
        key = (self.profile.engine, self.spec.version if self.spec else "", node.node_id)
        if key not in self.memo.engines:
            self.memo.engines[key] = _usable_node(self.profile.engine, self.spec, node)
        return self.memo.engines[key]


def _usable_node(engine: str, spec: EngineSpec | None, node: NodeView) -> EngineStatus | NodeRefusal:
    if node.presence is not Presence.CONNECTED or node.report is None:
        return NodeRefusal(node.node_id, "not-connected", node.presence_words)
    if node.report.probed_at is None:
        return NodeRefusal(node.node_id, "not-probed", "has not finished probing")
    if node.draining:
        return NodeRefusal(node.node_id, "draining", "is draining: it takes no new replicas")
    return usable_engine(engine, spec, node)


def _judge(case: _Case, node: NodeView, on_node: Collection[Claim]) -> _Fit | NodeRefusal:
    profile = case.profile
    engine = case.engine(node)
    if isinstance(engine, NodeRefusal) or node.report is None:
        return engine if isinstance(engine, NodeRefusal) else NodeRefusal(node.node_id, "not-connected", "")
    if profile.node_selector:
        labels = label_words(profile.node_selector, node)
        if labels:
            return NodeRefusal(node.node_id, "label", f"{labels} for `{profile.name}`")
    weights = case.weights(node.node_id, node.report.weights)
    model = _model_words(profile, weights, case.formats)
    if model:
        return NodeRefusal(node.node_id, *model)
    need = case.estimate(weights)
    taken = [Taken(claim.gpus, claim.memory_bytes, claim.settled, claim.leaving) for claim in on_node]
    room = find_room(profile, need, engine.build, node, taken)
    if isinstance(room, NoRoom):
        return NodeRefusal(node.node_id, room.code, room.words)
    return _Fit(
        node,
        room,
        engine.version or "",
        need.memory_bytes,
        weights is not None,
        sum(claim.profile == profile.name and not claim.leaving for claim in on_node),
        sum(not claim.leaving for claim in on_node),
    )


def usable_engine(name: str, spec: EngineSpec | None, node: NodeView) -> EngineStatus | NodeRefusal:
    """The node's engine `name` when it was seen to run there at the wanted version, else the node's own words."""

    def no(code: str, words: str) -> NodeRefusal:
        return NodeRefusal(node.node_id, code, words)

    said = [status for status in (node.report.engines if node.report else ()) if status.name == name]
    for status in said:
        if status.usable and status.state is EngineState.NAMED:
            return status
        if status.usable and status.state is EngineState.READY and spec is not None and status.version == spec.version:
            return status
    outside = label_words(spec.node_selector, node) if spec is not None else ""
    if not said:
        if spec is None:
            return no("engine-unknown", f"no engine `{name}`: name it under `engines` in server.yaml or agent.yaml")
        if outside:
            return no("engine-elsewhere", f"{outside} for engine `{name}`")
        return no("engine-absent", f"has no engine `{name}`, and has not said why")
    last = max(said, key=lambda status: (spec is not None and status.version == spec.version, status.since))
    if last.state is EngineState.READY and last.usable:
        wanted = f"{spec.version} is wanted" if spec is not None else "it is no longer wanted: name it in server.yaml"
        return no("engine-version", f"engine `{name}` is {last.version or 'of unknown version'}, {wanted}")
    return no(f"engine-{last.state.value}", last.words)


def label_words(selector: Mapping[str, str], node: NodeView) -> str:
    """Which label of `selector` the node lacks or has otherwise; empty when all match."""
    labels = node.facts.labels if node.facts is not None else {}
    for key, wanted in sorted(selector.items()):
        if key not in labels:
            return f"has no label `{key}`, `{wanted}` is wanted"
        if labels[key] != wanted:
            return f"label `{key}` is `{labels[key]}`, `{wanted}` is wanted"
    return ""


def _model_words(
    profile: Profile, weights: WeightsFile | None, formats: Sequence[str] | None
) -> tuple[str, str] | None:
    """Code and words when this node's copy of the model, or the model's format, rules the node out."""
    if weights is not None and weights.complete.value is Truth.NO:
        return "weights-incomplete", weights.complete.words
    path = profile.model.split("#", 1)[0]
    kind = weights.format if weights is not None else "gguf" if path.endswith(".gguf") else None
    if kind is not None and formats is not None and kind not in formats:
        reads = " and ".join(formats) or "no known format"
        return "model-format", f"engine `{profile.engine}` reads {reads}, `{profile.model}` is {kind}"
    return None


def _refuse_multi_node(profile: Profile, fleet: Sequence[NodeView]) -> Refusal:
    largest = islands(fleet)[0]
    where = f"fabric `{largest.fabric}`" if largest.fabric else "no fabric"
    words = (
        f"no node can run `{profile.name}`: a replica over `nodes: {profile.nodes}` is not supported by this version; "
        f"the largest island is {len(largest.nodes)} of {len(fleet)} nodes ({where}): write `nodes: 1`"
    )
    return Refusal(profile.name, words, ())
