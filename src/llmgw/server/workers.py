"""The gateway processes: started, restarted with a pause, adopted when they outlived the server before this one."""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from attrs import define

from llmgw import __version__
from llmgw.errors import AddressInUse, CommandError
from llmgw.server.control import Control, GatewayInfo
from llmgw.system.clock import Clock
from llmgw.system.commands import Daemon, exit_words

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_ADDRESS_HINTS = {
    errno.EADDRINUSE: "stop the program that has the address, or choose another one under `http.listen` in server.yaml",
    errno.EADDRNOTAVAIL: "name an address this machine has under `http.listen` in server.yaml (`ip -br addr`)",
    errno.EACCES: "ports below 1024 need root or `CAP_NET_BIND_SERVICE`; or choose another under `http.listen`",
}
_PAUSE_S = 0.5
_PAUSE_MAX_S = 30.0
_QUIET_S = 60.0


class Starter(Protocol):
    """Starts the gateway process of a number.

    Raises:
        CommandError: it could not be started.
    """

    def __call__(self, index: int) -> Daemon: ...


@define
class _Place:
    """One gateway that should be there. Touched by the owner thread only."""

    daemon: Daemon | None = None
    failures: int = 0
    started: float = 0.0
    next_try: float = 0.0


class Workers:
    """Keeps `count` gateways running.

    Args:
        listen: address they serve, as they say it themselves: `numeric`.
        start: starts one.
        settings: name of the settings gateways are started with; adopted ones with others are replaced.
        on_serving: called once, with the address, when the first gateway is connected.
        wake: set when a gateway connected or went.
    """

    def __init__(
        self,
        control: Control,
        clock: Clock,
        start: Starter,
        *,
        count: int,
        listen: str,
        on_serving: Callable[[str], None],
        wake: threading.Event,
        settings: str = "",
    ) -> None:
        self._settings = settings
        self._control = control
        self._clock = clock
        self._start = start
        self._listen = listen
        self._on_serving = on_serving
        self._serving = False
        self._places = [_Place() for _ in range(count)]
        self._wake = wake
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gateways", daemon=True)

    def adopt(self, wait_s: float) -> tuple[GatewayInfo, ...]:
        """Wait a moment for gateways that outlived the last server; those with other settings are replaced later.

        Returns:
            Those that hold the address: the ones that stay, and the ones that finish their answers and go.
        """
        deadline = self._clock.monotonic() + wait_s
        while (left := deadline - self._clock.monotonic()) > 0:
            self._wake.clear()
            if len(self._control.gateways()) >= len(self._places):
                break
            self._clock.wait(self._wake, left)
        found = self._control.gateways()
        for info in found:
            if self._fits(info):
                log.info("gateway pid %d of an earlier server goes on", info.pid)
            else:
                words = "gateway pid %d (%s, llmgw %s) was started otherwise and is replaced"
                log.info(words, info.pid, info.listen, info.version)
        return tuple(info for info in found if info.listen == self._listen or self._listen.endswith(":0"))

    def start(self) -> None:
        """Begin to keep them running."""
        self._thread.start()

    def stop(self, patience_s: float) -> None:
        """Tell all to finish their answers and wait; those of ours that outstay are ended."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        self._control.drain()
        deadline = self._clock.monotonic() + patience_s
        ours = [place.daemon for place in self._places if place.daemon is not None]
        for daemon in ours:
            if daemon.wait(max(0.0, deadline - self._clock.monotonic())) is None:
                log.warning("gateway pid %d still has answers to finish: ended", daemon.pid)
                daemon.terminate()
                if daemon.wait(2.0) is None:
                    daemon.kill()
                    daemon.wait(5.0)
        # adopted ones are nobody's children: they are waited for by their connection and never signalled
        while self._control.gateways() and self._clock.monotonic() < deadline:
            self._wake.clear()
            self._clock.wait(self._wake, 0.1)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            self._look()
            self._clock.wait(self._wake, _LOOK_S)

    def _look(self) -> None:
        now = self._clock.monotonic()
        connected: dict[int, GatewayInfo] = {}
        present = self._control.gateways()
        for info in present:
            ours = info.index < len(self._places) and self._fits(info)
            if ours and (info.index not in connected or self._is_child(info)):
                connected[info.index] = info
        for info in present:
            instead = connected.get(info.index)
            # who does not fit serves until another does in its place
            if instead is not info and (instead is not None or info.index >= len(self._places)):
                self._control.drain(info.pid)
        for index, place in enumerate(self._places):
            self._check(index, place, connected.get(index), now)
        if connected and not self._serving:
            self._serving = True
            self._on_serving(min(connected.items())[1].listen)

    def _check(self, index: int, place: _Place, info: GatewayInfo | None, now: float) -> None:
        if place.daemon is not None:
            code = place.daemon.poll()
            if code is None:
                if now - place.started > _QUIET_S:
                    place.failures = 0
                return
            place.daemon = None
            pause = min(_PAUSE_MAX_S, _PAUSE_S * 2**place.failures) * random.uniform(0.5, 1.0)
            place.failures += 1
            place.next_try = now + pause
            log.error("gateway %d %s; next start in %.1f s", index, exit_words(code), pause)
        if info is not None or now < place.next_try:
            return
        try:
            place.daemon = self._start(index)
            place.started = now
            log.info("gateway %d started, pid %d", index, place.daemon.pid)
        except CommandError as error:
            place.failures += 1
            place.next_try = now + _PAUSE_MAX_S
            log.error("gateway %d: %s; next start in %.0f s", index, error.words(), _PAUSE_MAX_S)

    def _is_child(self, info: GatewayInfo) -> bool:
        daemon = self._places[info.index].daemon
        return daemon is not None and daemon.pid == info.pid

    def _fits(self, info: GatewayInfo) -> bool:
        return (
            info.version == __version__
            and info.settings == self._settings
            and (info.listen == self._listen or self._listen.endswith(":0"))
        )


def numeric(host: str, port: int) -> str:
    """The address a gateway says it listens on when it is told a name; as written when the name does not resolve."""
    with contextlib.suppress(OSError):
        host = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int) -> None:
    """Make sure that nobody else listens there.

    Raises:
        AddressInUse: somebody does, or the address is not one of this machine's.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.closing(socket.socket(family, kind, proto)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise AddressInUse(
            f"cannot listen on `{where}`",
            cause=error.strerror or str(error),
            hint=_ADDRESS_HINTS.get(error.errno or 0, "choose another address under `http.listen` in server.yaml"),
        ) from error
