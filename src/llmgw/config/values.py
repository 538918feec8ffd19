"""Values of the two configuration files that are more than text: addresses, durations, sizes, sources."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from attrs import frozen

Seconds = Annotated[float, "duration"]
"""A duration in seconds, written `5s`, `1m30s`, `2h`. The field's name ends in `_s`, its key does not."""
Bytes = Annotated[int, "size"]
"""A size in bytes, written `16MB`, `2GiB`. The field's name ends in `_bytes`, its key does not."""
AbsolutePath = Annotated[str, "path"]
"""An absolute path: nothing depends on the directory llmgw was started in."""

SourceName = Annotated[str, "source"]
"""Where engines are fetched from, see `check_source`."""

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?")


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by its address alone; a name other than `localhost` is not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@frozen
class HostPort:
    """An address to listen on or to dial."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@frozen
class ServerUrl:
    """A control plane: `http://HOST:7443` (plain) or `https://HOST:7443` (mutual TLS)."""

    secure: bool
    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{HostPort(self.host, self.port)}"


def parse_host_port(text: str) -> HostPort:
    """Read `127.0.0.1:7443`, `[::1]:7443`, `0.0.0.0:0`.

    Raises:
        ValueError: it is not HOST:PORT; with words.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"`{text}` is not `HOST:PORT`") from error
    if not host or port is None or parts.path or parts.query or parts.fragment or "@" in text or not _is_host(host):
        raise ValueError(f"`{text}` is not `HOST:PORT`, such as `127.0.0.1:7443` or `[::]:7443`")
    return HostPort(host, port)


def parse_server_url(text: str) -> ServerUrl:
    """Read `http://HOST:PORT` or `https://HOST:PORT`; the port is 7443 when it is left out.

    Raises:
        ValueError: it is not; with words.
    """
    scheme, mark, rest = text.partition("://")
    if not mark or scheme not in ("http", "https"):
        raise ValueError("expected `http://HOST:7443` or `https://HOST:7443`")
    rest = rest.removesuffix("/")
    # a bare IPv6 address has colons of its own, so only what follows the bracket counts as a port
    if ":" not in rest.rpartition("]")[2]:
        rest += ":7443"
    address = parse_host_port(rest)
    if address.port == 0:
        raise ValueError("port 0 cannot be dialed")
    return ServerUrl(scheme == "https", address.host, address.port)


def check_source(text: str) -> str:
    """Return `text` when engines can be fetched from it: `server`, `github`, `pypi`, `https://…/`, `file:///…`.

    Plain `http://` is taken on loopback only: elsewhere anybody on the way could change what is fetched.

    Raises:
        ValueError: it is not; with words.
    """
    choices = "choose `server`, `github`, `pypi`, `https://MIRROR/BASE/` or `file:///DIR`"
    if text in ("server", "github", "pypi"):
        return text
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError as error:
        raise ValueError(f"`{text}` is not a source, {choices}") from error
    if parts.username is not None:
        raise ValueError("a source must not hold a user name or password")
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return text
    if host and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))):
        return text
    raise ValueError(f"`{text}` is not a source, {choices}")


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _HOST.fullmatch(host) is not None
    return True
