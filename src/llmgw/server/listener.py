"""The server's end of the wire: who is let in, and whose messages go where.

The link's loop thread only sorts; lanes (worker threads) handle complete messages. All of one node's messages, of all
its connections, go through one lane, so they are handled in order and a newer connection never races an older one.
"""

from __future__ import annotations

import logging
import queue
import threading
import zlib
from typing import Protocol

from attrs import define, evolve, field

from llmgw.domain.identity import Certified
from llmgw.domain.ids import check_node_id
from llmgw.domain.report import NodeReport, agreed_interval
from llmgw.errors import LinkError, LlmgwError, TlsError, WireError
from llmgw.server.credentials import Credentials, Registrar, check_node, check_protocol
from llmgw.server.handles import AgentHandle
from llmgw.server.refusals import Refusals
from llmgw.system.clock import Clock
from llmgw.wire.conn import Conn, LinkLimits
from llmgw.wire.identity import Identity, certified, peer_identity
from llmgw.wire.link import Link
from llmgw.wire.messages import PROTOCOL, Ack, Answer, Enroll, Hello, Join, Message, Refused, Renew, Report, Welcome
from llmgw.wire.tls import TlsFiles, TlsSource

log = logging.getLogger(__name__)

__all__ = ["AgentHandle", "FleetSink", "Listener"]

_SILENT_BEATS = 4
_PAUSE_AT = 64
_RESUME_AT = 16
_LOOK_S = 1.0


class FleetSink(Protocol):
    """Who keeps the fleet. Called by worker threads, never twice at once for one node; should return quickly."""

    def admit(self, node_id: str, hello: Hello, address: str, agent: AgentHandle) -> None:
        """A node is at the door. When it was already in, `agent` takes the place of the older connection, for which
        `left` is not called.

        Raises:
            LlmgwError: it is refused with this code and these words.
        """
        ...

    def certified(self, node_id: str, certificate: Certified | None) -> None:
        """What certificate an admitted node has: the one it showed, then each that is issued to it."""
        ...

    def reported(self, node_id: str, report: NodeReport) -> None:
        """A report arrived; `facts` None means unchanged."""
        ...

    def left(self, node_id: str, instance_id: str, words: str) -> None:
        """The node's connection is gone, and why."""
        ...


@define(eq=False)
class _Guest:
    """What the listener knows of one connection; `lane` is chosen by the node id in its hello."""

    lane: int | None = None
    identity: Identity | None = None
    handle: AgentHandle | None = None
    waiting: int = 0
    joining: bool = False
    renewed: float | None = None
    lock: threading.Lock = field(factory=threading.Lock)


@define(eq=False)
class _Job:
    conn: Conn
    guest: _Guest
    message: Message | None
    error: LlmgwError | None = None


