"""`llmgw server`: the only place where the control plane's parts are made and joined."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgw.server import service

if TYPE_CHECKING:
    from llmgw.domain.engines import EngineSpec, Origin, Release
    from llmgw.providers.base import Provider
    from llmgw.server.assets import Assets
    from llmgw.server.control import Control
    from llmgw.server.deploy import Deploy, HandOn
    from llmgw.server.join import Registrar
    from llmgw.server.releases import ReleaseBook
    from llmgw.server.settings import ServerSettings
    from llmgw.server.state import State
    from llmgw.server.workers import Workers
    from llmgw.system.clock import Clock
    from llmgw.system.commands import Daemon

log = logging.getLogger("llmgw.server")

DRAIN_S = 30.0
SURVIVORS_S = 2.5
# gateways try again at least every 2 s, on a busy machine later: who holds the address may still be one of them
LATE_SURVIVORS_S = 5.0
INTERVAL_S = 5.0


@click.group("server", invoke_without_command=True)
@click.option("-c", "--config", "file", type=click.Path(path_type=Path), help="server.yaml; without it, the defaults.")
@click.option("--check", "only_check", is_flag=True, help="Only validate the file.")
@click.pass_context
def command(context: click.Context, file: Path | None, only_check: bool) -> None:
    """Run the control plane and its gateways."""
    from llmgw.server import outside, settings

    if context.invoked_subcommand is not None:
        context.obj = file
        return
    if only_check:
        for line in (*settings.check(file), *outside.check(settings.load(file))):
            click.echo(line)
        return
    run(settings.load(file))


for _each in service.COMMANDS:
    command.add_command(_each)


def run(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        LockHeld: another server has this state.
        StateError, AddressInUse, TlsError: it cannot start; says why.
    """
    from llmgw.server.logs import log_to_stderr
    from llmgw.server.outside import raise_open_files, refuse_unusable
    from llmgw.system import unpacked

    log_to_stderr()
    unpacked.hold()
    for words in settings.warnings:
        log.warning("%s", words)
    refuse_unusable(settings)
    raise_open_files()
    signals = _Signals()
    with contextlib.ExitStack() as stack:
        deploy = _start(settings, stack)
        while signals.wait():
            _apply_files(settings, deploy)
        log.info("stopping: gateways finish their answers first")


