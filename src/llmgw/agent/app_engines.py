"""The part of the agent's app that joins what installs engines; like `app`, it makes real stores and runners' users."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from llmgw.agent import collecting
from llmgw.agent.converge import Converge
from llmgw.agent.settings import WEIGHTS_DIR
from llmgw.agent.weights import Fetch, Weights, shown_name
from llmgw.domain.engines import Asset
from llmgw.domain.facts import NodeFacts
from llmgw.errors import FileError
from llmgw.install.named import see_named
from llmgw.install.packages import NodePackages
from llmgw.install.pipeline import Pipeline
from llmgw.install.prove import Prover
from llmgw.install.store import Store
from llmgw.providers.registry import Registry
from llmgw.sources import fetch_asset, fetch_model, make_source
from llmgw.sources.server import TEXT, Releases
from llmgw.system.clock import Clock
from llmgw.system.commands import Runner
from llmgw.system.files import make_dir
from llmgw.system.http import Http
from llmgw.system.ranged import Ranges, Throttle

if TYPE_CHECKING:
    from llmgw.agent.settings import AgentSettings


@frozen
class Clients:
    """HTTP clients: `world` as the environment says, `local` for engines, `server` for the server's archives."""

    world: Http
    local: Http
    server: Http

    @classmethod
    def open(cls, config: AgentSettings, stack: ExitStack) -> Clients:
        """Make them; `stack` closes them. That to the server uses no proxy, and trusts the CA of the cluster too."""
        world, local = stack.enter_context(Http()), stack.enter_context(Http(use_proxies=False))
        if config.tls is None:
            return cls(world, local, local)
        return cls(world, local, stack.enter_context(Http(ca_file=config.tls.ca, machine_cas=True, use_proxies=False)))


def make_converge(
    config: AgentSettings,
    registry: Registry,
    runner: Runner,
    clients: Clients,
    facts: Callable[[], NodeFacts | None],
    in_use: Callable[[], AbstractSet[tuple[str, str]]],
    changed: Callable[[], None],
    releases: Releases,
    clock: Clock,
) -> Converge:
    """The owner of this node's engines, not started."""
    prover = Prover(runner, clients.local, clock)

    def fetch(
        asset: Asset, dest_dir: Path, *, progress: Callable[[int, int | None], None], stop: threading.Event
    ) -> Path:
        client = clients.server if asset.source == TEXT else clients.world
        return fetch_asset(asset, dest_dir, client, progress=progress, stop=stop)

    pipeline = Pipeline(
        Store(Path(config.engines_dir), clock),
        lambda text: make_source(text, clients.world, releases=releases),
        fetch,
        NodePackages(runner, clock),
        prover,
        clock,
    )
    return Converge(
        config.named,
        registry,
        pipeline,
        lambda wanted, *, quick: see_named(prover, wanted, quick=quick),
        facts,
        in_use,
        clock,
        changed,
        recheck_s=config.recheck_interval_s,
    )


def make_weights_dir(path: str, own: str = WEIGHTS_DIR) -> None:
    """Make llmgw's own weights directory, so that a node that has fetched nothing yet has nothing to warn of.

    One that agent.yaml names is not made: that it is missing may mean that its disk is not mounted.
    """
    if path == own:
        with contextlib.suppress(FileError):  # the fetch that needs it has the words
            make_dir(Path(path))


def make_fetch(config: AgentSettings, http: Http) -> Fetch:
    """What brings weights into the weights directory: in parts, within the configured rate, above the floor."""
    target = Path(config.weights_dir)
    ranges = Ranges(
        connections=config.weights_connections,
        floor_bytes=config.weights_floor_bytes,
        throttle=Throttle(config.weights_rate_bytes),
    )

    def fetch(source: str, progress: Callable[[int, int | None], None], stop: threading.Event) -> Path:
        return fetch_model(source, target, http, progress=progress, stop=stop, ranges=ranges)

    return fetch


def weights_answers(
    config: AgentSettings, weights: Weights, models: Callable[[], AbstractSet[str]]
) -> dict[str, Callable[[Mapping[str, str]], Any]]:
    """Answers to the server's questions about weights.

    Args:
        models: model texts of the replicas this node is to run.
    """
    target = Path(config.weights_dir)

    def collect(args: Mapping[str, str]) -> dict[str, Any]:
        found = collecting.unused(target, models(), weights.fetching())
        if args.get("dry") == "false":
            for item in found:
                collecting.remove(item)
        return {"files": [{"path": str(i.path), "size_bytes": i.size_bytes, "what": shown_name(i.what)} for i in found]}

    return {"weights-fetch": lambda args: {"words": weights.begin(args["source"])}, "weights-collect": collect}