class Listener:
    """Accepts agents.

    Args:
        host, port: where to listen; port 0 lets the kernel choose.
        sink: who keeps the fleet.
        clock: for deadlines.
        server_id, epoch: told to every agent.
        heartbeat_interval_s: an agent is given up after four of its own beats, or four of these when they are longer.
        tls: PEM files; None for plain text, where a node is who it says it is.
        limits: bounds of the link.
        workers: number of lanes.
        registrar: signs for nodes that join or renew; None signs nothing.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        sink: FleetSink,
        clock: Clock,
        server_id: str,
        epoch: int,
        heartbeat_interval_s: float,
        tls: TlsFiles | None = None,
        limits: LinkLimits | None = None,
        workers: int = 4,
        registrar: Registrar | None = None,
    ) -> None:
        self._host = host
        self._wanted_port = port
        self._sink = sink
        self._clock = clock
        self._tls = TlsSource(tls, "server") if tls is not None else None
        self._refusals = Refusals(clock)
        self._credentials = Credentials(self._tls, registrar, clock)
        self._welcome = Welcome(PROTOCOL, server_id, epoch, heartbeat_interval_s, self._credentials.renews)
        self._link = Link(self, clock, limits, name="agents-link")
        self._lanes: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in range(workers)]
        self._workers = [
            threading.Thread(target=self._work, args=(lane,), name=f"agents-{at}", daemon=True)
            for at, lane in enumerate(self._lanes)
        ]
        self._live: dict[str, AgentHandle] = {}
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="agents-tls", daemon=True)
        self._port: int | None = None

    def start(self) -> None:
        """Listen and serve.

        Raises:
            AddressInUse, LinkError: the address cannot be listened on.
            TlsError: certificate files cannot be used.
        """
        if self._tls is not None:
            self._tls.current()
        self._port = self._link.listen(self._host, self._wanted_port, self._tls.current if self._tls else None)
        for worker in self._workers:
            worker.start()
        self._link.start()
        if self._tls is not None:
            self._watcher.start()

    def stop(self) -> None:
        """Close every connection and join the threads."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._link.stop("the server is stopping")
        for lane in self._lanes:
            lane.put(None)
        for worker in self._workers:
            if worker.is_alive():
                worker.join()

    @property
    def port(self) -> int:
        """The port listened on; 0 before `start`."""
        return self._port or 0

    # On the link's loop thread: sort and return.

    def opened(self, conn: Conn) -> None:
        guest = conn.data = _Guest()
        if conn.certificate is not None:
            try:
                guest.identity = peer_identity(conn.certificate)
            except TlsError as error:
                self._refuse(conn, error)

    def received(self, conn: Conn, message: Message) -> None:
        guest: _Guest = conn.data
        if isinstance(message, Answer):
            if guest.handle is not None:
                guest.handle.answered(message)
            return
        if guest.lane is None:
            if isinstance(message, Join):
                guest.joining = True
                guest.lane = 0
            elif isinstance(message, Hello):
                guest.lane = zlib.crc32(message.node_id.encode("utf-8", "replace")) % len(self._lanes)
            else:
                self._refuse(conn, WireError("the first message must be `hello`"))
                return
        with guest.lock:
            guest.waiting += 1
            if guest.waiting == _PAUSE_AT:
                self._link.pause(conn, True)
        self._lanes[guest.lane].put(_Job(conn, guest, message))

    def closed(self, conn: Conn, error: LlmgwError) -> None:
        guest: _Guest | None = conn.data
        if guest is None or guest.lane is None:
            self._refusals.tell(conn, error)
        else:
            if guest.handle is not None:
                guest.handle.ended(error)
            self._lanes[guest.lane].put(_Job(conn, guest, None, error))

    def _refuse(self, conn: Conn, error: LlmgwError) -> None:
        words = f"{error.words()} ({error.hint})" if error.hint else error.words()
        self._link.close(conn, error, Refused(error.code, words))

    # On the worker threads.

    def _work(self, lane: queue.SimpleQueue[_Job | None]) -> None:
        while (job := lane.get()) is not None:
            try:
                self._handle(job)
            except LlmgwError as error:
                self._refuse(job.conn, error)
            except Exception as error:
                log.exception("fault while handling a message from %s", job.conn.address)
                self._refuse(job.conn, LinkError("a fault inside the server", cause=type(error).__name__))

    def _handle(self, job: _Job) -> None:
        guest = job.guest
        if job.message is None:
            self._gone(job)
            return
        with guest.lock:
            guest.waiting -= 1
            if guest.waiting == _RESUME_AT:
                self._link.pause(job.conn, False)
        match job.message:
            case Hello() as hello:
                self._admit(job.conn, guest, hello)
            case Join() | Enroll() if guest.joining:
                self._credentials.join(self._link, job.conn, job.message)
            case Renew(csr) if guest.handle is not None:
                self._renew(guest, guest.handle, csr)
            case Report(report) if guest.handle is not None:
                if self._live.get(guest.handle.node_id) is guest.handle:
                    self._report(guest.handle, report)
            case message:
                raise WireError(f"`{type(message).__name__.lower()}` is not for the server to hear now")

    def _admit(self, conn: Conn, guest: _Guest, hello: Hello) -> None:
        if guest.handle is not None:
            raise WireError("`hello` came twice on one connection")
        if guest.joining:
            raise WireError("a connection that joins cannot say `hello`", hint="dial again with the certificate")
        node_id = check_node_id(hello.node_id)
        check_protocol(hello.protocol, hello.version)
        if self._tls is not None:
            check_node(guest.identity, node_id)
            self._credentials.check(conn.certificate)
        handle = AgentHandle(self._link, conn, node_id, hello.instance_id)
        self._sink.admit(node_id, hello, conn.address, handle)
        self._sink.certified(node_id, certified(conn.certificate) if conn.certificate is not None else None)
        guest.handle = handle
        older = self._live.get(node_id)
        self._live[node_id] = handle
        # the node's own configuration says how often it reports; the welcome only keeps that within reason
        interval_s = agreed_interval(hello.heartbeat_interval_s)
        self._link.greet(conn, _SILENT_BEATS * max(interval_s, self._welcome.heartbeat_interval_s))
        protocol = min(hello.protocol, PROTOCOL)
        handle.say(evolve(self._welcome, protocol=protocol, heartbeat_interval_s=interval_s))
        handle.welcomed()
        if older is not None:
            self._replace(older, handle)

    def _replace(self, older: AgentHandle, newer: AgentHandle) -> None:
        if older.instance_id != newer.instance_id:
            log.warning(
                "two agents say they are node `%s`: the one at %s takes the place of the one at %s; "
                "a restart, or a copied certificate or node id",
                newer.node_id, newer.address, older.address,
            )  # fmt: skip
        older.close(f"replaced by a newer connection of node `{newer.node_id}` from {newer.address}")

    def _renew(self, guest: _Guest, handle: AgentHandle, csr: str) -> None:
        now, again = self._clock.monotonic(), guest.renewed
        guest.renewed = now
        issued, made = self._credentials.renew(handle.node_id, csr, None if again is None else now - again)
        if made is not None:
            self._sink.certified(handle.node_id, made)
        handle.say(issued)

    # On the watching thread.

    def _watch(self) -> None:
        """Follow the TLS files, and cut those whose certificate is good no longer."""
        while not self._clock.wait(self._stopping, _LOOK_S):
            try:
                if self._tls is not None and self._tls.refresh():
                    log.info("TLS files changed: new connections use them, %d agents stay", len(self._live))
                for handle in list(self._live.values()):
                    self._cut_if_bad(handle)
            except Exception:
                log.exception("fault while looking after certificates")

    def _cut_if_bad(self, handle: AgentHandle) -> None:
        try:
            self._credentials.check(handle.certificate)
        except TlsError as error:
            log.warning("node `%s` at %s is cut: %s", handle.node_id, handle.address, error)
            handle.close(error.words(), error.code)

    def _report(self, handle: AgentHandle, report: NodeReport) -> None:
        try:
            self._sink.reported(handle.node_id, report)
        except Exception:
            # The report arrived, and the agent cannot mend our fault by sending it again.
            log.exception("fault while taking in a report of node `%s`", handle.node_id)
        handle.say(Ack(report.seq))

    def _gone(self, job: _Job) -> None:
        handle, error = job.guest.handle, job.error or LinkError("closed")
        if handle is None:
            self._refusals.tell(job.conn, error)
            return
        # Admitted on this very lane, perhaps after the loop had already seen the end.
        handle.ended(error)
        if self._live.get(handle.node_id) is handle:
            del self._live[handle.node_id]
            self._sink.left(handle.node_id, handle.instance_id, error.words())
