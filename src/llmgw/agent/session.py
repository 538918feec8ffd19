"""The agent's end of the wire: dial, say hello, report every beat, obey the desired set, answer questions.

One owner thread. It never touches the socket (the link's loop does) and never waits for an answer to be found (the
answerer's thread does), so neither a slow peer nor a slow question delays a heartbeat.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import evolve, frozen

from llmgw.agent.answerer import Answerer
from llmgw.agent.conversation import Conversation, Ended, Mailbox, Memory, ReportSource, Setup, Signal
from llmgw.agent.dialling import Server, parse_server
from llmgw.agent.renew import Renewal, finish, own_trouble
from llmgw.domain.facts import Finding, Truth
from llmgw.domain.report import Desired
from llmgw.errors import LinkError, LlmgwError
from llmgw.system.clock import Clock
from llmgw.units import format_duration
from llmgw.wire.conn import Conn, LinkLimits
from llmgw.wire.link import Link
from llmgw.wire.messages import PROTOCOL, Hello, Message
from llmgw.wire.stream import CLOSED
from llmgw.wire.tls import TlsFiles, TlsSource

log = logging.getLogger(__name__)

__all__ = ["ReportSource", "Session", "SessionStatus"]

_LOWEST_PAUSE_S = 0.05


@frozen
class SessionStatus:
    """How the session stands.

    Args:
        state: yes only between a server's welcome and the end of that connection; its words name the cause otherwise.
        server: URL of the server connected to, or last tried.
        since: seconds since the epoch when the state began.
        last_error: why the last attempt or connection ended; stays while connected.
        certificate: how this node's own certificate stands; "" without one.
    """

    state: Finding
    server: str | None
    since: float
    last_error: str
    certificate: str = ""


class Session:
    """Keeps this agent connected to one of its servers.

    Args:
        servers: `http://host:port` or `https://host:port`, tried in turn.
        node_id: who this node is; under TLS also the common name of its certificate.
        tls: PEM files, needed for `https://`; read again when they change.
        version, boot_id, instance_id: said in hello.
        heartbeat_interval_s: until the server's welcome says otherwise.
        reconnect_base_s, reconnect_max_s: each pause is drawn from zero to a ceiling that doubles from base to max.
        source: what is reported.
        on_desired: told each desired set that is to be obeyed; must return at once.
        answers: question -> function of its arguments, run in a thread of its own; its result must be JSON.
        highest_epoch: highest fencing epoch this agent has ever seen.

    Raises:
        UsageError: a server URL is not one.
    """

    def __init__(
        self,
        *,
        servers: Sequence[str],
        node_id: str,
        tls: TlsFiles | None,
        version: str,
        boot_id: str,
        instance_id: str,
        heartbeat_interval_s: float,
        reconnect_base_s: float,
        reconnect_max_s: float,
        source: ReportSource,
        on_desired: Callable[[Desired], None],
        answers: Mapping[str, Callable[[Mapping[str, str]], Any]],
        clock: Clock,
        highest_epoch: int = 0,
        limits: LinkLimits | None = None,
    ) -> None:
        self._servers = [parse_server(url) for url in servers]
        self._tls = TlsSource(tls, "client") if tls is not None else None
        self._renewal = Renewal(tls, node_id, clock) if tls is not None else None
        self._base_s, self._max_s = reconnect_base_s, reconnect_max_s
        self._mail: Mailbox = queue.SimpleQueue()
        self._link = Link(self, clock, limits, name="server-link")
        self._answerer = Answerer(answers, self._link)
        self._stopping = threading.Event()
        self._clock = clock
        self._setup = Setup(
            hello=Hello(PROTOCOL, node_id, version, boot_id, instance_id, 0.0, heartbeat_interval_s),
            link=self._link,
            mail=self._mail,
            clock=clock,
            source=source,
            answerer=self._answerer,
            memory=Memory(highest_epoch),
            stopping=self._stopping,
            on_desired=on_desired,
            tls=self._tls,
            renewal=self._renewal,
        )
        self._status_lock = threading.Lock()
        self._status = SessionStatus(Finding(Truth.UNKNOWN, "has not dialled a server yet"), None, clock.now(), "")
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._link.start()
        self._answerer.start()
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye and join the threads; harmless when done twice."""
        self._stopping.set()
        self._mail.put((None, Signal.STOP))
        if self._thread.is_alive():
            self._thread.join()
        self._link.stop("the agent is stopping")
        self._answerer.stop()

    def poke(self) -> None:
        """Report soon: something changed. Many pokes become one report."""
        self._mail.put((None, Signal.POKE))

    def status(self) -> SessionStatus:
        """How the session stands now."""
        certificate = self._renewal.words() if self._renewal is not None else ""
        with self._status_lock:
            return evolve(self._status, certificate=certificate)

    # On the link's loop thread.

    def opened(self, conn: Conn) -> None:
        self._mail.put((conn, Signal.OPENED))

    def received(self, conn: Conn, message: Message) -> None:
        self._mail.put((conn, message))

    def closed(self, conn: Conn, error: LlmgwError) -> None:
        self._mail.put((conn, error))

    # On the session's thread.

    def _run(self) -> None:
        failures = 0
        self._finish_renewal()
        while not self._stopping.is_set():
            server = self._servers[failures % len(self._servers)]
            if self.status().state.value is Truth.UNKNOWN:
                self._set(Finding(Truth.UNKNOWN, f"dialling `{server.url}`"), server.url, "")
            began = self._clock.monotonic()
            try:
                welcomed, error = self._one_server(server)
            except Exception as fault:
                log.exception("fault in the session")
                welcomed, error = False, LinkError("a fault inside the agent", cause=type(fault).__name__)
            if self._stopping.is_set():
                break
            # Two agents with one name throw each other out at once: only a connection that lasted counts as a success.
            lasted = welcomed and self._clock.monotonic() - began > self._max_s
            failures = 0 if lasted else failures + 1
            pause = self._pause(failures)
            self._say_lost(server, error, pause)
            self._wait(pause)
        self._set(Finding(Truth.NO, "the agent is stopping"), self.status().server, self.status().last_error)

    def _finish_renewal(self) -> None:
        if self._tls is not None:
            try:
                finish(self._tls.files)
            except LlmgwError as error:
                log.error("a renewal of the certificate that was interrupted cannot be finished: %s", error)

    def _pause(self, failures: int) -> float:
        rounds = max(0, failures - 1) // len(self._servers)
        ceiling = min(self._max_s, self._base_s * 2 ** min(rounds, 32))
        return max(_LOWEST_PAUSE_S, random.uniform(0, ceiling))

    def _wait(self, pause_s: float) -> None:
        self._clock.wait(self._stopping, pause_s)
        while not self._mail.empty():
            self._mail.get()

    def _one_server(self, server: Server) -> tuple[bool, LlmgwError]:
        """Dial a server's addresses in turn, and stay with the first that welcomes us."""
        error: LlmgwError | None = None
        try:
            context = self._tls.current() if self._tls is not None and server.tls else None
            if server.tls and context is None:
                raise LinkError(f"`{server.url}` needs `tls` with `ca`, `cert` and `key`")
            for family, address in server.resolve():
                if self._stopping.is_set():
                    break
                try:
                    conn = self._link.dial(family, address, server.host, context)
                    ended = Conversation(self._setup, conn, partial(self._say_connected, server)).run()
                except LlmgwError as failed:
                    ended = Ended(False, failed)
                if ended.welcomed:
                    return True, ended.error
                if ended.error.message == CLOSED:
                    hint = "" if server.tls else "a server that wants TLS is dialled with `https://`"
                    ended = Ended(False, LinkError(f"{CLOSED} before it said `welcome`", hint=hint))
                # Of several addresses, one that answered and refused us says more than one where nothing listens.
                if error is None or type(ended.error) is not LinkError:
                    error = ended.error
        except LlmgwError as failed:
            error = failed
        return False, error or LinkError(f"`{server.host}` has no address")

    def _say_connected(self, server: Server, trouble: str) -> None:
        if self.status().state.value is not Truth.YES:
            log.info("connected to `%s`", server.url)
        words = f"connected to `{server.url}`"
        self._set(Finding(Truth.YES, f"{words}; {trouble}" if trouble else words), server.url, self.status().last_error)

    def _say_lost(self, server: Server, error: LlmgwError, pause_s: float) -> None:
        words = f"{error.words()} ({error.hint})" if error.hint else error.words()
        mine = own_trouble(self._tls.files, self._clock.now()) if self._tls is not None and server.tls else ""
        words = f"{words}; {mine}" if mine else words
        sentence = f"not connected to `{server.url}`: {words}"
        before = self.status()
        level = logging.DEBUG if before.last_error == words and before.state.value is Truth.NO else logging.WARNING
        log.log(level, "%s; next attempt in %s", sentence, format_duration(pause_s))
        self._set(Finding(Truth.NO, sentence), server.url, words)

    def _set(self, state: Finding, server: str | None, last_error: str) -> None:
        with self._status_lock:
            same = self._status.state == state and self._status.server == server
            since = self._status.since if same else self._clock.now()
            self._status = SessionStatus(state, server, since, last_error)
