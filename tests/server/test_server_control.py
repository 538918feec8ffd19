"""The control socket and the gateways behind it, with real sockets and real processes."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from server_fakes import eventually, new_control

from llmgw import __version__
from llmgw.domain.routing import RouteKey, RouteModel, RouteReplica, RouteTable
from llmgw.errors import AddressInUse, StateError
from llmgw.server.control import Control
from llmgw.server.workers import Workers, check_free
from llmgw.system.clock import RealClock
from llmgw.system.commands import Daemon, start_daemon
from llmgw.system.selfexec import own_argv, own_env
from llmgw.wire.shapes import from_json

REPLICA = RouteReplica("qwen#0", "n1", "10.0.0.1", 9000, 4, True, key="engine secret")
MODEL = RouteModel("qwen", (), "llama.cpp", "ready", "1 of 1", 4096, ("/v1/chat/completions",), (REPLICA,), 1)
TABLE = RouteTable(1, (MODEL,), (RouteKey("ann", "ab" * 32),), True)

GATEWAY = """
import json, os, socket, sys
path, index, listen, version = sys.argv[1:5]
with socket.socket(socket.AF_UNIX) as link:
    link.connect(path)
    hello = {"type": "gateway", "pid": os.getpid(), "listen": listen, "version": version, "index": int(index)}
    link.sendall(json.dumps(hello).encode() + b"\\n")
    for line in link.makefile("rb"):
        if json.loads(line)["type"] == "drain":
            break
"""
"""Says hello and goes when it is told to drain: what the control process needs of a gateway."""


class Peer:
    """One end of the control socket, spoken by hand."""

    def __init__(self, path: Path, hello: bytes | None = None, **fields: Any) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(str(path))
        said = {"type": "gateway", "pid": 7, "listen": "127.0.0.1:1", "version": __version__, "index": 0, **fields}
        self.socket.sendall(json.dumps(said).encode() + b"\n" if hello is None else hello)
        self.lines = self.socket.makefile("rb")

    def say(self, **fields: Any) -> None:
        self.socket.sendall(json.dumps(fields).encode() + b"\n")

    def hear(self) -> Any:
        return json.loads(self.lines.readline())

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    made = new_control(tmp_path)
    made.start()
    yield made
    made.stop()


def test_a_gateway_gets_the_newest_routes_on_connecting_and_on_every_change(control: Control, tmp_path: Path) -> None:
    control.publish(RouteTable(0, ()))
    control.publish(TABLE)
    with closing(Peer(tmp_path / "control.sock")) as peer:
        told = peer.hear()
        assert told["type"] == "routes"
        assert from_json(told, RouteTable) == TABLE
        control.publish(RouteTable(2, ()))
        assert from_json(peer.hear(), RouteTable) == RouteTable(2, ())
        control.drain(7)
        assert peer.hear() == {"type": "drain"}


def test_counts_are_kept_and_nonsense_in_them_is_left_out(control: Control, tmp_path: Path) -> None:
    with closing(Peer(tmp_path / "control.sock", index=3)) as peer:
        peer.say(type="stats", in_flight={"qwen": 2, "bad": "x"}, requests=9)
        peer.say(type="unknown")
        info = eventually(lambda: next((item for item in control.gateways() if item.requests), None), "counts")
        assert (info.pid, info.index, dict(info.in_flight), info.requests) == (7, 3, {"qwen": 2}, 9)
        peer.say(type="stats", in_flight="x", requests="y")
        eventually(lambda: control.gateways()[0].requests is None, "counts to be unknown")
    eventually(lambda: not control.gateways(), "the gateway to be gone")


@pytest.mark.parametrize(
    "hello", [b"GET / HTTP/1.1\r\n", b"[]\n", b'{"type":"gateway"}\n', b"\xff\n", b"x" * (2 << 20), b""]
)
def test_somebody_who_is_no_gateway_is_disconnected(control: Control, tmp_path: Path, hello: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(10)
        link.connect(str(tmp_path / "control.sock"))
        try:
            link.sendall(hello)
            link.shutdown(socket.SHUT_WR)
            assert link.recv(100) == b""
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert control.gateways() == ()


def test_a_gateway_that_does_not_read_gets_no_pile_of_old_routes(control: Control, tmp_path: Path) -> None:
    words = "x" * 200_000
    with closing(Peer(tmp_path / "control.sock")) as peer:
        eventually(control.gateways, "the gateway")
        for seq in range(1, 200):
            control.publish(RouteTable(seq, (RouteModel("m", (), "e", "failed", words, None, (), ()),)))
        seen = [peer.hear()["seq"]]
        while seen[-1] != 199:
            seen.append(peer.hear()["seq"])
        assert seen == sorted(seen)
        assert len(seen) < 100


def test_the_socket_is_for_its_owner_only_and_an_old_one_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "control.sock").write_text("left over")
    control = new_control(tmp_path)
    control.start()
    assert (tmp_path / "control.sock").stat().st_mode & 0o777 == 0o600
    control.stop()


def test_a_path_too_long_for_a_socket_is_said_in_words(tmp_path: Path) -> None:
    control = Control(tmp_path / ("x" * 120), lambda: None)
    with pytest.raises(StateError, match="cannot listen on the control socket"):
        control.start()


class Fleet:
    """Gateways started by `Workers`; the processes are ended with the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wake = threading.Event()
        self.control = Control(directory / "control.sock", self.wake.set)
        self.control.start()
        self.started: list[Daemon] = []
        self.serving: list[str] = []
        self.version = __version__

    def start(self, index: int, listen: str = "127.0.0.1:1", version: str | None = None) -> Daemon:
        argv = [sys.executable, "-c", GATEWAY, str(self.directory / "control.sock"), str(index), listen]
        daemon = start_daemon([*argv, version or self.version], env=own_env(), log_path=None)
        self.started.append(daemon)
        return daemon

    def workers(self, count: int) -> Workers:
        return Workers(
            self.control,
            RealClock(),
            self.start,
            count=count,
            listen="127.0.0.1:1",
            on_serving=self.serving.append,
            wake=self.wake,
        )

    def pids(self) -> dict[int, int]:
        return {info.index: info.pid for info in self.control.gateways()}

    def close(self) -> None:
        for daemon in self.started:
            daemon.kill()
            daemon.wait(5)
        self.control.stop()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def test_gateways_are_started_restarted_when_killed_and_drained_at_the_end(fleet: Fleet) -> None:
    workers = fleet.workers(2)
    workers.start()
    eventually(lambda: sorted(fleet.pids()) == [0, 1], "two gateways")
    eventually(lambda: fleet.serving == ["127.0.0.1:1"], "the word that it serves")
    killed = fleet.pids()[1]
    next(daemon for daemon in fleet.started if daemon.pid == killed).kill()
    eventually(lambda: fleet.pids().get(1, killed) != killed, "gateway 1 to be started again")
    workers.stop(10.0)
    assert [daemon.poll() for daemon in fleet.started] == [
        0 if daemon.pid != killed else -9 for daemon in fleet.started
    ]


