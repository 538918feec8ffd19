"""What each node is told to have and to run: its full desired set, whenever that differs from what it was sent last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import evolve

from llmgw.domain.engines import EngineSpec, EngineState, Release
from llmgw.domain.placement import label_words
from llmgw.domain.report import Desired, NodeView
from llmgw.domain.rollout import Assignment, Rollback
from llmgw.errors import LlmgwError
from llmgw.server.fleet import AgentHandle

log = logging.getLogger(__name__)

HandOn: TypeAlias = Callable[[Sequence[EngineSpec]], tuple[tuple[Release, ...], str]]


class Teller:
    """Owned by the reconciler's thread.

    Args:
        engines: what nodes are told to have, by name.
        epoch: the fencing epoch.
        hand_on: engines of a node -> what it is told of their releases, and where their archives are served.
    """

    def __init__(self, engines: Mapping[str, EngineSpec], epoch: int, hand_on: HandOn) -> None:
        self._engines = engines
        self._epoch = epoch
        self._hand_on = hand_on
        self._generation = 0
        self._sent: dict[str, tuple[AgentHandle, object]] = {}

    def tell(
        self,
        fleet: Sequence[NodeView],
        agents: Mapping[str, AgentHandle],
        assignments: Iterable[Assignment],
        rollbacks: Iterable[Rollback],
    ) -> bool:
        """Send what is new; False when a node could not be told and has to be told again."""
        self._sent = {node_id: sent for node_id, sent in self._sent.items() if node_id in agents}
        here: dict[str, list[Assignment]] = {}
        for item in sorted(assignments, key=lambda item: item.spec.replica_id):
            here.setdefault(item.node_id, []).append(item)
        kept = [(back.engine, back.good) for back in rollbacks]
        handed: dict[int, tuple[tuple[EngineSpec, ...], tuple[tuple[Release, ...], str]]] = {}
        sets: dict[object, tuple[EngineSpec, ...]] = {}
        told = True
        for node in fleet:
            agent = agents.get(node.node_id)
            if agent is None:
                continue
            mine = here.get(node.node_id, ())
            engines = self._engines_of(node, mine, kept, sets)
            if id(engines) not in handed:
                handed[id(engines)] = engines, self._hand_on(engines)
            releases, assets_at = handed[id(engines)][1]
            content = (engines, tuple([item.spec for item in mine]), releases, assets_at)
            sent = self._sent.get(node.node_id)
            if sent is not None and sent[0] is agent and sent[1] == content:
                continue
            self._generation += 1
            desired = Desired(self._generation, self._epoch, *content)
            try:
                agent.send_desired(desired)
            except LlmgwError as error:
                log.warning("cannot tell node %s what to run: %s", node.node_id, error.words())
                told = False
                continue
            self._sent[node.node_id] = (agent, content)
        return told

    def _engines_of(
        self,
        node: NodeView,
        mine: Sequence[Assignment],
        kept: Sequence[tuple[str, str]],
        sets: dict[object, tuple[EngineSpec, ...]],
    ) -> tuple[EngineSpec, ...]:
        """The wanted engines, and beside them the older versions that replicas here still run or may go back to."""
        labels = node.facts.labels if node.facts is not None else {}
        older = {(item.spec.engine, item.spec.engine_version) for item in mine} | set(kept)
        wanted = {(spec.name, spec.version) for spec in self._engines.values()}
        beside = tuple(sorted(pair for pair in older - wanted if pair[1] and not _names(node, pair[0])))
        key = (tuple(sorted(labels.items())), beside)
        if key not in sets:
            base = tuple(spec for spec in self._engines.values() if not label_words(spec.node_selector, node))
            here = {spec.name: spec for spec in base}
            sets[key] = (*base, *(evolve(here[name], version=version) for name, version in beside if name in here))
        return sets[key]


def _names(node: NodeView, engine: str) -> bool:
    """Whether the node's own configuration names that engine: nothing is installed for it then."""
    said = node.report.engines if node.report is not None else ()
    return any(status.name == engine and status.state is EngineState.NAMED for status in said)
