"""Which server to dial: its URL taken apart, its name resolved."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

from attrs import frozen

from llmgw.errors import LinkError, UsageError

DEFAULT_PORT = 7443


@frozen
class Server:
    """One server of the list; `host` is also the name its certificate must be for."""

    url: str
    host: str
    port: int
    tls: bool

    def resolve(self) -> list[tuple[int, Any]]:
        """Its addresses as (family, socket address), in the system's order of preference.

        Raises:
            LinkError: the name cannot be resolved.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise LinkError(
                f"cannot resolve `{self.host}`", cause=cause, hint="check `server` in agent.yaml and the node's DNS"
            ) from error
        return [(int(family), address) for family, _, _, _, address in found]


def parse_server(url: str) -> Server:
    """Take `http://host:port` or `https://host:port` apart; the port is 7443 when none is given.

    Raises:
        UsageError: it is neither.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"`{url}` is not a server URL", cause=str(error)) from error
    if (
        parts.scheme not in ("http", "https")
        or not host
        or parts.path not in ("", "/")
        or parts.query
        or parts.username
    ):
        raise UsageError(f"`{url}` is not a server URL", hint="write `https://host:port` or `http://host:port`")
    return Server(url, host, DEFAULT_PORT if port is None else port, parts.scheme == "https")