def test_gateways_of_an_earlier_server_are_kept_when_they_fit_and_sent_away_when_not(fleet: Fleet) -> None:
    kept = fleet.start(0)
    old = fleet.start(1, version="0.0.1")
    elsewhere = fleet.start(1, listen="127.0.0.1:2")
    eventually(lambda: len(fleet.control.gateways()) == 3, "the survivors")
    workers = fleet.workers(2)
    assert sorted(info.pid for info in workers.adopt(5.0)) == sorted([kept.pid, old.pid])
    workers.start()
    eventually(lambda: old.poll() == 0 and elsewhere.poll() == 0, "the others to go")
    eventually(lambda: sorted(fleet.pids()) == [0, 1], "gateway 1")
    assert fleet.pids()[0] == kept.pid
    assert len(fleet.started) == 4
    workers.stop(10.0)
    assert kept.wait(5) == 0


def test_a_gateway_that_does_not_go_is_ended(tmp_path: Path, fleet: Fleet) -> None:
    def stubborn(index: int) -> Daemon:
        daemon = start_daemon([sys.executable, "-c", "import time; time.sleep(60)"], env=own_env(), log_path=None)
        fleet.started.append(daemon)
        return daemon

    workers = Workers(
        fleet.control, RealClock(), stubborn, count=1, listen="x", on_serving=fleet.serving.append, wake=fleet.wake
    )
    workers.start()
    eventually(lambda: fleet.started, "the process")
    workers.stop(0.1)
    assert fleet.started[0].poll() == -15
    assert fleet.serving == []


def test_an_address_somebody_has_is_an_error_with_its_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse) as caught:
            check_free("127.0.0.1", port)
        assert f"127.0.0.1:{port}" in caught.value.message
        assert "http.listen" in caught.value.hint
    check_free("127.0.0.1", 0)


def test_we_start_ourselves_as_a_package_or_as_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    monkeypatch.setattr(sys, "argv", ["-c"])
    assert own_argv() == [sys.executable, "-m", "llmgw"]
    one = tmp_path / "llmgw.pyz"
    with zipfile.ZipFile(one, "w") as made:
        made.writestr("__main__.py", "")
    monkeypatch.setattr(sys, "argv", [str(one), "server"])
    assert own_argv() == [sys.executable, str(one)]
