"""server.yaml: everything has a default, so that `llmgw server` without a file serves one machine on loopback.

docs/configuration.md lists every key.
"""

# ruff: noqa: RUF009  (`checked` makes an attrs field, and HostPort is frozen)
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from attrs import evolve, field, frozen

from llmgw.config import (
    AbsolutePath,
    Bytes,
    HostPort,
    Problem,
    Seconds,
    SourceName,
    at_least,
    bad,
    check_engine_name,
    check_labels,
    checked,
    derived,
    describe,
    lasting,
    load_text,
    parse_host_port,
    read_file,
)
from llmgw.domain.engines import EngineSpec

LLAMA_CPP_VERSION = "b10991"
"""The version every node has when server.yaml names none."""

DEFAULT_STATE = "/var/lib/llmgw/state.db"

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,63}")
_BUILD = re.compile(r"[a-z0-9][a-z0-9.+_-]{0,31}")
_HEX = re.compile(r"[0-9a-f]{64}")

Builds = Annotated[tuple[str, ...], "one-or-many"]


def _check_version(text: str | None) -> None:
    if text is not None and not _VERSION.fullmatch(text):
        raise ValueError(f"`{text[:80]}` is not a version, such as `{LLAMA_CPP_VERSION}` or `0.11.2`")


def _check_builds(builds: tuple[str, ...]) -> None:
    for build in builds:
        if not _BUILD.fullmatch(build):
            raise ValueError(f"`{build[:80]}` is not a build, such as `cpu`, `cuda` or `vulkan`")


def _check_sources(sources: tuple[str, ...] | None) -> None:
    if sources is not None and not sources:
        raise ValueError("names no source, choose `server`, `github`, `pypi`, `https://MIRROR/BASE/` or `file:///DIR`")


def _check_pins(pins: Mapping[str, str]) -> None:
    for asset, digest in pins.items():
        if not _HEX.fullmatch(digest):
            raise ValueError(f"the digest of `{asset[:100]}` must be 64 lower-case hex digits")


def _check_state(text: str) -> None:
    if text.startswith(("postgresql://", "postgres://")):
        return
    if not text.startswith("/") or text.endswith("/") or "\0" in text:
        raise ValueError("expected the absolute path of a SQLite file, or `postgresql://…`")


def _hide_password(text: str) -> str:
    return repr(re.sub(r"(://[^\s/@:]*:)[^\s/]+@", r"\1***@", text))


@frozen(kw_only=True)
class AgentTls:
    """The server's half of mutual TLS with agents. Every file is read again when it changes.

    `ca` may hold several CAs (a rotation), `crl` several lists. With `ca_key` the server signs the certificates of
    nodes that join or renew, each valid for `node_life_s`.
    """

    ca: AbsolutePath
    cert: AbsolutePath
    key: AbsolutePath
    crl: AbsolutePath | None = None
    ca_key: AbsolutePath | None = None
    node_life_s: Seconds = checked(lasting("10s", "3650d"), default=90 * 86400.0)


@frozen(kw_only=True)
class AgentsSettings:
    """The socket agents dial. Without `tls` only loopback may be listened on, unless `insecure`."""

    listen: HostPort = HostPort("127.0.0.1", 7443)
    tls: AgentTls | None = None
    insecure: bool = False


@frozen(kw_only=True)
class HttpTls:
    """The certificate clients and browsers see. With `client_ca`, operators may show a certificate of their own."""

    cert: AbsolutePath
    key: AbsolutePath
    client_ca: AbsolutePath | None = None
    client_crl: AbsolutePath | None = None


@frozen(kw_only=True)
class HttpSettings:
    """The address of the OpenAI-compatible API, the admin API and the page.

    `admin_token_file` is never "" once loaded: beside the state when the file names none.
    """

    listen: HostPort = HostPort("127.0.0.1", 8080)
    tls: HttpTls | None = None
    admin_token_file: AbsolutePath = ""


@frozen(kw_only=True)
class EngineEntry:
    """One engine under `engines`; the short form is the version alone."""

    version: str | None = checked(_check_version, default=None)
    node_selector: Mapping[str, str] = checked(check_labels, factory=dict)
    sha256: Mapping[str, str] = checked(_check_pins, factory=dict)
    builds: Builds = checked(_check_builds, default=())
    sources: tuple[SourceName, ...] | None = checked(_check_sources, default=None)

    @classmethod
    def from_short(cls, value: Any) -> EngineEntry:
        """`llama.cpp: b10991`.

        Raises:
            Bad: the value is no version.
        """
        if not isinstance(value, str):
            raise bad(f"expected a version or a map, got {describe(value)}", quotable=True)
        try:
            _check_version(value)
        except ValueError as error:
            raise bad(str(error)) from error
        return cls(version=value)


def _check_origin(origin: str) -> None:
    if origin and origin != "*" and not re.fullmatch(r"https?://[A-Za-z0-9.\[\]:-]{1,253}", origin):
        raise ValueError("is not an origin, such as `https://chat.example.org`, nor `*`")


@frozen(kw_only=True)
class GatewaySettings:
    """The data plane. `keys_required` None: yes, unless `http.listen` is loopback; see ServerSettings.keys_required."""

    workers: int = checked(at_least(1, 256), default=1)
    queue: int = checked(at_least(0, 100_000), default=64)
    queue_timeout_s: Seconds = checked(lasting("0s", "1h"), default=30.0)
    first_token_timeout_s: Seconds = checked(lasting("1s", "1d"), default=600.0)
    token_gap_timeout_s: Seconds = checked(lasting("1s", "1d"), default=60.0)
    keys_required: bool | None = None
    access_log: AbsolutePath = ""
    access_log_sample: float = checked(at_least(0, 1), default=1.0)
    cors_origin: str = checked(_check_origin, default="")


