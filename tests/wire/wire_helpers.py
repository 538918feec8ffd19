"""What the wire's tests share: a real CA, a fleet that writes down what it is told, an agent with something to say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import evolve

from llmgw.agent.session import Session
from llmgw.domain.facts import CpuFacts, Finding, MemoryFacts, NodeFacts, NvidiaFacts, OsFacts, Readings, Truth
from llmgw.domain.identity import Certified
from llmgw.domain.report import Desired, NodeReport
from llmgw.errors import LlmgwError
from llmgw.pki import authority
from llmgw.server.listener import AgentHandle, Listener
from llmgw.system.clock import RealClock
from llmgw.wire.conn import LinkLimits
from llmgw.wire.messages import Hello
from llmgw.wire.tls import TlsFiles

CLOCK = RealClock()
SERVER = "server-1"


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> Any:
    """Poll until `condition` holds; its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def some_facts(revision: str = "r1", **changes: Any) -> NodeFacts:
    facts = NodeFacts(
        hostname="node-a",
        boot_id="boot-1",
        os=OsFacts("debian", "12"),
        cpu=CpuFacts("x86_64", 8, flags=("avx2",)),
        memory=MemoryFacts(1 << 34),
        nvidia=NvidiaFacts(Finding(Truth.NO, "no NVIDIA driver is loaded")),
        labels={"rack": "r12"},
        revision=revision,
    )
    return evolve(facts, **changes)


class Fleet:
    """A FleetSink that writes down."""

    def __init__(self) -> None:
        self.hellos: list[Hello] = []
        self.reports: list[tuple[str, NodeReport]] = []
        self.lefts: list[tuple[str, str, str]] = []
        self.agents: dict[str, AgentHandle] = {}
        self.certificates: dict[str, Certified | None] = {}
        self.refuse: LlmgwError | None = None
        self.on_admit: Callable[[AgentHandle], None] = lambda agent: None
        self.hold = threading.Event()
        self.hold.set()

    def admit(self, node_id: str, hello: Hello, address: str, agent: AgentHandle) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.hellos.append(hello)
        self.agents[node_id] = agent
        self.on_admit(agent)

    def certified(self, node_id: str, certificate: Certified | None) -> None:
        self.certificates[node_id] = certificate

    def reported(self, node_id: str, report: NodeReport) -> None:
        self.hold.wait(30)
        self.reports.append((node_id, report))

    def left(self, node_id: str, instance_id: str, words: str) -> None:
        self.lefts.append((node_id, instance_id, words))


class Source:
    """A ReportSource."""

    def __init__(self, facts: NodeFacts | None = None) -> None:
        self.known = facts
        self.broken = False
        self.changes: dict[str, Any] = {}

    def facts(self) -> NodeFacts | None:
        return self.known

    def report(self, seq: int, generation: int | None, epoch: int | None, facts: NodeFacts | None) -> NodeReport:
        if self.broken:
            raise RuntimeError("the probe registry fell over")
        report = NodeReport(seq, generation, epoch, CLOCK.now(), facts, Readings(CLOCK.now(), 1 << 30))
        return evolve(report, **self.changes)


class Agent:
    """A session with its surroundings."""

    def __init__(self, urls: list[str], node_id: str = "node-a", **changes: Any) -> None:
        self.source = changes.pop("source", None) or Source(some_facts())
        self.desired: list[Desired] = []
        given: dict[str, Any] = {
            "servers": urls,
            "node_id": node_id,
            "tls": None,
            "version": "0.1.0",
            "boot_id": "boot-1",
            "instance_id": "instance-1",
            "heartbeat_interval_s": 5.0,
            "reconnect_base_s": 0.05,
            "reconnect_max_s": 0.2,
            "source": self.source,
            "on_desired": self.desired.append,
            "answers": {},
            "clock": CLOCK,
        }
        self.session = Session(**{**given, **changes})
        self.seen: list[str] = []

    @property
    def state(self) -> Truth:
        return self.session.status().state.value

    @property
    def words(self) -> str:
        return self.session.status().state.words

    def wait_connected(self) -> None:
        wait_for(lambda: self.state is Truth.YES, f"connected; last: {self.session.status()}")

    def wait_words(self, part: str, timeout_s: float = 10.0) -> str:
        """Wait until the status says `part`, and insist that it never claimed to be connected on the way."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.session.status()
            assert status.state.value is not Truth.YES, status
            assert not status.state.words.startswith("connected"), status
            if part in status.state.words:
                return status.state.words
            assert time.monotonic() < deadline, f"`{part}` not in {status}"
            time.sleep(0.005)


@contextmanager
def running_agent(urls: list[str], node_id: str = "node-a", **changes: Any) -> Iterator[Agent]:
    agent = Agent(urls, node_id, **changes)
    agent.session.start()
    try:
        yield agent
    finally:
        agent.session.stop()


@contextmanager
def running_listener(fleet: Fleet, **changes: Any) -> Iterator[Listener]:
    given: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "sink": fleet,
        "clock": CLOCK,
        "server_id": SERVER,
        "epoch": 1,
        "heartbeat_interval_s": 5.0,
        "limits": LinkLimits(),
    }
    listener = Listener(**{**given, **changes})
    listener.start()
    try:
        yield listener
    finally:
        fleet.hold.set()
        listener.stop()


class Authority:
    """A CA on disk."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        authority.init_ca(directory, now=time.time())

    def files(self, issued: authority.Issued, ca: Path | None = None, crl: Path | None = None) -> TlsFiles:
        return TlsFiles(str(ca or issued.ca), str(issued.cert), str(issued.key), str(crl) if crl else None)

    def server(self, name: str = "gateway.test", sans: tuple[str, ...] = ("127.0.0.1",), **given: Any) -> TlsFiles:
        return self.files(authority.issue_server(self.dir, name, sans, **{"now": time.time(), **given}))

    def node(self, name: str = "node-a", **given: Any) -> TlsFiles:
        return self.files(authority.issue_node(self.dir, name, **{"now": time.time(), **given}))

    def operator(self, name: str = "anna") -> TlsFiles:
        return self.files(authority.issue_operator(self.dir, name, now=time.time()))
