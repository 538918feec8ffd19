"""Header lines that are the same for every request to a replica."""

from __future__ import annotations

import re

from llmgw.domain.routing import RouteReplica

_UNSAFE = re.compile(r"[^\x21-\x7e]")
_REMEMBERED = 4096


def safe(text: str) -> bytes:
    """A node's own string as a header value: printable ASCII, at most 128 characters."""
    return _UNSAFE.sub("?", text[:128]).encode("ascii")


class ReplicaLines:
    """The header lines that are the same for every request to a replica, made once per snapshot."""

    def __init__(self) -> None:
        self._asked: dict[tuple[bytes, str], bytes] = {}
        self._answered: dict[tuple[bytes, str, bytes, int], bytes] = {}

    def clear(self) -> None:
        """A new snapshot: addresses and keys may differ."""
        self._asked.clear()
        self._answered.clear()

    def asked(self, lines: bytes, replica: RouteReplica) -> bytes:
        """The head of a request to the engine: `lines`, Host and Authorization."""
        name = (lines, replica.replica_id)
        found = self._asked.get(name)
        if found is None:
            if len(self._asked) >= _REMEMBERED:
                self._asked.clear()
            found = self._asked[name] = lines + self._make_asked(replica)
        return found

    def answered(self, passed: bytes, replica: RouteReplica, why: bytes, retries: int) -> bytes:
        """What the client is told about who answered, after the lines `passed`."""
        name = (passed, replica.replica_id, why, retries)
        found = self._answered.get(name)
        if found is None:
            if len(self._answered) >= _REMEMBERED:
                self._answered.clear()
            found = self._answered[name] = b"%b%bx-llmgw-retries: %d\r\nx-llmgw-why: %b\r\n" % (
                passed,
                self._make_answered(replica),
                retries,
                why,
            )
        return found

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
