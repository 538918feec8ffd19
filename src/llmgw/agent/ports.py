"""Ports for engines: outside the range the kernel hands out by itself, seen to be free, and not reused at once."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

from llmgw.errors import ReplicaError
from llmgw.system.clock import Clock

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 15000, 65535
_FEWEST = 1000
_REST_S = 60.0
_TRIES = 200


def candidates(ephemeral: tuple[int, int]) -> range:
    """The ports to choose from: below the kernel's own range where there is room, else above it.

    Args:
        ephemeral: first and last port the kernel gives to outgoing connections.
    """
    low, high = ephemeral
    if low - _LOWEST >= _FEWEST:
        return range(_LOWEST, low)
    if _HIGHEST - high >= _FEWEST:
        return range(high + 1, _HIGHEST + 1)
    # the kernel may use nearly everything: take the part few services claim, the bind test decides
    return range(1024, max(low, _LOWEST))


def ephemeral_range() -> tuple[int, int]:
    """The kernel's range for outgoing connections (ip(7), ip_local_port_range)."""
    try:
        low, high = _RANGE_FILE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


class Ports:
    """Hands out ports. A port that was given back rests a minute: clients may still send to the engine that had it."""

    def __init__(self, clock: Clock, chooser: random.Random | None = None) -> None:
        self._clock = clock
        self._random = chooser or random.Random()
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._resting: dict[int, float] = {}

    def take(self, host: str) -> int:
        """A port nobody listens on.

        Raises:
            ReplicaError: no free port was found on `host`, or `host` is not an address of this machine.
        """
        choices = candidates(ephemeral_range())
        now = self._clock.monotonic()
        with self._lock:
            self._resting = {port: until for port, until in self._resting.items() if until > now}
            problem = ""
            for _ in range(_TRIES):
                port = self._random.choice(choices)
                if port in self._taken or port in self._resting:
                    continue
                problem = _bind_problem(host, port)
                if not problem:
                    self._taken.add(port)
                    return port
        raise ReplicaError(
            f"found no free port on `{host}` for the engine",
            cause=f"{problem or 'all are in use'} ({choices.start} to {choices.stop - 1} tried)",
            hint="check that the management address is an address of this machine",
        )

    def adopt(self, port: int) -> None:
        """Note that a running engine has this port."""
        with self._lock:
            self._taken.add(port)

    def give_back(self, port: int) -> None:
        """The engine has ended: the port rests, then may be taken again."""
        with self._lock:
            self._taken.discard(port)
            self._resting[port] = self._clock.monotonic() + _REST_S


def _bind_problem(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