@frozen(kw_only=True)
class SchedulingSettings:
    """When a node counts as lost, and when so many go that the fault must be ours."""

    lost_after: int = checked(at_least(2, 1000), default=3)
    mass_loss_fraction: float = checked(at_least(0.01, 1), default=0.55)


@frozen(kw_only=True)
class ServerSettings:
    """Everything server.yaml says. Names are those of the file; durations end in `_s` and are seconds.

    Args:
        engines: provider -> entry; `engine_specs` is what goes to the nodes.
        warnings: sentences about what works but deserves a look; not a key of the file.
    """

    agents: AgentsSettings = field(factory=AgentsSettings)
    http: HttpSettings = field(factory=HttpSettings)
    state: str = field(default=DEFAULT_STATE, metadata={"check": _check_state}, repr=_hide_password)
    engines: Mapping[str, EngineEntry] = field(factory=lambda: {"llama.cpp": EngineEntry(version=LLAMA_CPP_VERSION)})
    sources: tuple[SourceName, ...] = checked(_check_sources, default=("github",))
    assets_limit_bytes: Bytes = checked(at_least(1 << 20), default=20_000_000_000)
    profiles_dir: AbsolutePath | None = None
    plugins_dir: AbsolutePath = "/usr/local/lib/llmgw/plugins"
    gateway: GatewaySettings = field(factory=GatewaySettings)
    scheduling: SchedulingSettings = field(factory=SchedulingSettings)
    warnings: tuple[str, ...] = derived(default=())

    @property
    def postgresql(self) -> bool:
        """The state is a PostgreSQL database, not a file."""
        return not self.state.startswith("/")

    @property
    def state_dir(self) -> Path:
        """Where the sockets and the admin token live: the directory of the state file."""
        return Path(DEFAULT_STATE if self.postgresql else self.state).parent

    @property
    def keys_required(self) -> bool:
        """Clients need an API key: as written, or yes unless only this machine can connect."""
        written = self.gateway.keys_required
        return not self.http.listen.loopback if written is None else written

    @property
    def engine_specs(self) -> tuple[EngineSpec, ...]:
        """The engines nodes are told to have."""
        return tuple(
            EngineSpec(
                name=name,
                version=entry.version or LLAMA_CPP_VERSION,
                node_selector=entry.node_selector,
                sha256=entry.sha256,
                builds=entry.builds,
                sources=self.sources if entry.sources is None else entry.sources,
            )
            for name, entry in self.engines.items()
        )


def load(path: Path | str | None = None) -> ServerSettings:
    """Read server.yaml; None gives the defaults.

    Raises:
        ConfigError: with all problems of the file.
    """
    return loads("", "defaults") if path is None else loads(read_file(Path(path)), str(path))


def loads(text: str, source: str) -> ServerSettings:
    """Like `load`, from text; `source` is what messages call it.

    Raises:
        ConfigError: with all problems.
    """
    read = load_text(text, source, ServerSettings, _cross)
    if not read.http.admin_token_file:
        read = evolve(read, http=evolve(read.http, admin_token_file=str(read.state_dir / "admin.token")))
    return evolve(read, warnings=tuple(_warnings(read)))


def check(path: Path | str | None = None) -> tuple[str, ...]:
    """What `llmgw server --check -c FILE` prints: that the file is valid, and its warnings.

    Raises:
        ConfigError: with all problems.
    """
    read = load(path)
    said = "the defaults are valid" if path is None else f"`{path}` is valid"
    return (said, *(f"warning: {words}" for words in read.warnings))


def _warnings(settings: ServerSettings) -> Iterable[str]:
    if settings.agents.tls is None and not settings.agents.listen.loopback:
        yield (
            f"agents.listen `{settings.agents.listen}` takes agents without TLS: anybody who can reach it can pose "
            "as a node"
        )
    if settings.http.tls is None and not settings.http.listen.loopback:
        yield f"http.listen `{settings.http.listen}` has no TLS: keys and prompts cross the network in the clear"
    if not settings.keys_required and not settings.http.listen.loopback:
        yield f"gateway.keys_required is off while `{settings.http.listen}` can be reached by others"


def _cross(data: Mapping[str, Any]) -> Iterable[Problem]:
    agents = data.get("agents")
    if isinstance(agents, dict) and isinstance(agents.get("listen"), str) and agents.get("tls") is None:
        try:
            listen = parse_host_port(agents["listen"])
        except ValueError:
            return
        if not listen.loopback and agents.get("insecure") is not True:
            yield Problem(
                ("agents", "listen"),
                f"`{listen}` can be reached by others and `agents.tls` is not set: set `agents.tls`, listen on "
                "`127.0.0.1:7443`, or write `insecure: true` on a trusted network",
            )
    yield from _cross_engines(data.get("engines"))
    state = data.get("state")
    if isinstance(state, str) and "://" in state:
        try:
            urlsplit(state)
        except ValueError:
            yield Problem(("state",), "is not a URL")


def _cross_engines(engines: Any) -> Iterable[Problem]:
    for name, entry in engines.items() if isinstance(engines, dict) else ():
        try:
            check_engine_name(name)
        except ValueError as error:
            yield Problem(("engines", name), str(error))
        if isinstance(entry, dict) and entry.get("version") is None and name != "llama.cpp":
            yield Problem(("engines", name, "version"), "is required")
