"""A cluster for chaos: the flows' cluster, with fake engines that come as a plugin, and a look at processes."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "flows")]

from flows_cluster import MODULE, Cluster, sweep  # noqa: E402

from llmgw.agent import handles, procs  # noqa: E402

_ENTRY_POINTS = "[llmgw.providers]\nfake = llmgw.testing.fake_provider:FakeProvider\n"
_METADATA = "Metadata-Version: 2.1\nName: llmgw-fake\nVersion: 1\n"


class ChaosCluster(Cluster):
    """Server and agents over mutual TLS; `engine: fake` is a plugin beside them, as a stranger's would be."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(root, MODULE)
        plugin = root / "plugin" / "llmgw_fake-1.dist-info"
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text(_METADATA)
        (plugin / "entry_points.txt").write_text(_ENTRY_POINTS)
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(plugin.parent), os.environ.get("PYTHONPATH"))))
        self.models = root / "models"
        self.models.mkdir()
        shutil.copy(ROOT / "src/llmgw/install/tiny.gguf", self.models / "m.gguf")

    def agent_config(self, **extra: Any) -> dict[str, Any]:
        """What every agent of a chaos run has."""
        return {"engines": {"fake": {}}, "model_dirs": [str(self.models)], **extra}

    def begin(self, nodes: int, lost_after_beats: int = 120, **extra: Any) -> list[str]:
        """Start the server and `nodes` agents, and wait until each has its engine."""
        self.start_server(scheduling={"lost_after": lost_after_beats})
        names = [f"node-{number}" for number in range(nodes)]
        for name in names:
            self.start_agent(name, **self.agent_config(**extra))
        self.until(lambda: self._usable() == nodes, 60 + 6 * nodes, "every agent to have its engine")
        return names

    def _usable(self) -> int:
        nodes = self.api("GET", "/nodes")["nodes"]
        return sum(any(e["name"] == "fake" and e["usable"] for e in node.get("engines") or ()) for node in nodes)

    def serve(self, name: str, replicas: int = 1, *args: str, slots: int = 8, **extra: Any) -> None:
        """Apply a profile of fake engines with these flags."""
        body = {
            "model": extra.pop("model", "m.gguf"),
            "engine": "fake",
            "replicas": replicas,
            "slots": slots,
            "context": 512,
            "memory": "16MB",
            "args": list(args),
            **extra,
        }
        self.api("PUT", f"/profiles/{name}", body)

    def await_ready(self, name: str, replicas: int, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """Wait until all replicas of a profile are ready; returns them."""
        self.until(
            lambda: [r["state"] for r in self.replicas(name)].count("ready") == replicas,
            timeout_s,
            f"{replicas} replicas of {name}",
        )
        return self.replicas(name)

    def until(self, condition: Callable[[], Any], timeout_s: float, what: str, step_s: float = 0.05) -> float:
        """Wait; returns how long it took in seconds.

        Raises:
            TimeoutError: with the logs' ends.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}\n{self.logs()}")
            time.sleep(step_s)
        return time.monotonic() - began

    def replica_dirs(self, node: str) -> list[Path]:
        """The replicas' directories of one agent."""
        where = self.root / node / "work" / "replicas"
        return sorted(each for each in where.iterdir() if each.is_dir()) if where.exists() else []

    def stream_tokens(self, model: str, tokens: int) -> Stream:
        """Ask for a stream through the gateway; read it with `read`."""
        return Stream(self.http_port, model, tokens)


class Stream:
    """One streamed answer through the gateway, every event kept."""

    def __init__(self, port: int, model: str, tokens: int) -> None:
        self.wanted = tokens
        self.tokens: list[str] = []
        self.error: dict[str, Any] | None = None
        self.done = False
        self.broken = ""
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": model, "max_tokens": tokens, "stream": True, "messages": [{"role": "user", "content": "x"}]}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._answer = self._connection.getresponse()
        if self._answer.status != 200:
            self.broken = f"status {self._answer.status}: {self._answer.read()[:300]!r}"

    def read(self, enough: int | None = None) -> Stream:
        """Read to the end, or until `enough` tokens have come."""
        if self.broken:
            self.close()
            return self
        try:
            for line in self._answer:
                self._take(line)
                if self.done or (enough is not None and len(self.tokens) >= enough):
                    break
        except (OSError, http.client.HTTPException) as error:
            self.broken = f"{type(error).__name__}: {error}"
        if enough is None or self.done or self.broken:
            self.close()
        return self

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        data = line[6:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        for choice in event["choices"]:
            content = choice["delta"].get("content")
            if content:
                self.tokens.append(content)

    @property
    def in_order(self) -> bool:
        """No token is missing, none came twice."""
        return self.tokens == [f"t{number} " for number in range(len(self.tokens))]

    @property
    def whole(self) -> bool:
        return self.done and not self.error and not self.broken and self.in_order and len(self.tokens) == self.wanted

    def close(self) -> None:
        self._connection.close()


class Traffic:
    """Clients that stream without pause until told to stop."""

    def __init__(self, cluster: ChaosCluster, model: str, clients: int, tokens: int) -> None:
        self.whole = 0
        self.bad: list[str] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(cluster, model, tokens), daemon=True) for _ in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, cluster: ChaosCluster, model: str, tokens: int) -> None:
        while not self._end.is_set():
            try:
                stream = cluster.stream_tokens(model, tokens).read()
            except OSError as error:
                with self._lock:
                    self.bad.append(f"no answer: {error}")
                time.sleep(0.2)
                continue
            with self._lock:
                if stream.whole:
                    self.whole += 1
                else:
                    self.bad.append(f"{len(stream.tokens)} tokens, {stream.error or stream.broken or 'cut'}")

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(60)


@contextlib.contextmanager
def cluster(where: Path | None = None) -> Iterator[ChaosCluster]:
    """A cluster that leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="llmgw-chaos-", dir=where, ignore_cleanup_errors=True) as name:
        made = ChaosCluster(Path(name) / "c")
        try:
            yield made
        finally:
            for process in made.processes.values():
                process.kill()
                process.wait(10)
            sweep(made.root)
            sweep(made.root)


def engine_identity(pid: int) -> tuple[int, int] | None:
    """A living process as (pid, start time); None when it is gone."""
    stat = procs.read_stat(pid)
    return None if stat is None or stat.ended else (pid, stat.start_ticks)


def numbered_gaps(where: Path, word: str = "flood") -> tuple[int, int]:
    """Numbered lines in a replica's log: how many, and how many are missing or out of order."""
    numbers: list[int] = []
    for name in ("engine.log.rotated", "engine.log"):
        with contextlib.suppress(OSError):
            for line in (where / name).read_text(errors="replace").splitlines():
                head, _, tail = line.partition(" ")
                if head == word and tail.isdigit():
                    numbers.append(int(tail))
    if not numbers:
        return 0, 0
    gaps = sum(after != before + 1 for before, after in itertools.pairwise(numbers))
    return len(numbers), gaps


def marked(root: Path) -> dict[int, str]:
    """Living processes of engines below `root`: pid -> marker."""
    found = {}
    for pid in procs.all_pids():
        environ = procs.read_environ(pid) or {}
        if str(root) in environ.get(procs.HANDLE, "") and procs.MARKER in environ and engine_identity(pid):
            found[pid] = environ[procs.MARKER]
    return found


def handle_of(where: Path) -> handles.Handle | None:
    """The handle in a replica's directory."""
    return handles.load(where)