class _Signals:
    """SIGTERM and SIGINT end, SIGHUP applies the profile files again. A second ending signal ends at once."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._end = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ending)
        signal.signal(signal.SIGHUP, self._again)

    def wait(self) -> bool:
        """True when the files are to be applied again, False when it is time to end."""
        self._wake.wait()
        self._wake.clear()
        return not self._end

    def _ending(self, number: int, _: object) -> None:
        if self._end:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._end = True
        self._wake.set()

    def _again(self, _: int, __: object) -> None:
        self._wake.set()


def _start(settings: ServerSettings, stack: contextlib.ExitStack) -> Deploy:
    """Make every part, in the order of who needs whom; `stack` ends them in reverse."""
    from llmgw.server.admin import Parts
    from llmgw.server.asset_routes import AssetDoors
    from llmgw.server.auth import Gate, Sessions, load_token
    from llmgw.server.control import Control
    from llmgw.server.deploy import Deploy
    from llmgw.server.events import Events
    from llmgw.server.fleet import Fleet
    from llmgw.server.join_routes import JoinDoor
    from llmgw.server.listener import Listener
    from llmgw.server.outside import doubts
    from llmgw.server.own_certificates import CertificateWatch, OwnCertificate, look
    from llmgw.server.state import open_state
    from llmgw.server.usage import Requests, Usage, UsageDoor
    from llmgw.server.web import Web, make_app
    from llmgw.server.weights_routes import WeightsDoors
    from llmgw.server.workers import Workers, numeric
    from llmgw.system.clock import RealClock
    from llmgw.wire.tls import TlsFiles

    clock = RealClock()
    http = settings.http
    state = open_state(settings.state)
    stack.callback(state.close)
    token = load_token(Path(http.admin_token_file))

    events = Events(clock, state.events())
    events.record("server", "", f"started: epoch {state.epoch}")
    fleet_changed, gateways_changed = threading.Event(), threading.Event()
    fleet = Fleet(
        clock,
        state.nodes(),
        lost_after=settings.scheduling.lost_after,
        on_change=fleet_changed.set,
        on_new=lambda node_id: state.add_node(node_id, clock.now()),
        draining=state.draining(),
        tell=lambda node_id, words: events.record("node", node_id, words),
    )
    usage, requests = Usage(state), Requests()
    control = Control(settings.state_dir / "control.sock", gateways_changed.set, usage, requests)
    providers = _providers(settings.plugins_dir)
    for words in doubts(settings, providers):
        log.warning("%s", words)
    book, assets = _hand_on(settings, state, providers, stack, fleet_changed.set)
    deploy = Deploy(
        state,
        fleet,
        clock,
        settings.engine_specs,
        {name: provider.capabilities for name, provider in providers.items()},
        mass_loss_fraction=settings.scheduling.mass_loss_fraction,
        keys_required=settings.keys_required,
        publish=control.publish,
        wake=fleet_changed,
        hand_on=_handing_on(settings, control, book),
        events=events,
        in_flight=control.in_flight,
    )
    gateway = _Gateway(settings)
    workers = Workers(
        control,
        clock,
        gateway,
        count=settings.gateway.workers,
        listen=numeric(http.listen.host, http.listen.port),
        on_serving=lambda address: log.info("serving http%s://%s", "s" if http.tls else "", address),
        wake=gateways_changed,
        settings=gateway.settings,
    )
    control.start()
    stack.callback(control.stop)
    _take_address(settings, workers)

    gate = Gate(
        token,
        Sessions(clock),
        hosts=(http.listen.host, socket.gethostname()) if http.listen.loopback else None,
        open_page=http.listen.loopback,
        secure=http.tls is not None,
        operators=http.tls is not None and http.tls.client_ca is not None,
    )

    def own() -> tuple[OwnCertificate, ...]:
        return look(settings, clock.now())

    watch = CertificateWatch(own, lambda words: events.record("server", "", words), clock)
    watch.start()
    stack.callback(watch.stop)
    parts = Parts(state, fleet, deploy, control, clock, clock.now(), own)
    registrar = _registrar(settings, state, clock)
    doors = [
        *AssetDoors(book, assets).routes(),
        *WeightsDoors(fleet).routes(),
        *JoinDoor(registrar, lambda: listener.port).routes(),
    ]
    doors += UsageDoor(usage, requests, control).routes()
    web = Web(settings.state_dir / "admin.sock", lambda stopping: make_app(parts, gate, stopping, doors))
    web.start()
    stack.callback(web.stop)

    _apply_files(settings, deploy)
    deploy.start()
    stack.callback(deploy.stop)
    tls = settings.agents.tls
    listener = Listener(
        settings.agents.listen.host,
        settings.agents.listen.port,
        sink=fleet,
        clock=clock,
        server_id=state.server_id,
        epoch=state.epoch,
        heartbeat_interval_s=INTERVAL_S,
        tls=TlsFiles(tls.ca, tls.cert, tls.key, tls.crl) if tls else None,
        registrar=registrar,
    )
    listener.start()
    stack.callback(listener.stop)
    workers.start()
    stack.callback(workers.stop, DRAIN_S)
    log.info("agents dial %s:%d; epoch %d", settings.agents.listen.host, listener.port, state.epoch)
    return deploy


def _registrar(settings: ServerSettings, state: State, clock: Clock) -> Registrar | None:
    """Who signs certificates for nodes; None without TLS.

    Raises:
        PkiError: `agents.tls.ca_key` cannot be used.
    """
    from llmgw.server.join import Registrar, check_registrar

    tls = settings.agents.tls
    if tls is None:
        return None
    registrar = Registrar(
        state,
        clock,
        bundle=Path(tls.ca),
        key=Path(tls.ca_key) if tls.ca_key else None,
        cert=Path(tls.cert),
        node_life_s=tls.node_life_s,
    )
    check_registrar(registrar)
    return registrar


def _take_address(settings: ServerSettings, workers: Workers) -> None:
    """Make sure that `http.listen` is free, or held by gateways of an earlier server.

    Raises:
        AddressInUse: somebody else has it.
    """
    from llmgw.errors import AddressInUse
    from llmgw.server.workers import check_free

    listen = settings.http.listen
    try:
        check_free(listen.host, listen.port)
    except AddressInUse:
        if not workers.adopt(SURVIVORS_S) and not workers.adopt(LATE_SURVIVORS_S):
            raise


def _providers(plugins_dir: str) -> Mapping[str, Provider]:
    """The providers by name; one that does not load is told in the log and left out."""
    from llmgw.providers import registry
    from llmgw.system import plugins

    if words := plugins.add(plugins_dir):
        log.warning("%s", words)
    loaded = registry.load()
    for problem in loaded.problems:
        log.warning("%s", problem.words())
    return loaded.providers


def _hand_on(
    settings: ServerSettings,
    state: State,
    providers: Mapping[str, Provider],
    stack: contextlib.ExitStack,
    changed: Callable[[], None],
) -> tuple[ReleaseBook, Assets]:
    """What asks for releases and keeps their archives, started; `stack` ends them."""
    from llmgw.errors import ProviderError
    from llmgw.server.assets import Assets
    from llmgw.server.releases import ReleaseBook
    from llmgw.sources import fetch_asset, make_source
    from llmgw.system.clock import RealClock
    from llmgw.system.http import Http

    http = stack.enter_context(Http())

    def origin(engine: str, version: str) -> Origin:
        if engine not in providers:
            raise ProviderError(f"this server has no provider `{engine}`")
        return providers[engine].origin(version)

    def fetch(asset: Any, dest_dir: Path, *, progress: Any, stop: threading.Event) -> Path:
        return fetch_asset(asset, dest_dir, http, progress=progress, stop=stop)

    clock = RealClock()
    book = ReleaseBook(state, origin, lambda text: make_source(text, http), clock, changed)
    directory = settings.state_dir / "assets"
    limit = settings.assets_limit_bytes
    assets = Assets(directory, fetch, clock, limit_bytes=limit, imported=book.imported_digests)
    book.releases(settings.engine_specs)  # asked for before the first node wants it
    book.start()
    stack.callback(book.stop)
    stack.callback(assets.stop)
    return book, assets


def _handing_on(settings: ServerSettings, control: Control, book: ReleaseBook) -> HandOn:
    """What a node is told of its engines' releases, and the address gateways serve their archives at."""
    listen = settings.http.listen
    scheme = "https" if settings.http.tls is not None else "http"

    def hand_on(specs: Sequence[EngineSpec]) -> tuple[tuple[Release, ...], str]:
        releases = book.releases(specs)
        if not releases:
            return (), ""
        port = listen.port or next((int(each.listen.rpartition(":")[2]) for each in control.gateways()), 0)
        host = "*" if listen.host in ("0.0.0.0", "::") else f"[{listen.host}]" if ":" in listen.host else listen.host  # noqa: S104
        return releases, f"{scheme}://{host}:{port}"

    return hand_on


