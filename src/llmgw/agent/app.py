"""`llmgw agent`: the only place where the agent's real clock, runner, links and stores are made."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from llmgw.agent import app_doctor, service
from llmgw.agent.join import join_command
from llmgw.errors import LlmgwError, UsageError

if TYPE_CHECKING:
    from llmgw.agent.session import Session, SessionStatus
    from llmgw.agent.settings import AgentSettings
    from llmgw.agent.supervisor import Supervisor
    from llmgw.sources.server import Releases
    from llmgw.system.clock import Clock

_LOG = logging.getLogger("llmgw.agent")
_DEFAULT = "/etc/llmgw/agent.yaml"
_STATUS = "status.json"
_EPOCH = "epoch"
_LOOK_S = 0.5


@click.group("agent", invoke_without_command=True)
@click.option("-c", "--config", type=click.Path(path_type=Path), default=_DEFAULT, show_default=True, metavar="FILE")
@click.option("--check", is_flag=True, help="only validate the file, and say what is wrong with it")
@click.option("--stop-engines", is_flag=True, help="stop the engines too when the agent ends")
@click.pass_context
def command(context: click.Context, config: Path, check: bool, stop_engines: bool) -> None:
    """Run the agent of this node: it installs and proves engines, and runs the replicas the server places here.

    Engines outlive the agent; the next one adopts them.
    """
    from llmgw.agent import settings

    if context.invoked_subcommand is not None:
        context.obj = config
        return
    if check:
        for line in settings.check(config):
            click.echo(line)
        return
    _run(settings.load(config), stop_engines)


for _each in service.COMMANDS:
    command.add_command(_each)


@command.command("status")
@click.option("-c", "--config", "named", type=click.Path(path_type=Path), metavar="FILE", help="agent.yaml.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_obj
def status_command(config: Path, named: Path | None, output: str) -> None:
    """Say how the agent on this node stands with its server, and why."""
    from llmgw.agent import settings
    from llmgw.system.files import read_text

    path = Path(settings.load(named or config).supervisor.work_dir, _STATUS)
    text = read_text(path)
    if text is None:
        raise UsageError(f"`{path}` is not there", hint="no agent has run with this configuration yet")
    status = json.loads(text)
    alive = _alive(int(status["pid"]))
    if not alive:
        # the file is what it said last
        status |= {"connected": "unknown", "words": f"nobody is connected now; it said last: {status['words']}"}
    if output == "json":
        click.echo(json.dumps({**status, "running": alive}, indent=2))
        return
    click.echo(f"agent   {'running' if alive else 'not running'} (pid {status['pid']}), node `{status['node_id']}`")
    click.echo(f"server  {status['server'] or '-'}: {status['words']}")
    if status.get("certificate"):
        click.echo(f"cert    {status['certificate']}")
    if status["last_error"]:
        click.echo(f"before  {status['last_error']}")


command.add_command(join_command)
command.add_command(app_doctor.command)


def _alive(pid: int) -> bool:
    from llmgw.system.files import read_text

    return b"agent" in (read_text(Path(f"/proc/{pid}/cmdline")) or "").encode()


def _run(config: AgentSettings, stop_engines: bool) -> None:
    from llmgw.agent.app_engines import make_weights_dir
    from llmgw.system import unpacked
    from llmgw.system.clock import RealClock
    from llmgw.system.files import lock, make_dir

    unpacked.hold()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    work_dir = make_dir(Path(config.supervisor.work_dir), 0o700)
    make_weights_dir(config.weights_dir)
    for words in config.warnings:
        _LOG.warning("%s", words)
    with lock(work_dir / "agent.lock", "another llmgw agent"):
        Agent(config, RealClock(), stop).run(stop_engines)


class Agent:
    """One node's agent: everything made, wired, started, and ended in order.

    Args:
        stop: set by a signal; `run` then returns.
    """

    def __init__(self, config: AgentSettings, clock: Clock, stop: threading.Event) -> None:
        self._config = config
        self._clock = clock
        self._stop = stop
        self._work_dir = Path(config.supervisor.work_dir)
        self._session: Session | None = None
        self._models: frozenset[str] = frozenset()

    def run(self, stop_engines: bool) -> None:
        """Work until `stop` is set.

        Raises:
            LlmgwError: the node cannot be looked after, in words.
        """
        from llmgw.agent.app_engines import Clients, make_fetch, weights_answers
        from llmgw.agent.reporting import Reporting
        from llmgw.agent.weights import Weights
        from llmgw.providers import registry as providers
        from llmgw.sources.server import Releases
        from llmgw.system import plugins
        from llmgw.system.commands import RealRunner

        host = self._management_address()
        if host is None:
            return
        if words := plugins.add(self._config.plugins_dir):
            _LOG.error("%s", words)
        runner, registry = RealRunner(), providers.load()
        for problem in registry.problems:
            _LOG.error("%s", problem.words())
        with ExitStack() as stack:
            clients = Clients.open(self._config, stack)
            probe = self._probe(runner)
            converge, weights = None, Weights(self._model_dirs(), make_fetch(self._config, clients.world), self._clock)
            reporting = Reporting(
                probe, self._clock, self._standing(), lambda: self._woken(converge), weights.on_their_way
            )
            supervisor = self._supervisor(
                host, registry.providers, lambda n, v: converge and converge.engine(n, v),
                lambda n: _engine_words(converge, n), weights, clients.local, probe.gpu_memory,
            )  # fmt: skip
            releases = Releases()
            stack.callback(releases.close)
            converge = self._converge(registry, runner, clients, probe, supervisor, releases)
            releases.on_news = converge.try_again
            supervisor.start()
            stack.callback(self._leave, supervisor, stop_engines)
            converge.start()
            stack.callback(converge.stop)
            reporting.start(converge, supervisor)
            stack.callback(reporting.stop)
            answers = {
                "logs": lambda args: _logs(supervisor, args),
                "recheck": lambda _: converge.recheck_now(),
                "doctor": lambda _: self._doctor(),
                **weights_answers(self._config, weights, lambda: self._models),
            }
            self._session = self._make_session(reporting, converge.set_desired, supervisor, answers, releases)
            self._session.start()
            stack.callback(self._session.stop)
            _LOG.info("node %s: agent started, engines listen on %s", self._config.node_id, host)
            self._watch(self._session)
            _LOG.info("node %s: agent ends, engines %s", self._config.node_id, "end too" if stop_engines else "go on")

    def _management_address(self) -> str | None:
        """Where engines listen; waits until the node has a route. None when told to stop meanwhile."""
        from llmgw.probe.address import management_address

        config, said, server = self._config, "", self._config.servers[0]
        while not self._stop.is_set():
            try:
                found = management_address(config.mgmt_addr, config.mgmt_interface, server.host, server.port)
                return found.address if found is not None else "127.0.0.1"
            except LlmgwError as error:
                if error.words() != said:
                    said = error.words()
                    _LOG.error("waiting for the network: %s", said)
                self._clock.wait(self._stop, 2.0)
        return None

    def _model_dirs(self) -> tuple[str, ...]:
        return (*self._config.model_dirs, self._config.weights_dir)

    def _probe(self, runner: Any) -> Any:
        from llmgw.agent.app_doctor import make_probe

        return make_probe(self._config, runner, self._clock)

    def _supervisor(
        self, host: str, providers: Any, engine: Any, engine_words: Any, weights: Any, local: Any, gpu_free: Any
    ) -> Supervisor:
        from llmgw.agent.supervisor import Supervisor, SupervisorSettings

        config = self._config.supervisor
        settings = SupervisorSettings(
            work_dir=self._work_dir,
            mgmt_host=host,
            log_lines=config.log_lines,
            stop_timeout_s=config.stop_timeout_s,
            health_interval_s=config.health_interval_s,
            hang_timeout_s=config.hang_timeout_s,
            log_limit_bytes=config.log_size_bytes,
            environ=dict(os.environ),
        )
        return Supervisor(
            settings, providers, engine, engine_words, weights, local, self._clock, self._poke, gpu_free=gpu_free
        )

    def _converge(
        self, registry: Any, runner: Any, clients: Any, probe: Any, supervisor: Supervisor, releases: Releases
    ) -> Any:
        from llmgw.agent.app_engines import make_converge

        def changed() -> None:
            supervisor.poke()
            self._poke()

        def in_use() -> set[tuple[str, str]]:
            return _in_use(supervisor)

        return make_converge(
            self._config, registry, runner, clients, lambda: probe.facts, in_use, changed, releases, self._clock
        )

    def _make_session(
        self,
        reporting: Any,
        set_engines: Any,
        supervisor: Supervisor,
        answers: Mapping[str, Callable[[Any], Any]],
        releases: Releases,
    ) -> Session:
        import llmgw
        from llmgw.agent.session import Session
        from llmgw.domain.report import Desired
        from llmgw.probe.host import boot_id
        from llmgw.probe.tree import Tree
        from llmgw.system.files import read_text, write_atomic
        from llmgw.wire.tls import TlsFiles

        config, epoch_file = self._config, self._work_dir / _EPOCH
        highest = (read_text(epoch_file) or "").strip()

        def obey(desired: Desired) -> None:
            if desired.epoch != obeyed["epoch"]:
                obeyed["epoch"] = desired.epoch
                write_atomic(epoch_file, f"{desired.epoch}\n".encode())
            releases.take(desired.releases, desired.assets_at, session.status().server or "")
            set_engines(desired.engines)
            self._models = frozenset(spec.model for spec in desired.replicas)
            supervisor.set_desired(desired.replicas, desired.epoch)

        obeyed = {"epoch": int(highest) if highest.isdigit() else 0}
        tls = config.tls
        session = Session(
            servers=[str(server) for server in config.servers],
            node_id=config.node_id,
            tls=TlsFiles(tls.ca, tls.cert, tls.key, tls.crl) if tls is not None else None,
            version=llmgw.__version__,
            boot_id=boot_id(Tree("/")),
            instance_id=uuid.uuid4().hex,
            heartbeat_interval_s=config.heartbeat_interval_s,
            reconnect_base_s=config.reconnect_base_s,
            reconnect_max_s=config.reconnect_max_s,
            source=reporting,
            on_desired=obey,
            answers=answers,
            clock=self._clock,
            highest_epoch=obeyed["epoch"],
        )
        return session

    def _standing(self) -> tuple[Any, ...]:
        from llmgw.domain.facts import NodeWarning

        return tuple(NodeWarning("agent-config", words, self._clock.now()) for words in self._config.warnings)

    def _woken(self, converge: Any) -> None:
        if converge is not None:
            converge.wake()
        self._poke()

    def _poke(self) -> None:
        if self._session is not None:
            self._session.poke()

    def _watch(self, session: Session) -> None:
        """Until told to stop: keep the status file true, and log each change of it."""
        said = ""
        while not self._clock.wait(self._stop, _LOOK_S):
            said = self._tell(session.status(), said)

    def _tell(self, status: SessionStatus, said: str) -> str:
        from llmgw.system.files import write_atomic

        content = {
            "node_id": self._config.node_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "server": status.server,
            "connected": status.state.value.value,
            "words": status.state.words,
            "since": status.since,
            "last_error": status.last_error,
            "certificate": status.certificate,
        }
        text = json.dumps(content, indent=1)
        if text != said:
            try:
                write_atomic(self._work_dir / _STATUS, text.encode())
            except LlmgwError as error:
                _LOG.error("%s", error.words())
        return text

    def _doctor(self) -> dict[str, Any]:
        assert self._session is not None
        status = self._session.status()
        return {"session": attrs.asdict(status.state, value_serializer=lambda *a: str(a[2])), "server": status.server}

    def _leave(self, supervisor: Supervisor, stop_engines: bool) -> None:
        if stop_engines:
            for words in supervisor.stop_all():
                _LOG.error("an engine is still there: %s", words)
        supervisor.detach()


def _engine_words(converge: Any, name: str) -> str:
    statuses = converge.statuses() if converge is not None else ()
    found = [status.words for status in statuses if status.name == name]
    return found[0] if found else f"{name} is not among the engines this node was told to have"


def _in_use(supervisor: Supervisor) -> set[tuple[str, str]]:
    return {(s.engine, s.engine_version) for s in supervisor.statuses() if s.engine and s.engine_version}


def _logs(supervisor: Supervisor, args: Mapping[str, str]) -> dict[str, Any]:
    lines = int(args.get("lines", "100"))
    if args.get("previous") == "true":
        return {"lines": supervisor.logs(args["replica_id"], lines, previous=True)}
    return attrs.asdict(supervisor.follow(args["replica_id"], lines, args.get("cursor", "")))
