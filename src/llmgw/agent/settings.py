"""agent.yaml: one per node. docs/configuration.md lists every key."""

# ruff: noqa: RUF009  (`checked` makes an attrs field, and HostPort is frozen)
from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from attrs import evolve, field, frozen

from llmgw.config import (
    AbsolutePath,
    Bytes,
    Problem,
    Seconds,
    ServerUrl,
    at_least,
    check_engine_name,
    check_labels,
    checked,
    choices,
    derived,
    lasting,
    load_text,
    read_file,
    unknown_key,
)
from llmgw.domain.engines import NamedEngine
from llmgw.domain.ids import check_node_id
from llmgw.errors import ConfigError, NameInvalid, UnitError
from llmgw.units import parse_duration

WEIGHTS_DIR = "/var/lib/llmgw-weights"

ENGINE_KEYS: Mapping[str, tuple[str, ...]] = {
    "llama.cpp": ("bin",),
    "vllm": ("bin", "launch_mode", "ray_bin"),
    "sglang": ("python",),
}
"""Keys under `engines.<provider>` for the providers that ship with llmgw; the first names the binary."""

Servers = Annotated[tuple[ServerUrl, ...], "one-or-many"]

_PATH_KEYS = ("bin", "ray_bin", "python")
_LAUNCH_MODES = ("ray", "mp")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_INTERFACE = re.compile(r"[^\s/:]{1,15}")


def _check_mgmt_addr(text: str | None) -> None:
    if text is not None:
        try:
            ipaddress.ip_address(text)
        except ValueError as error:
            raise ValueError(f"`{text[:80]}` is not an IP address") from error


def _check_interface(text: str | None) -> None:
    if text is not None and not _INTERFACE.fullmatch(text):
        raise ValueError(f"`{text[:80]}` is not the name of a network interface")


def _check_name(text: str) -> None:
    if not _NAME.fullmatch(text):
        raise ValueError(f"`{text[:80]}` is not a name, use letters, digits, `.`, `_` and `-`")


def _check_hcas(hcas: tuple[str, ...]) -> None:
    if not hcas:
        raise ValueError("names no HCA, such as `mlx5_0`")
    for hca in hcas:
        _check_name(hca)
    if len(set(hcas)) != len(hcas):
        raise ValueError("names an HCA twice")


def _check_servers(servers: tuple[ServerUrl, ...]) -> None:
    if not servers:
        raise ValueError("names no server, expected `http://HOST:7443` or `https://HOST:7443`")
    if len(set(servers)) != len(servers):
        raise ValueError("names a server twice")


def _check_smi(path: str) -> None:
    if path and not path.startswith("/"):
        raise ValueError(f'expected an absolute path, or `""` to look in the usual places, got `{path[:200]}`')


@frozen(kw_only=True)
class TlsFiles:
    """The agent's half of mutual TLS; the certificate's common name must be the node id."""

    ca: AbsolutePath
    cert: AbsolutePath
    key: AbsolutePath
    crl: AbsolutePath | None = None


@frozen(kw_only=True)
class Fabric:
    """One InfiniBand fabric and the HCAs of this node that are on it."""

    name: str = checked(_check_name)
    hcas: tuple[str, ...] = checked(_check_hcas)
    rate_gbps: float | None = checked(at_least(1), default=None)


@frozen(kw_only=True)
class Discovery:
    """How devices are found; `nvidia_smi` "" looks in the usual places."""

    nvidia_smi: str = checked(_check_smi, default="")
    ib_root: AbsolutePath = "/sys/class/infiniband"
    prefer_nvml: bool = True


@frozen(kw_only=True)
class Supervisor:
    """How engine processes are kept."""

    work_dir: AbsolutePath = "/var/lib/llmgw-agent"
    log_lines: int = checked(at_least(1, 100_000), default=512)
    stop_timeout_s: Seconds = checked(lasting("100ms", "1d"), default=60.0)
    health_interval_s: Seconds = checked(lasting("50ms", "1h"), default=2.0)
    hang_timeout_s: Seconds = checked(lasting("1s", "30d"), default=600.0)
    log_size_bytes: Bytes = checked(at_least(64 << 10), default=64 << 20)


@frozen(kw_only=True)
class AgentSettings:
    """Everything agent.yaml says. Names are those of the file; durations end in `_s` and are seconds.

    Args:
        servers: key `server`, one URL or a list: servers to fail over between.
        node_id: the host name when the file names none.
        engines: provider -> its keys as written; see `named`.
        warnings: sentences about what works but deserves a look; not a key of the file.
    """

    servers: Servers = field(metadata={"key": "server", "check": _check_servers})
    tls: TlsFiles | None = None
    node_id: str = checked(check_node_id, default="")
    mgmt_addr: str | None = checked(_check_mgmt_addr, default=None)
    mgmt_interface: str | None = checked(_check_interface, default=None)
    labels: Mapping[str, str] = checked(check_labels, factory=dict)
    heartbeat_interval_s: Seconds = checked(lasting("50ms", "10m"), default=5.0)
    reconnect_base_s: Seconds = checked(lasting("10ms", "10m"), default=1.0)
    reconnect_max_s: Seconds = checked(lasting("10ms", "1h"), default=30.0)
    fabrics: tuple[Fabric, ...] = ()
    discovery: Discovery = field(factory=Discovery)
    model_dirs: tuple[AbsolutePath, ...] = ()
    weights_dir: AbsolutePath = WEIGHTS_DIR
    weights_connections: int = checked(at_least(1, 32), default=4)
    weights_rate_bytes: Bytes | None = checked(at_least(1 << 10), default=None)
    weights_floor_bytes: Bytes = checked(at_least(0), default=1_000_000_000)
    engines_dir: AbsolutePath = "/opt/llmgw/engines"
    plugins_dir: AbsolutePath = "/usr/local/lib/llmgw/plugins"
    recheck_interval_s: Seconds = checked(lasting("1s", "1d"), default=600.0)
    engines: Mapping[str, Mapping[str, str]] = field(factory=dict)
    supervisor: Supervisor = field(factory=Supervisor)
    warnings: tuple[str, ...] = derived(default=())

    @property
    def named(self) -> tuple[NamedEngine, ...]:
        """The engines this node brings itself: llmgw uses them as they are and installs nothing for them."""
        return tuple(NamedEngine(name, dict(keys)) for name, keys in self.engines.items())


