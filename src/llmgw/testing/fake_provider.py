"""A provider whose engine is the fake engine: for tests of everything around an engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

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
from llmgw.errors import ProviderError

NAME = "fake"
PROGRAM = Path(__file__).with_name("fake_engine")
INSTALLED = InstalledEngine(name=NAME, version="1", build="cpu", dir=str(PROGRAM.parent), binary=sys.executable)


class FakeProvider:
    """Launches `fake_engine/` with this interpreter.

    Args:
        flags: flags of the fake engine given to each launch, before the plan's own `args`.
        term_twice: as in Launch.
        health_timeout_s: as in Launch.
    """

    def __init__(self, flags: Sequence[str] = (), *, term_twice: bool = True, health_timeout_s: float = 1.0) -> None:
        self.flags = tuple(flags)
        self.term_twice = term_twice
        self.health_timeout_s = health_timeout_s

    @property
    def name(self) -> str:
        return NAME

    @property
    def capabilities(self) -> Capabilities:
        endpoints = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
        return Capabilities(False, ("gguf",), False, endpoints, metrics="/metrics")

    def origin(self, version: str) -> Origin:
        raise ProviderError(f"`{NAME} {version}` is published nowhere", cause="the fake engine is part of llmgw")

    def recipe(self, spec: EngineSpec, facts: NodeFacts, assets: tuple[Asset, ...]) -> Recipe:  # noqa: ARG002
        raise ProviderError(f"`{NAME}` is not installed", cause="the fake engine is part of llmgw")

    def named(self, engine: NamedEngine) -> NamedProbe:  # noqa: ARG002
        # it has no version to tell: the group is empty
        return NamedProbe(binary=sys.executable, checks=(), version="()")

    def launch(self, engine: InstalledEngine, plan: LaunchPlan) -> Launch:
        argv = [
            engine.binary, "-I", "-S", str(PROGRAM),
            "--host", plan.host,
            "--port", str(plan.port),
            "--alias", plan.model_name,
            "--slots", str(plan.slots),
            "--model", plan.model_path,
        ]  # fmt: skip
        if plan.api_key_file:
            argv += ["--api-key-file", plan.api_key_file]
        return Launch(
            argv=(*argv, *self.flags, *plan.args),
            env=dict(plan.env),
            health_path="/health",
            health_timeout_s=self.health_timeout_s,
            key_path="/props",
            term_twice=self.term_twice,
        )