def _apply_files(settings: ServerSettings, deploy: Deploy) -> None:
    """Apply every profile file of `profiles_dir`; a broken one is told in the log and the others are applied."""
    from llmgw.config import load_profiles
    from llmgw.errors import LlmgwError

    if settings.profiles_dir is None:
        return
    files = sorted(path for path in Path(settings.profiles_dir).glob("*") if path.suffix in (".yaml", ".yml"))
    if not files:
        log.warning("`profiles_dir` `%s` holds no profile file (`*.yaml`)", settings.profiles_dir)
    for path in files:
        try:
            for profile in load_profiles(path):
                deploy.apply(profile)
        except LlmgwError as error:
            log.error("`%s` is not applied: %s", path, error.words())


class _Gateway:
    """Starts gateway processes."""

    def __init__(self, settings: ServerSettings) -> None:
        limits = settings.gateway
        self._options = [
            *("--control", str(settings.state_dir / "control.sock")),
            *("--admin", str(settings.state_dir / "admin.sock")),
            *("--listen", str(settings.http.listen)),
            *("--queue", str(limits.queue)),
            *("--queue-timeout", f"{limits.queue_timeout_s:f}s"),
            *("--first-token-timeout", f"{limits.first_token_timeout_s:f}s"),
            *("--token-gap-timeout", f"{limits.token_gap_timeout_s:f}s"),
            *("--workers", str(limits.workers)),
            *("--access-log", limits.access_log),
            *("--access-log-sample", str(limits.access_log_sample)),
            *("--cors-origins", limits.cors_origin),
        ]
        if settings.http.tls is not None:
            self._options += ["--tls-cert", settings.http.tls.cert, "--tls-key", settings.http.tls.key]
            for option, path in (("ca", settings.http.tls.client_ca), ("crl", settings.http.tls.client_crl)):
                self._options += [f"--tls-client-{option}", path] if path else []
        self.settings = hashlib.sha256("\0".join(self._options).encode()).hexdigest()[:16]
        self._options += ["--settings", self.settings]

    def __call__(self, index: int) -> Daemon:
        from llmgw.system.commands import start_daemon
        from llmgw.system.selfexec import own_argv, own_env

        argv = [*own_argv(), "gateway", *self._options, "--index", str(index)]
        return start_daemon(argv, env=own_env(), log_path=None)
