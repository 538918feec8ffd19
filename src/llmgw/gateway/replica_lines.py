"""Header lines that are the same for every request to a replica."""

from __future__ import annotations

import re
from collections.abc import Callable

from llmgw.domain.routing import RouteReplica

_UNSAFE = re.compile(r"[^\x21-\x7e]")


def safe(text: str) -> bytes:
    """A node's own string as a header value: printable ASCII, at most 128 characters."""
    return _UNSAFE.sub("?", text[:128]).encode("ascii")


class ReplicaLines:
    """The header lines that are the same for every request to a replica, made once per snapshot."""

    def __init__(self) -> None:
        self._asked: dict[str, bytes] = {}
        self._answered: dict[str, bytes] = {}

    def clear(self) -> None:
        """A new snapshot: addresses and keys may differ."""
        self._asked.clear()
        self._answered.clear()

    def asked(self, replica: RouteReplica) -> bytes:
        """Host and Authorization of the request to the engine."""
        return self._cached(self._asked, replica, self._make_asked)

    def answered(self, replica: RouteReplica) -> bytes:
        """What the client is told about who answered."""
        return self._cached(self._answered, replica, self._make_answered)

    @staticmethod
    def _cached(cache: dict[str, bytes], replica: RouteReplica, make: Callable[[RouteReplica], bytes]) -> bytes:
        lines = cache.get(replica.replica_id)
        if lines is None:
            lines = cache[replica.replica_id] = make(replica)
        return lines

    @staticmethod
    def _make_asked(replica: RouteReplica) -> bytes:
        host = f"[{replica.host}]" if ":" in replica.host else replica.host
        lines = b"Host: %b:%d\r\n" % (safe(host), replica.port)
        if replica.key and not _UNSAFE.search(replica.key):
            lines += b"Authorization: Bearer %b\r\n" % replica.key.encode("ascii")
        return lines

    @staticmethod
    def _make_answered(replica: RouteReplica) -> bytes:
        return b"x-llmgw-replica: %b\r\nx-llmgw-node: %b\r\n" % (safe(replica.replica_id), safe(replica.node_id))
