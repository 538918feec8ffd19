"""The server's own certificates: when they end, told before every agent or client is locked out by it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from llmgw.pki.listing import CertificateInfo, show_certificate
from llmgw.system.clock import Clock

if TYPE_CHECKING:
    from llmgw.server.settings import ServerSettings

log = logging.getLogger("llmgw.server")

_DAY_S = 86400.0
_EVERY_S = 3600.0
# a CA has to reach every node before the old one ends
_LEAD_S = {"ca": 180 * _DAY_S}
_LEAF_LEAD_S = 30 * _DAY_S


@frozen
class OwnCertificate:
    """One file as it is now.

    Args:
        key: the key of server.yaml that names it.
        not_after: when it ends, seconds since the epoch; None when it cannot be read.
        words: how it stands.
        worry: in the last fifth of its life, and no earlier than 30 days (a CA: 180) before its end; or unreadable.
    """

    key: str
    path: str
    not_after: float | None
    words: str
    worry: bool

    def warning(self) -> str:
        """The sentence of a log line."""
        return f"{self.key} `{self.path}`: {self.words}; docs/certificates.md says how to replace it"


def look(settings: ServerSettings, now: float) -> tuple[OwnCertificate, ...]:
    """Every certificate server.yaml names for the server itself, read now.

    Args:
        now: seconds since the epoch.
    """
    return tuple(_judge(key, show_certificate(Path(path), now), now) for key, path in _named(settings))


def _named(settings: ServerSettings) -> Iterator[tuple[str, str]]:
    if settings.agents.tls is not None:
        yield "agents.tls.cert", settings.agents.tls.cert
        yield "agents.tls.ca", settings.agents.tls.ca
    if settings.http.tls is not None:
        yield "http.tls.cert", settings.http.tls.cert


def _judge(key: str, info: CertificateInfo, now: float) -> OwnCertificate:
    worry = True
    if info.not_before is not None and info.not_after is not None:
        lead = min((info.not_after - info.not_before) / 5, _LEAD_S.get(info.role or "", _LEAF_LEAD_S))
        worry = now >= info.not_after - lead
    return OwnCertificate(key, info.path, info.not_after, info.words, worry)


class CertificateWatch:
    """Looks once an hour and tells what gives reason to worry, once for each change of its words: once a day.

    Args:
        find: gives the certificates as they are now.
        tell: gets the sentence.
    """

    def __init__(
        self,
        find: Callable[[], tuple[OwnCertificate, ...]],
        tell: Callable[[str], None],
        clock: Clock,
        every_s: float = _EVERY_S,
    ) -> None:
        self._find = find
        self._tell = tell
        self._clock = clock
        self._every_s = every_s
        self._told: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="certificates", daemon=True)

    def start(self) -> None:
        """Look now, then in a thread of its own."""
        self._look()
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._clock.wait(self._stop, self._every_s)
            if not self._stop.is_set():
                self._look()

    def _look(self) -> None:
        for item in self._find():
            words = item.warning() if item.worry else ""
            if words and self._told.get(item.key) != words:
                log.warning("%s", words)
                self._tell(words)
            self._told[item.key] = words
