"""What providers have in common whose engine is named by the agent's configuration and never installed."""

from __future__ import annotations

from typing import ClassVar

from llmgw.domain.engines import Asset, Capabilities, EngineSpec, Origin, Recipe
from llmgw.domain.facts import NodeFacts
from llmgw.errors import ProviderError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models")


class NamedOnly:
    """Refuses to be installed, in words.

    A subclass sets `name`, `capabilities` and `named_by`, the key of agent.yaml that names the engine.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    named_by: ClassVar[str]

    def origin(self, version: str) -> Origin:
        raise self._not_installed(version)

    def recipe(self, spec: EngineSpec, facts: NodeFacts, assets: tuple[Asset, ...]) -> Recipe:
        del facts, assets
        raise self._not_installed(spec.version)

    def _not_installed(self, version: str) -> ProviderError:
        return ProviderError(
            f"llmgw does not install {self.name} (wanted: {version})", hint=f"name it in agent.yaml: `{self.named_by}`"
        )


def device_env(gpus: tuple[str, ...]) -> dict[str, str]:
    """Which devices the engine sees, by uuid, and what keeps its marker readable.

    setproctitle would otherwise wipe the environment by which a survivor is found.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "SPT_NOENV": "1"}
