"""Providers come through entry points; one that fails is named and the others go on. The kit finds broken ones."""

from __future__ import annotations

from importlib import metadata

import attrs
import pytest

from llmgw.domain.engines import Capabilities, InstalledEngine, Launch, LaunchPlan
from llmgw.errors import ProviderError
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.providers.registry import GROUP, load
from llmgw.testing.conformance import check_provider


def point(name: str, value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name, value, GROUP)


class Halfway:
    name = "halfway"
    capabilities = Capabilities(True, ("gguf",), False, ())


class Raising:
    def __init__(self) -> None:
        raise RuntimeError("no licence")


def test_the_built_in_providers_come_through_the_same_door() -> None:
    registry = load()
    assert registry.problems == ()
    assert {"llama.cpp", "vllm", "sglang"} <= set(registry.providers)


def test_a_provider_that_fails_is_reported_and_the_others_go_on() -> None:
    registry = load(
        [
            point("gone", "no_such_module_anywhere:X"),
            point("halfway", f"{__name__}:Halfway"),
            point("raising", f"{__name__}:Raising"),
            point("other-name", "llmgw.providers.vllm:Vllm"),
            point("llama.cpp", "llmgw.providers.llamacpp:LlamaCpp"),
            point("llama.cpp", "llmgw.providers.llamacpp:LlamaCpp"),
        ]
    )
    assert list(registry.providers) == ["llama.cpp"]
    reasons = {problem.name: problem.reason for problem in registry.problems}
    assert reasons["gone"] == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert reasons["halfway"] == "it lacks `origin`, `recipe`, `named`, `launch`"
    assert reasons["raising"] == "RuntimeError: no licence"
    assert reasons["other-name"] == "it is registered as `other-name` and calls itself 'vllm'"
    assert reasons["llama.cpp"] == "another distribution has the same name"
    with pytest.raises(ProviderError, match="the provider `raising` is not available: RuntimeError: no licence"):
        registry.get("raising")


def test_an_unknown_provider_is_told_with_the_known_ones() -> None:
    with pytest.raises(ProviderError) as caught:
        load().get("tgi")
    assert "`llama.cpp`" in caught.value.hint


def test_a_distribution_of_a_plugin_is_named() -> None:
    entry = next(each for each in metadata.entry_points(group=GROUP) if each.name == "vllm")
    broken = metadata.EntryPoint("vllm", "llmgw.no_such:Vllm", GROUP)._for(entry.dist)  # type: ignore[attr-defined]
    (problem,) = load([broken]).problems
    assert problem.distribution == "llmgw"
    assert "of the distribution `llmgw`" in problem.words()


def test_missing_metadata_is_told() -> None:
    registry = load([])
    with pytest.raises(ProviderError, match="no distribution metadata"):
        registry.get("llama.cpp")


@pytest.mark.parametrize(
    ("name", "settings"),
    [("llama.cpp", {"bin": "/x/llama-server"}), ("vllm", {"bin": "/x/vllm"}), ("sglang", {"python": "/x/python"})],
)
def test_the_built_in_providers_conform(name: str, settings: dict[str, str]) -> None:
    version = "b10991" if name == "llama.cpp" else ""
    assert check_provider(load().providers[name], version=version, settings=settings) == []


def test_the_kit_finds_what_is_wrong() -> None:
    class Careless(LlamaCpp):
        def origin(self, version: str):  # type: ignore[no-untyped-def]
            raise KeyError(version)

        def launch(self, engine: InstalledEngine, plan: LaunchPlan) -> Launch:
            return attrs.evolve(super().launch(engine, plan), argv=("/bin/other",), env={}, health_path="health")

    problems = check_provider(Careless(), version="b1", settings={"bin": "/x"})
    assert "`origin('b1')` raised KeyError: 'b1'" in problems
    assert "`launch` must start the engine's own binary" in problems
    assert "`launch` does not tell the engine its port" in problems
    assert "`launch` drops the profile's `env`" in problems
    assert "`launch.health_path` must begin with `/`" in problems
    assert check_provider(object())[0] == "it lacks `name`"
