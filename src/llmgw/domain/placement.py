"""Which node runs a replica, and if none: why, in each node's own words."""

from __future__ import annotations

from attrs import frozen


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