def load(path: Path | str) -> AgentSettings:
    """Read agent.yaml.

    Raises:
        ConfigError: with all problems of the file.
    """
    return loads(read_file(Path(path)), str(path))


def loads(text: str, source: str) -> AgentSettings:
    """Like `load`, from text; `source` is what messages call it.

    Raises:
        ConfigError: with all problems.
    """
    read = load_text(text, source, AgentSettings, _cross)
    if not read.node_id:
        read = evolve(read, node_id=_host_name(source))
    return evolve(read, warnings=tuple(_warnings(read)))


def check(path: Path | str) -> tuple[str, ...]:
    """What `llmgw agent --check -c FILE` prints: that the file is valid, and its warnings.

    Raises:
        ConfigError: with all problems.
    """
    return (f"`{path}` is valid", *(f"warning: {words}" for words in load(path).warnings))


def _host_name(source: str) -> str:
    name = socket.gethostname()
    try:
        return check_node_id(name)
    except NameInvalid as error:
        problem = f"{source}: node_id: is not given, and the host name cannot stand in: {error.message}"
        raise ConfigError(f"`{source}` has a problem", [problem], hint="write `node_id: NAME`") from error


def _warnings(settings: AgentSettings) -> Iterable[str]:
    for server in settings.servers:
        if not server.secure and not server.loopback:
            yield (
                f"server `{server}` is dialed without TLS: anybody on the network can read and command this node, "
                "use `https://` with `tls` outside a trusted network"
            )
    for name in settings.engines:
        if name not in ENGINE_KEYS:
            yield f"engines.{name}: no provider that ships with llmgw ({choices(ENGINE_KEYS)}), a plugin must bring it"


def _cross(data: Mapping[str, Any]) -> Iterable[Problem]:
    yield from _cross_tls(data)
    if isinstance(data.get("engines"), dict):
        for name, keys in data["engines"].items():
            yield from _cross_engine(str(name), keys)
    fabrics = data.get("fabrics")
    names = [f.get("name") for f in fabrics if isinstance(f, dict)] if isinstance(fabrics, list) else []
    for index, name in enumerate(names):
        if name is not None and name in names[:index]:
            yield Problem(("fabrics", index, "name"), f"`{name}` is the name of another fabric of this node")
    base, longest = (_seconds(data.get(key)) for key in ("reconnect_base", "reconnect_max"))
    if (base or 1.0) > (longest or 30.0):
        at = "reconnect_max" if longest is not None else "reconnect_base"
        yield Problem((at,), "`reconnect_base` must not be longer than `reconnect_max`")


def _seconds(value: Any) -> float | None:
    try:
        return parse_duration(value) if isinstance(value, str) else None
    except UnitError:
        return None


def _cross_tls(data: Mapping[str, Any]) -> Iterable[Problem]:
    written = data.get("server")
    many = isinstance(written, list)
    for index, text in enumerate(written if isinstance(written, list) else [written]):
        at: tuple[str | int, ...] = ("server", index) if many else ("server",)
        if not isinstance(text, str):
            continue
        if text.startswith("http://") and data.get("tls") is not None:
            yield Problem(
                at, "is `http://` although `tls` is set: write `https://`, or remove `tls` to dial in the clear"
            )
        if text.startswith("https://") and data.get("tls") is None:
            yield Problem(at, "is `https://`, which needs `tls` with `ca`, `cert` and `key`")


def _cross_engine(name: str, keys: Any) -> Iterable[Problem]:
    at = ("engines", name)
    try:
        check_engine_name(name)
    except ValueError as error:
        yield Problem(at, str(error))
    if not isinstance(keys, dict):
        return
    valid = ENGINE_KEYS.get(name)
    for key, value in keys.items():
        here = (*at, key)
        if valid is not None and key not in valid:
            yield Problem(here, unknown_key(key, valid))
        elif valid is not None and key in _PATH_KEYS and isinstance(value, str) and not value.startswith("/"):
            yield Problem(here, f"expected an absolute path, got `{value[:200]}`: nothing is looked up on PATH")
        elif key == "launch_mode" and valid is not None and value not in _LAUNCH_MODES:
            yield Problem(here, f"`{value}` is not one of {choices(_LAUNCH_MODES)}")
    if valid is not None and valid[0] not in keys:
        yield Problem((*at, valid[0]), "is required: it names the engine to use")
