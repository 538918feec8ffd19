"""What the supervise tests share: a bench that makes supervisors on one work directory, and looks at real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from llmgw.agent import procs
from llmgw.agent.devices import GpuFree
from llmgw.agent.supervisor import Supervisor, SupervisorSettings
from llmgw.agent.weights import Weights
from llmgw.domain.engines import InstalledEngine
from llmgw.domain.replicas import ReplicaSpec, ReplicaState, ReplicaStatus
from llmgw.domain.restarts import RestartPolicy
from llmgw.system.clock import RealClock
from llmgw.system.http import Http
from llmgw.testing.fake_provider import INSTALLED, FakeProvider

KEY = "canary-6c1f0e9d2b7a4835"
QUICK = RestartPolicy(first_s=0.1, longest_s=0.2, budget=3, quiet_s=60.0)


def no_fetch(source: str, progress: object, stop: threading.Event) -> Path:
    raise AssertionError(f"nothing should fetch {source}")


class Bench:
    """One agent's surroundings; `supervisor()` is an agent starting."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work_dir = root / "work"
        self.model = root / "model.gguf"
        self.model.write_text("not looked into by the fake engine")
        self.clock = RealClock()
        self.http = Http(use_proxies=False)
        self.supervisors: list[Supervisor] = []
        self.history: list[ReplicaStatus] = []

    def supervisor(
        self,
        *flags: str,
        provider: object = None,
        engine: Callable[[str, str], InstalledEngine | None] = lambda name, version: INSTALLED,
        engine_words: Callable[[str], str] = lambda name: f"`{name}` is not ready",
        fetch: object = no_fetch,
        work_dir: Path | None = None,
        start: bool = True,
        gpu_free: GpuFree = lambda: None,
        **settings: object,
    ) -> Supervisor:
        chosen = {"stop_timeout_s": 5.0, "health_interval_s": 0.1, "restarts": QUICK, **settings}
        made = Supervisor(
            SupervisorSettings(work_dir or self.work_dir, "127.0.0.1", **chosen),
            {"fake": provider or FakeProvider(flags)},
            engine,
            engine_words,
            Weights((str(self.root),), fetch, self.clock, chooser=random.Random(1)),
            self.http,
            self.clock,
            lambda: self.history.extend(made.statuses()),
            gpu_free=gpu_free,
        )
        if start:
            made.start()
        self.supervisors.append(made)
        return made

    def close(self) -> None:
        for each in self.supervisors:
            each.detach()
        for pid in self.engine_pids():
            os.kill(pid, signal.SIGKILL)
        self.http.close()
        # those that were children of this process
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break

    def engine_pids(self, replica_id: str = "") -> list[int]:
        """Living processes that carry the marker of an engine of this bench."""
        found = []
        for pid in procs.all_pids():
            environ = procs.read_environ(pid) or {}
            stat = procs.read_stat(pid)
            if stat is None or stat.ended or str(self.root) not in environ.get(procs.HANDLE, ""):
                continue
            if environ.get(procs.MARKER, "").startswith(replica_id):
                found.append(pid)
        return found


def spec(bench: Bench, replica_id: str = "m#0", **changes: object) -> ReplicaSpec:
    base = ReplicaSpec(
        replica_id=replica_id,
        epoch=1,
        profile=replica_id.partition("#")[0],
        model_name=replica_id.partition("#")[0],
        model=str(bench.model),
        engine="fake",
        engine_version="1",
        context=1024,
        slots=2,
        api_key=KEY,
        digest="d1",
    )
    return evolve(base, **changes)


def status_of(supervisor: Supervisor, replica_id: str = "m#0") -> ReplicaStatus | None:
    return next((each for each in supervisor.statuses() if each.replica_id == replica_id), None)


def wait_for(
    supervisor: Supervisor,
    state: ReplicaState,
    replica_id: str = "m#0",
    timeout_s: float = 15.0,
    where: Callable[[ReplicaStatus], bool] = lambda status: True,
) -> ReplicaStatus:
    """The replica's status once it is in `state` (and `where` holds), or a failure that shows the last one."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = status_of(supervisor, replica_id)
        if seen is not None and seen.state is state and where(seen):
            return seen
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:g} s for `{replica_id}` to be {state.value}; last: {seen}")
        time.sleep(0.01)


def ask(port: int, path: str, body: object = None, key: str = KEY, timeout_s: float = 5.0) -> dict[str, object]:
    """One request to an engine as a gateway sends it."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)


def alive(pid: int) -> bool:
    stat = procs.read_stat(pid)
    return stat is not None and not stat.ended


def kill(pid: int) -> None:
    """SIGKILL, and wait until the process is gone."""
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)


def wait_gone(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)
