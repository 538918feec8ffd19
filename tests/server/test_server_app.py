"""`llmgw server` as a process: it starts, says so, goes on without its control process, and ends cleanly."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from server_fakes import eventually

from free_ports import free_port


class Server:
    """One `llmgw server` and its files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, agents = free_port(), free_port()
        self.config = directory / "server.yaml"
        self.settings: dict[str, Any] = {
            "agents": {"listen": f"127.0.0.1:{agents}"},
            "http": {"listen": f"127.0.0.1:{self.port}"},
            "state": str(directory / "s" / "state.db"),
            "profiles_dir": str(directory / "profiles"),
        }
        (directory / "profiles").mkdir()
        self.log = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.gateways: set[int] = set()

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run to the end: for starts that must fail."""
        self.config.write_text(yaml.safe_dump(self.settings))
        argv = [sys.executable, "-m", "llmgw", "server", "-c", str(self.config), *options]
        return subprocess.run(argv, capture_output=True, text=True, timeout=30)

    def start(self) -> None:
        self.config.write_text(yaml.safe_dump(self.settings))
        argv = [sys.executable, "-m", "llmgw", "server", "-c", str(self.config)]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(argv, stderr=out, stdout=out)
        eventually(lambda: "serving http://" in self.log.read_text(), "the server to serve", 30)
        self.gateways |= {gateway["pid"] for gateway in self.api("GET", "/status")["gateways"]}

    def api(self, method: str, path: str, body: Any = None) -> Any:
        token = (self.directory / "s" / "admin.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, f"/api/v1{path}", json.dumps(body) if body else None, headers)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.process = None
        return code

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for pid in self.gateways:
            if _is_gateway(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def test_it_applies_profile_files_and_again_on_sighup_and_ends_with_its_gateways(server: Server) -> None:
    files = server.directory / "profiles"
    (files / "a.yaml").write_text("name: one\nmodel: /m.gguf\n")
    (files / "broken.yaml").write_text("name: [\n")
    server.start()
    names = [item["profile"]["name"] for item in server.api("GET", "/profiles")["profiles"]]
    assert names == ["one"]
    assert re.search(r"broken\.yaml` is not applied: ", server.log.read_text())
    (files / "b.yaml").write_text("name: two\nmodel: /m.gguf\n")
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(server.api("GET", "/profiles")["profiles"]) == 2, "the second profile")
    [gateway] = server.gateways
    assert server.end(signal.SIGTERM) == 0
    assert not _is_gateway(gateway)


def test_killed_it_leaves_its_gateway_and_the_next_one_keeps_it(server: Server) -> None:
    server.start()
    before = server.api("GET", "/status")
    [gateway] = server.gateways
    server.end(signal.SIGKILL)
    assert _is_gateway(gateway)
    assert server.api("GET", "/status")["error"]["code"] == "control-away"
    server.start()
    after = server.api("GET", "/status")
    assert [item["pid"] for item in after["gateways"]] == [gateway]
    assert (after["server_id"], after["epoch"]) == (before["server_id"], before["epoch"] + 1)
    second = server.run()
    assert second.returncode == 1
    assert "is held by llmgw server (pid " in second.stderr
    assert server.end(signal.SIGINT) == 0
    assert not _is_gateway(gateway)


def test_a_gateway_that_was_started_with_other_settings_is_replaced_though_it_outlived_its_server(
    server: Server,
) -> None:
    server.start()
    [before] = server.gateways
    server.end(signal.SIGKILL)
    server.settings["gateway"] = {"queue": 7}
    server.start()
    eventually(lambda: not _is_gateway(before), "the one with the old settings to go")
    [after] = eventually(lambda: server.api("GET", "/status")["gateways"], "the one with the new settings")
    assert after["pid"] != before
    server.gateways.add(after["pid"])
    assert b"--queue\x007\x00" in Path(f"/proc/{after['pid']}/cmdline").read_bytes()


def test_a_name_may_be_listened_on(server: Server) -> None:
    server.settings["http"]["listen"] = f"localhost:{server.port}"
    server.start()
    first = server.api("GET", "/status")["gateways"]
    assert server.api("GET", "/status")["gateways"][0]["pid"] == first[0]["pid"]


def test_a_taken_address_ends_it_with_words_and_without_a_gateway(server: Server) -> None:
    with socket.create_server(("127.0.0.1", server.port)):
        ended = server.run()
    assert ended.returncode == 1
    assert f"error: cannot listen on `127.0.0.1:{server.port}`" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_taken_agents_address_ends_it_with_words(server: Server) -> None:
    with socket.create_server(("127.0.0.1", int(server.settings["agents"]["listen"].split(":")[1]))):
        ended = server.run()
    assert ended.returncode == 1
    assert "error: cannot listen on" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_check_only_validates(server: Server) -> None:
    assert server.run("--check").returncode == 0
    assert not (server.directory / "s").exists()
    server.settings["gateway"] = {"workers": 0}
    wrong = server.run("--check")
    assert wrong.returncode == 2
    assert "gateway.workers" in wrong.stderr


def _is_gateway(pid: int) -> bool:
    try:
        return b"gateway" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
