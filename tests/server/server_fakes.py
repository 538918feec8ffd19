"""A clock that is set by hand, agents that remember what they were told, and a control plane without processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from llmgw.domain.engines import Capabilities, EngineSpec
from llmgw.domain.facts import NodeFacts
from llmgw.domain.report import Desired, NodeReport
from llmgw.domain.routing import RouteTable
from llmgw.errors import ApiError
from llmgw.server.control import Control
from llmgw.server.deploy import Deploy
from llmgw.server.events import Events
from llmgw.server.fleet import Fleet
from llmgw.server.state import State, open_state

LLAMA = EngineSpec("llama.cpp", "b1")
CAPABLE = {"llama.cpp": Capabilities(True, ("gguf",), False, ("/v1/chat/completions",))}


class FakeClock:
    """Time stands still until `pass_time`; waiting on an event is real, so that threads can be joined."""

    def __init__(self) -> None:
        self.epoch = 1_000_000.0
        self.steady = 500.0

    def now(self) -> float:
        return self.epoch

    def monotonic(self) -> float:
        return self.steady

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(min(timeout_s, 0.05))

    def pass_time(self, seconds: float) -> None:
        self.epoch += seconds
        self.steady += seconds


@frozen
class FakeHello:
    version: str = "0.1.0"
    instance_id: str = "i1"
    clock: float = 1_000_000.0
    heartbeat_interval_s: float = 5.0
    facts: NodeFacts | None = None


class FakeAgent:
    """Stands for one connection."""

    def __init__(self, answers: Mapping[str, Any] | None = None) -> None:
        self.sent: list[Desired] = []
        self.closed: list[str] = []
        self.asked: list[tuple[str, dict[str, str]]] = []
        self._answers = answers or {}

    def send_desired(self, desired: Desired) -> None:
        self.sent.append(desired)

    def ask(self, what: str, args: Mapping[str, str], timeout_s: float) -> Any:
        self.asked.append((what, dict(args)))
        if what not in self._answers:
            raise ApiError(f"this agent does not know how to answer `{what}`", code="node-answered-error")
        return self._answers[what]

    def close(self, words: str) -> None:
        self.closed.append(words)

    def replicas(self) -> list[tuple[str, int]]:
        """What it was told last to run: (replica id, epoch)."""
        return [(item.replica_id, item.epoch) for item in self.sent[-1].replicas]


class Plane:
    """State, fleet and deploy joined as the app joins them; a pass runs when a test says so."""

    def __init__(
        self,
        directory: Path,
        *,
        keys_required: bool = False,
        engines: tuple[EngineSpec, ...] = (LLAMA,),
        in_flight: Callable[[], Mapping[str, int] | None] = lambda: None,
    ) -> None:
        self.clock = FakeClock()
        self.state: State = open_state(str(directory / "state.db"))
        self.wake = threading.Event()
        self.tables: list[RouteTable] = []
        self.events = Events(self.clock, self.state.events())
        self.fleet = Fleet(
            self.clock,
            self.state.nodes(),
            lost_after=3,
            on_change=self.wake.set,
            on_new=lambda node_id: self.state.add_node(node_id, self.clock.now()),
            draining=self.state.draining(),
            tell=lambda node_id, words: self.events.record("node", node_id, words),
        )
        self.deploy = Deploy(
            self.state,
            self.fleet,
            self.clock,
            engines,
            CAPABLE,
            mass_loss_fraction=0.55,
            keys_required=keys_required,
            publish=self.tables.append,
            wake=self.wake,
            events=self.events,
            in_flight=in_flight,
        )

    def join(self, node_id: str, agent: FakeAgent | None = None, **hello: Any) -> FakeAgent:
        agent = agent or FakeAgent()
        self.fleet.admit(node_id, FakeHello(**hello), "10.0.0.1:5", agent)
        return agent

    def pass_time(self, seconds: float, *beating: tuple[str, NodeReport]) -> None:
        """Let time go by in steps of a second, with a pass and heartbeats in each."""
        for _ in range(round(seconds)):
            self.clock.pass_time(1.0)
            for node_id, report in beating:
                self.fleet.reported(node_id, report)
            self.deploy.pass_once()

    def close(self) -> None:
        self.deploy.stop()
        self.state.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(str(self._path))


class Answer:
    """A whole HTTP answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.text = response.read().decode()

    def json(self) -> Any:
        return json.loads(self.text)


def request(
    path: Path,
    method: str,
    target: str,
    *,
    token: str | None = None,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request to the admin socket; `body` is sent as JSON unless it is bytes."""
    sent = {"Host": "localhost:8080", **(headers or {})}
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection = _UnixConnection(path)
    try:
        # an answer may come before the whole body was taken
        with contextlib.suppress(BrokenPipeError):
            connection.request(method, target, data, sent)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def stream(path: Path, target: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """An answer that is read piece by piece; close both."""
    connection = _UnixConnection(path)
    connection.request("GET", target, headers={"Host": "localhost:8080"})
    return connection, connection.getresponse()


def eventually(condition: Any, what: str, timeout_s: float = 10.0) -> Any:
    """The first truthy value of `condition()`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)


def new_control(directory: Path) -> Control:
    """A control socket nobody watches."""
    return Control(directory / "control.sock", lambda: None)
