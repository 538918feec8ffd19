"""The command `llmgw doctor`; like `app`, it makes real runners, clocks and stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

if TYPE_CHECKING:
    from llmgw.agent.doctor import Line
    from llmgw.agent.settings import AgentSettings
    from llmgw.probe.registry import Registry as Probes
    from llmgw.system.clock import Clock
    from llmgw.system.commands import Runner

_DEFAULT = "/etc/llmgw/agent.yaml"


@click.command("doctor")
@click.option("-c", "--config", type=click.Path(path_type=Path), metavar="FILE", help=f"[default: {_DEFAULT}]")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def command(context: click.Context, config: Path | None, output: str) -> None:
    """Look at everything on this node and print one line each: every probe, every proof, and what to do.

    Changes nothing; may run beside the agent. The exit code is 1 when anything is BAD.
    """
    path = config or (context.obj if isinstance(context.obj, Path) else None) or Path(_DEFAULT)
    bad, made = False, []
    for line in _lines(path):
        bad = bad or line.mark == "BAD"
        if output == "json":
            made.append({**attrs.asdict(line), "mark": str(line.mark)})
        else:
            click.echo("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line.text()))
    if output == "json":
        click.echo(json.dumps(made, indent=1))
    context.exit(1 if bad else 0)


def _lines(path: Path) -> Iterator[Line]:
    from llmgw.agent import settings
    from llmgw.agent.doctor import Line, Mark
    from llmgw.errors import ConfigError

    try:
        config = settings.load(path)
        yield Line(Mark.OK, "configuration", f"`{path}` is valid")
        for words in config.warnings:
            yield Line(Mark.WARN, "configuration", words)
    except ConfigError as error:
        for problem in error.problems or (error.words(),):
            yield Line(Mark.BAD, "configuration", problem, error.hint)
        config = settings.loads("server: http://127.0.0.1:7443\nnode_id: unnamed\n", "defaults")
    yield from _node(config)


def _node(config: AgentSettings) -> Iterator[Line]:
    from llmgw.agent.doctor import EngineDoctor, Line, Mark, directory_line, node_lines
    from llmgw.errors import LlmgwError
    from llmgw.install.prove import Prover
    from llmgw.install.store import Store
    from llmgw.probe.address import management_address
    from llmgw.providers import registry as providers
    from llmgw.system.clock import RealClock
    from llmgw.system.commands import RealRunner
    from llmgw.system.http import Http

    clock, runner = RealClock(), RealRunner()
    probes = make_probe(config, runner, clock)
    facts = probes.probe()
    yield from node_lines(facts, probes.warnings(facts, probes.readings()))
    server = config.servers[0]
    try:
        found = management_address(config.mgmt_addr, config.mgmt_interface, server.host, server.port)
        address = found.address if found is not None else "127.0.0.1"
        yield Line(Mark.OK, "address", f"engines listen on {address}")
    except LlmgwError as error:
        yield Line(Mark.BAD, "address", error.words(), error.hint)
    yield _server(config)
    for what, place in (
        ("engines_dir", config.engines_dir),
        ("weights_dir", config.weights_dir),
        ("work_dir", config.supervisor.work_dir),
    ):
        yield directory_line(what, Path(place))
    with Http(use_proxies=False) as local:
        doctor = EngineDoctor(Store(Path(config.engines_dir), clock), Prover(runner, local, clock), providers.load())
        yield from doctor.lines(facts, config.named)


def make_probe(config: AgentSettings, runner: Runner, clock: Clock) -> Probes:
    """The probes as agent.yaml wants them."""
    from llmgw.probe.registry import ProbeSettings, Registry

    return Registry(
        ProbeSettings(
            nvidia_smi=config.discovery.nvidia_smi,
            ib_root=config.discovery.ib_root,
            prefer_nvml=config.discovery.prefer_nvml,
            fabrics=tuple((f.name, f.hcas, f.rate_gbps) for f in config.fabrics),
            labels=dict(config.labels),
            mgmt_addr=config.mgmt_addr,
            mgmt_interface=config.mgmt_interface,
            server_host=config.servers[0].host,
            server_port=config.servers[0].port,
            model_dirs=(*config.model_dirs, config.weights_dir),
            engines_dir=config.engines_dir,
            work_dir=config.supervisor.work_dir,
        ),
        runner,
        clock,
    )


def _server(config: AgentSettings) -> Line:
    from llmgw.agent.doctor import Line, Mark
    from llmgw.system.files import read_text

    text = read_text(Path(config.supervisor.work_dir, "status.json"))
    try:
        status = json.loads(text or "")
        connected, words = status["connected"], str(status["words"])
        running = Path(f"/proc/{int(status['pid'])}").exists()
    except (ValueError, KeyError, TypeError):
        words = f"no agent has run with `{config.supervisor.work_dir}`"
        return Line(Mark.UNKNOWN, "server", words, "start `llmgw agent`")
    if not running:
        return Line(Mark.BAD, "server", "the agent does not run", "start `llmgw agent`, and look at its log")
    if connected == "yes":
        return Line(Mark.OK, "server", words)
    before = str(status.get("last_error") or "")
    if before and before not in words:
        return Line(Mark.BAD, "server", words, before)
    fix = "docs/certificates.md says how to renew one" if "certificate" in words else "look at the agent's log"
    return Line(Mark.BAD, "server", words, fix)
