"""Islands: nodes that reach one another over one fabric. A node on no usable fabric is an island of its own."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from llmgw.domain.facts import Truth
from llmgw.domain.report import NodeView


@frozen
class Island:
    """Nodes of one fabric, by id. `fabric` is None for a node alone."""

    fabric: str | None
    nodes: tuple[str, ...]


def islands(fleet: Iterable[NodeView]) -> tuple[Island, ...]:
    """Group nodes by the fabrics seen usable on them, largest first. A node on two fabrics is in both islands."""
    by_fabric: dict[str, list[str]] = {}
    alone: list[str] = []
    for node in fleet:
        usable = [f.name for f in (node.facts.fabrics if node.facts else ()) if f.usable.value is Truth.YES]
        for name in usable:
            by_fabric.setdefault(name, []).append(node.node_id)
        if not usable:
            alone.append(node.node_id)
    grouped = [Island(name, tuple(sorted(nodes))) for name, nodes in by_fabric.items()]
    single = [Island(None, (node_id,)) for node_id in alone]
    return tuple(sorted(grouped + single, key=lambda island: (-len(island.nodes), island.fabric or "", island.nodes)))
