"""The log of connections that were not taken in: all of them told, a flood of them counted."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from llmgw.errors import LinkError, LlmgwError
from llmgw.system.clock import Clock
from llmgw.units import format_duration
from llmgw.wire.conn import Conn

log = logging.getLogger("llmgw.server.listener")

_WINDOW_S = 10.0
_TOLD = 20
_ADDRESSES = 1000


class Refusals:
    """At most some lines per address and window, then their number. Safe to use from several threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock.monotonic()
        self._seen: Counter[str] = Counter()

    def tell(self, conn: Conn, error: LlmgwError) -> None:
        """Log one."""
        for address, count in self._count(conn.ip):
            words = f"{count} more connections from {address} were not taken in within {format_duration(_WINDOW_S)}"
            log.warning("%s, not told one by one", words)
        with self._lock:
            quiet = self._seen[conn.ip] > _TOLD
        if not quiet:
            # Port scans and health checks come and go without a word.
            level = logging.INFO if type(error) is LinkError else logging.WARNING
            log.log(level, "connection from %s not taken in: %s", conn.address, error)

    def _count(self, address: str) -> list[tuple[str, int]]:
        """Count one; when a window is over, what it left untold."""
        now = self._clock.monotonic()
        untold: list[tuple[str, int]] = []
        with self._lock:
            if now - self._since >= _WINDOW_S or len(self._seen) > _ADDRESSES:
                untold = [(each, count - _TOLD) for each, count in self._seen.items() if count > _TOLD]
                self._seen.clear()
                self._since = now
            self._seen[address] += 1
        return untold
