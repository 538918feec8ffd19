"""Asking in the clear with nothing but a socket: what `llmgw ctl` looks at a server with, many times a minute.

The full client costs more time to import than such a question takes to be answered. This one knows the plain case only
and gives up on everything else, errors included: then the full client asks again, and has the words for it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


class Answer(NamedTuple):
    """A whole answer; names of header fields are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def get(
    url: str, headers: Mapping[str, str], *, timeout_s: float, connect_timeout_s: float, max_bytes: int
) -> Answer | None:
    """GET an `http://` address, over a connection of its own.

    Returns:
        The answer, or None when this is not the plain case or anything went wrong.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or any(os.environ.get(name) for name in _PROXIES):
        return None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"GET {target} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any(c in line for line in lines for c in "\r\n\0"):
        return None
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection((parts.hostname, parts.port or 80), connect_timeout_s) as talk:
            talk.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
            data = bytearray()
            while len(data) <= max_bytes:
                talk.settimeout(max(0.01, deadline - time.monotonic()))
                piece = talk.recv(65536)
                if not piece:
                    return _read(bytes(data))
                data += piece
    except (OSError, ValueError):
        pass
    return None


def _read(data: bytes) -> Answer | None:
    """An HTTP/1.1 answer that ended with its connection (RFC 9112, 6.3)."""
    head, mark, body = data.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not mark or not version.startswith("HTTP/1.") or not status[:3].isdecimal() or status[0] == "1":
        return None
    fields: dict[str, str] = {}
    for line in rest:
        name, _, value = line.partition(":")
        if name.lower() in fields:
            return None
        fields[name.lower()] = value.strip()
    whole: bytes | None = body
    if "transfer-encoding" in fields:
        whole = _chunks(body) if fields["transfer-encoding"].lower() == "chunked" else None
    elif "content-length" in fields:
        whole = body if fields["content-length"] == str(len(body)) else None
    return None if whole is None else Answer(int(status[:3]), fields, whole)


def _chunks(data: bytes) -> bytes | None:
    made = bytearray()
    while True:
        size, mark, data = data.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        if not mark or length < 0:
            return None
        if length == 0:
            return bytes(made)
        if data[length : length + 2] != b"\r\n":
            return None
        made += data[:length]
        data = data[length + 2 :]
