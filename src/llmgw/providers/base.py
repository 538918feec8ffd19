"""What a provider is: it answers with data (recipes, argument lists) and never downloads, spawns or installs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from llmgw.domain.engines import (
    Asset,
    Capabilities,
    EngineSpec,
    InstalledEngine,
    Launch,
    LaunchPlan,
    NamedEngine,
    NamedProbe,
    Origin,
    Recipe,
)
from llmgw.domain.facts import NodeFacts


@runtime_checkable
class Provider(Protocol):
    """One engine. A class without constructor arguments, registered as an entry point of group `llmgw.providers`."""

    @property
    def name(self) -> str:
        """Name in server.yaml, agent.yaml and profiles, such as `llama.cpp`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        ...

    def origin(self, version: str) -> Origin:
        """Where a version is published.

        Raises:
            ProviderError: the engine is named-only.
            NoBuild: the version is not one of this engine's.
        """
        ...

    def recipe(self, spec: EngineSpec, facts: NodeFacts, assets: tuple[Asset, ...]) -> Recipe:
        """Choose the build for a node out of what a source lists, and say how it is proven.

        Args:
            assets: names, sizes and digests; names move between versions and are matched by pattern.

        Raises:
            NoBuild: none of them runs on this node; says why for each kind of build.
            ProviderError: the engine is named-only.
        """
        ...

    def named(self, engine: NamedEngine) -> NamedProbe:
        """How the binary that agent.yaml names is seen to run.

        Raises:
            ProviderError: a setting is missing or unknown; lists the known ones.
        """
        ...

    def launch(self, engine: InstalledEngine, plan: LaunchPlan) -> Launch:
        """How to start the engine for one replica.

        Raises:
            ProviderError: the plan's own arguments would take over what llmgw sets.
        """
        ...


ATTRIBUTES = ("name", "capabilities", "origin", "recipe", "named", "launch")
