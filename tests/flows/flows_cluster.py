"""A whole llmgw on loopback for the flows: real processes, mutual TLS, a release server that behaves like GitHub."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from free_ports import free_port
from llmgw.pki import authority as pki


class Cluster:
    """One server and any number of agents, each a process. `command` is how llmgw is run (module or executable)."""

    def __init__(self, root: Path, command: list[str], *, tls: bool = True) -> None:
        self.root, self.command, self.tls = root, command, tls
        self.agents_port, self.http_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.token_file = root / "server" / "admin.token"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        self.env |= {"HOME": str(root), "SHIV_ROOT": str(root.parent / "shiv"), "XDG_STATE_HOME": str(root / "xdg")}
        self.pki = root / "pki"
        (root / "server").mkdir(parents=True)
        if tls:
            pki.init_ca(self.pki, now=time.time())
            pki.issue_server(self.pki, "server", ["127.0.0.1", "localhost"], now=time.time())

    def _tls(self, name: str) -> dict[str, str]:
        return {
            "ca": str(self.pki / "ca.pem"),
            "cert": str(self.pki / f"{name}.pem"),
            "key": str(self.pki / f"{name}-key.pem"),
        }

    def configure_server(self, **extra: Any) -> Path:
        config: dict[str, Any] = {
            "agents": {"listen": f"127.0.0.1:{self.agents_port}"},
            "http": {"listen": f"127.0.0.1:{self.http_port}", "admin_token_file": str(self.token_file)},
            "state": str(self.root / "server" / "state.db"),
            "scheduling": {"lost_after": 8},
            **extra,
        }
        if self.tls:
            config["agents"]["tls"] = self._tls("server")
        path = self.root / "server.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def configure_agent(self, node: str, **extra: Any) -> Path:
        home = self.root / node
        home.mkdir(exist_ok=True)
        config: dict[str, Any] = {
            "server": f"{'https' if self.tls else 'http'}://127.0.0.1:{self.agents_port}",
            "node_id": node,
            "mgmt_addr": "127.0.0.1",
            "heartbeat_interval": "500ms",
            "reconnect_base": "100ms",
            "reconnect_max": "500ms",
            "engines_dir": str(home / "engines"),
            "weights_dir": str(home / "weights"),
            "supervisor": {"work_dir": str(home / "work"), "stop_timeout": "5s", "health_interval": "500ms"},
            **extra,
        }
        if self.tls:
            if not (self.pki / f"{node}.pem").exists():
                pki.issue_node(self.pki, node, now=time.time())
            config["tls"] = self._tls(node)
        path = home / "agent.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def start(self, name: str, *argv: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.command, *argv], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env | (env or {})
            )
        self.processes[name] = process
        return process

    def start_server(self, **extra: Any) -> subprocess.Popen[bytes]:
        process = self.start("server", "server", "-c", str(self.configure_server(**extra)))
        wait(lambda: self.api("GET", "/status", quiet=True), 60, "the server to answer", self.log("server"))
        return process

    def start_agent(
        self, node: str = "node-1", env: dict[str, str] | None = None, **extra: Any
    ) -> subprocess.Popen[bytes]:
        return self.start(node, "agent", "-c", str(self.configure_agent(node, **extra)), env=env)

    def log(self, name: str) -> Callable[[], str]:
        path = self.root / f"{name}.log"
        return lambda: path.read_text(errors="replace")[-3000:] if path.exists() else "no log"

    def logs(self) -> str:
        return "\n".join(
            f"--- {p.name}\n{p.read_text(errors='replace')[-2500:]}" for p in sorted(self.root.glob("*.log"))
        )

    def request(
        self, method: str, path: str, body: Any = None, *, token: bool = False, timeout_s: float = 60
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {self.token_file.read_text().strip()}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def api(self, method: str, path: str, body: Any = None, *, quiet: bool = False) -> Any:
        try:
            status, data = self.request(method, f"/api/v1{path}", body, token=True)
        except (OSError, http.client.HTTPException):
            if quiet:
                return None
            raise
        if status >= 400 and quiet:
            return None
        assert status < 400, data
        return json.loads(data)

    def ctl(self, *argv: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        where = ["--server", self.url, "--token-file", str(self.token_file)]
        done = subprocess.run(
            [*self.command, "ctl", *where, *argv],
            capture_output=True,
            text=True,
            env=self.env | {"COLUMNS": "900"},
            timeout=60,
        )
        if code is not None:
            assert done.returncode == code, done.stderr + done.stdout
        return done

    def node(self, name: str = "node-1") -> dict[str, Any]:
        return next((n for n in self.api("GET", "/nodes")["nodes"] if n["node_id"] == name), {})

    def engine(self, name: str = "node-1") -> dict[str, Any]:
        return next((e for e in self.node(name).get("engines", ()) if e["name"] == "llama.cpp"), {})

    def await_engine(self, state: str, node: str = "node-1", timeout_s: float = 60) -> dict[str, Any]:
        wait(
            lambda: self.engine(node).get("state") == state,
            timeout_s,
            f"engine {state}",
            lambda: f"{self.engine(node)}\n{self.logs()}",
        )
        return self.engine(node)

    def replicas(self, profile: str) -> list[dict[str, Any]]:
        return [r for r in self.api("GET", "/replicas")["replicas"] if r["profile"] == profile]

    def await_model(self, name: str, timeout_s: float = 60) -> None:
        def ready() -> bool:
            status, data = self.request("GET", "/v1/models")
            return status == 200 and any(m["id"] == name and m["state"] == "ready" for m in json.loads(data)["data"])

        wait(ready, timeout_s, f"{name} to be ready", lambda: f"{self.replicas(name)}\n{self.logs()}")

    def apply(self, **profile: Any) -> None:
        path = self.root / f"profile-{profile['name']}.yaml"
        path.write_text(yaml.safe_dump(profile))
        self.ctl("apply", "-f", str(path))

    def chat(self, model: str, **extra: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}], **extra}
        status, data = self.request("POST", "/v1/chat/completions", body)
        return status, json.loads(data)

    @contextlib.contextmanager
    def stream(self, model: str, max_tokens: int) -> Iterator[Iterator[str]]:
        """The contents of a streamed answer, one item a token; `[DONE]` is the last item of a whole one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=60)
        body = {
            "model": model,
            "max_tokens": max_tokens,
            "stream": True,
            "messages": [{"role": "user", "content": "hello"}],
        }
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield _events(answer)
        finally:
            connection.close()

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(30)

    def _engines_run(self) -> bool:
        nodes = self.api("GET", "/nodes")["nodes"]
        return any(r["pid"] for n in nodes if n["presence"] == "connected" for r in n["replicas"])

    def close(self) -> None:
        with contextlib.suppress(Exception):
            for profile in self.api("GET", "/profiles", quiet=True)["profiles"]:
                self.api("DELETE", f"/profiles/{quote(profile['profile']['name'], safe='')}", quiet=True)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and self._engines_run():
                time.sleep(0.1)
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
        sweep(self.root)


def sweep(root: Path) -> None:
    """End whatever still names this cluster's directory: engines and gateways outlive their parents by design."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if f"{root}/".encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def _events(answer: http.client.HTTPResponse) -> Iterator[str]:
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            yield "[DONE]"
            return
        event = json.loads(data)
        assert "error" not in event, event
        for choice in event["choices"]:
            content = choice["delta"].get("content")
            if content:
                yield content


def wait(
    condition: Callable[[], object], timeout_s: float, what: str, detail: Callable[[], object] = lambda: ""
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:g} s for {what}\n{detail()}")
        time.sleep(0.05)


MODULE = [sys.executable, "-m", "llmgw"]
