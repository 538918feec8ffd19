"""The kit a provider's author runs: `assert check_provider(MyProvider()) == []` in a test, with any test runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmgw.domain.engines import Capabilities, EngineSpec, InstalledEngine, Launch, LaunchPlan, NamedEngine, Origin
from llmgw.domain.facts import CpuFacts, Finding, MemoryFacts, NodeFacts, NvidiaFacts, OsFacts, Truth
from llmgw.errors import LlmgwError, NoBuild
from llmgw.providers.base import ATTRIBUTES

_FACTS = NodeFacts(
    hostname="node",
    boot_id="boot",
    os=OsFacts("debian", "12", "Debian 12", "debian", "6.1", "2.36", "3.4.30"),
    cpu=CpuFacts("x86_64", 4),
    memory=MemoryFacts(8 << 30),
    nvidia=NvidiaFacts(Finding(Truth.NO, "no NVIDIA driver is loaded")),
    gpus=(),
)
_PLAN = LaunchPlan(
    replica_id="model#0",
    model_name="conformance-model",
    model_path="/weights/conformance.model",
    host="192.0.2.7",
    port=28123,
    context=2048,
    slots=2,
    gpus=(),
    api_key_file="/run/replica/key",
    work_dir="/run/replica",
    env={"CONFORMANCE": "1"},
)


def check_provider(provider: Any, *, version: str = "", settings: Mapping[str, str] | None = None) -> list[str]:
    """See whether a provider keeps the contract of `llmgw.providers.base.Provider`.

    Args:
        provider: an instance.
        version: one that its engine has; "" skips what needs one.
        settings: keys of `engines.<provider>` in agent.yaml that name a binary; None skips what needs them.

    Returns:
        One sentence per problem; empty when there is none.
    """
    missing = [f"it lacks `{name}`" for name in ATTRIBUTES if not hasattr(provider, name)]
    if missing:
        return missing
    problems = _capabilities(provider)
    if not isinstance(provider.name, str) or not provider.name:
        problems.append("`name` must be a non-empty string")
    problems += _origin(provider, version)
    if settings is not None:
        problems += _named(provider, settings)
    problems += _launch(provider, settings or {})
    return problems


def _capabilities(provider: Any) -> list[str]:
    if not isinstance(provider.capabilities, Capabilities):
        return ["`capabilities` must be an `llmgw.domain.engines.Capabilities`"]
    problems = []
    if not provider.capabilities.formats:
        problems.append("`capabilities.formats` is empty: no model could ever be placed")
    if not all(path.startswith("/") for path in provider.capabilities.endpoints):
        problems.append("each of `capabilities.endpoints` must begin with `/`")
    return problems


def _origin(provider: Any, version: str) -> list[str]:
    installable = getattr(provider.capabilities, "installable", False)
    spec = EngineSpec(getattr(provider, "name", ""), version or "0")
    problems = []
    if not installable:
        for what, call in (
            ("origin", lambda: provider.origin("0")),
            ("recipe", lambda: provider.recipe(spec, _FACTS, ())),
        ):
            problems += _must_raise(what, call, LlmgwError, "for a named-only engine")
        return problems
    if version:
        try:
            if not isinstance(provider.origin(version), Origin):
                problems.append("`origin` must return an `Origin`")
        except Exception as error:
            problems.append(f"`origin({version!a})` raised {type(error).__name__}: {error}")
    problems += _must_raise(
        "recipe", lambda: provider.recipe(spec, _FACTS, ()), NoBuild, "when a release lists nothing"
    )
    return problems


def _must_raise(what: str, call: Any, kind: type[LlmgwError], when: str) -> list[str]:
    try:
        call()
    except kind as error:
        return [] if error.words() else [f"`{what}` raised {kind.__name__} without words"]
    except Exception as error:
        return [f"`{what}` must raise {kind.__name__} {when}, it raised {type(error).__name__}: {error}"]
    return [f"`{what}` must raise {kind.__name__} {when}, it returned"]


def _named(provider: Any, settings: Mapping[str, str]) -> list[str]:
    name = provider.name
    try:
        probe = provider.named(NamedEngine(name, settings))
    except Exception as error:
        return [f"`named` raised {type(error).__name__}: {error}"]
    problems = []
    if not probe.checks:
        problems.append("`named` must give at least one check: nothing is used that was not seen to run")
    if not probe.binary.startswith("/"):
        problems.append("`named` must give an absolute path: nothing is looked up on PATH")
    problems += _must_raise(
        "named", lambda: provider.named(NamedEngine(name, {"no-such-key": "x"})), LlmgwError, "for an unknown setting"
    )
    return problems


def _launch(provider: Any, settings: Mapping[str, str]) -> list[str]:
    installed = provider.capabilities.installable
    directory = "/engines/x" if installed else ""
    engine = InstalledEngine(provider.name, "1", "cpu", directory, "/engines/x/program", settings)
    try:
        launch = provider.launch(engine, _PLAN)
        again = provider.launch(engine, _PLAN)
    except Exception as error:
        return [f"`launch` raised {type(error).__name__}: {error}"]
    if not isinstance(launch, Launch):
        return ["`launch` must return a `Launch`"]
    problems = []
    if launch != again:
        problems.append("`launch` must give the same answer for the same plan")
    if not launch.argv or launch.argv[0] != engine.binary:
        problems.append("`launch` must start the engine's own binary")
    line = " ".join(launch.argv)
    for what, value in (("host", _PLAN.host), ("port", str(_PLAN.port)), ("model path", _PLAN.model_path),
                        ("model name", _PLAN.model_name)):  # fmt: skip
        if value not in line:
            problems.append(f"`launch` does not tell the engine its {what}")
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in launch.env.items()):
        problems.append("`launch` must give an environment of strings")
    if launch.env.get("CONFORMANCE") != "1":
        problems.append("`launch` drops the profile's `env`")
    if not launch.health_path.startswith("/"):
        problems.append("`launch.health_path` must begin with `/`")
    return problems
