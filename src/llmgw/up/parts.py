"""The two processes of `llmgw up`: their files, their start, their end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import time
from pathlib import Path

import yaml

from llmgw.errors import LlmgwError
from llmgw.system.commands import Daemon, start_daemon
from llmgw.system.files import make_dir, read_text, write_atomic
from llmgw.system.selfexec import own_argv, own_env
from llmgw.up.choice import ENGINE, Choice


class Parts:
    """Server and agent of one state directory. `stop()` ends both and the engines."""

    def __init__(self, state: Path, listen: str) -> None:
        self.state = state
        self.listen = listen
        self.url = f"http://{listen}"
        self.token_file = state / "server" / "admin.token"
        self._running: dict[str, Daemon] = {}

    def ctl_options(self) -> str:
        """What `llmgw ctl` has to be told where it does not find this one by itself."""
        return f"--server {self.url} --token-file {shlex.quote(str(self.token_file))}"

    def configure(self, choice: Choice) -> None:
        """Write both configuration files and the context for `llmgw ctl`."""
        for name in ("server", "agent", "engines", "weights"):
            make_dir(self.state / name, 0o700)
        agents = f"127.0.0.1:{_free_port()}"
        server = {
            "agents": {"listen": agents},
            "http": {"listen": self.listen, "admin_token_file": str(self.token_file)},
            "state": str(self.state / "server" / "state.db"),
            "engines": {ENGINE: {"version": choice.version}},
            "sources": [choice.source],
        }
        agent = {
            "server": f"http://{agents}",
            "node_id": "this-machine",
            "mgmt_addr": "127.0.0.1",
            "heartbeat_interval": "1s",
            "reconnect_base": "200ms",
            "reconnect_max": "2s",
            "engines_dir": str(self.state / "engines"),
            "weights_dir": str(self.state / "weights"),
            "supervisor": {"work_dir": str(self.state / "agent"), "stop_timeout": "15s"},
        }
        context = {"server": self.url, "token_file": str(self.token_file)}
        ctl = {"current-context": "up", "contexts": {"up": context}}
        for name, content in (("server.yaml", server), ("agent.yaml", agent), ("ctl.yaml", ctl)):
            write_atomic(self.state / name, yaml.safe_dump(content, sort_keys=False).encode(), 0o600)

    def start(self, part: str, *options: str) -> None:
        """Start `server` or `agent`; its log goes to `PART.log` in the state directory."""
        log = self.state / f"{part}.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        argv = [*own_argv(), part, "-c", str(self.state / f"{part}.yaml"), *options]
        self._running[part] = start_daemon(argv, env=own_env(), log_path=str(log))
        pids = {name: daemon.pid for name, daemon in self._running.items()}
        write_atomic(self.state / "pids.json", json.dumps(pids).encode(), 0o600)

    def check(self) -> None:
        """Make sure that both parts still run.

        Raises:
            LlmgwError: one has ended; carries its last line.
        """
        for part, daemon in self._running.items():
            if daemon.poll() is not None:
                raise self.its_error(part)

    def its_error(self, part: str) -> LlmgwError:
        """The error with which a part ended, as it wrote it, else its last line."""
        lines = [line for line in (read_text(self.state / f"{part}.log") or "").splitlines() if line.strip()]
        said = {}
        for line in lines:
            kind, _, words = line.partition(": ")
            if kind == "error":
                said = {"error": words}
            elif kind in ("cause", "hint") and said:
                said[kind] = words
            elif said and "cause" not in said and line.startswith(f"{self.state}/"):
                said["cause"] = line  # a problem of a file, by its place
        if not said:
            cause = lines[-1] if lines else "it wrote nothing"
            return LlmgwError(f"`llmgw {part}` has ended", cause=cause, hint=f"see `{self.state / f'{part}.log'}`")
        return LlmgwError(said["error"], cause=said.get("cause", ""), hint=said.get("hint", ""))

    def stop(self) -> None:
        """End the agent with its engines first, then the server with its gateways; SIGKILL for what outstays."""
        for part, patience_s in (("agent", 30.0), ("server", 15.0)):
            daemon = self._running.pop(part, None)
            if daemon is None:
                continue
            daemon.terminate()
            if daemon.wait(patience_s) is None:
                daemon.kill()
                daemon.wait(5.0)
        (self.state / "pids.json").unlink(missing_ok=True)

    def sweep(self) -> None:
        """End parts that an `llmgw up` which was killed has left behind. Only processes that name this directory."""
        try:
            pids = json.loads(read_text(self.state / "pids.json") or "{}")
        except ValueError:
            pids = {}
        for part in ("agent", "server"):
            pid = pids.get(part)
            if isinstance(pid, int) and self._is_ours(pid):
                os.kill(pid, signal.SIGTERM)
                deadline = time.monotonic() + 20
                while self._is_ours(pid) and time.monotonic() < deadline:
                    time.sleep(0.05)

    def _is_ours(self, pid: int) -> bool:
        command = read_text(Path(f"/proc/{pid}/cmdline")) or ""
        return f"{self.state}/" in command and "-c" in command.split("\0")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
