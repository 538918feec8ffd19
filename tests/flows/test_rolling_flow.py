"""A changed profile, a drained node and a smaller count cost no token of a stream that has begun."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from flows_cluster import Cluster, wait

pytestmark = pytest.mark.flow

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 60


class Clients:
    """Clients that stream one answer after the other; every answer must be whole."""

    def __init__(self, cluster: Cluster, model: str, count: int) -> None:
        self.whole, self.broken = 0, []  # type: ignore[var-annotated]
        self._cluster, self._model = cluster, model
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                with self._cluster.stream(self._model, TOKENS) as tokens:
                    got = list(tokens)
                assert got[-1] == "[DONE]"
                assert len(got) == TOKENS + 1
                self.whole += 1
            except Exception as error:
                self.broken.append(f"{type(error).__name__}: {error}"[:500])
                self._end.wait(0.1)

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(30)


def test_rolling_draining_and_scaling_break_no_stream(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    plugin = cluster.root / "plugin" / "llmgw_fake-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: llmgw-fake\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[llmgw.providers]\nfake = llmgw.testing.fake_provider:FakeProvider\n")
    cluster.env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(plugin.parent), os.environ.get("PYTHONPATH"))))
    models = cluster.root / "models"
    models.mkdir()
    shutil.copy(ROOT / "src/llmgw/install/tiny.gguf", models / "m.gguf")
    cluster.start_server(scheduling={"lost_after": 60})
    for name in ("node-1", "node-2"):
        cluster.start_agent(name, engines={"fake": {}}, model_dirs=[str(models)])
    profile = {"model": "m.gguf", "engine": "fake", "memory": "16MB", "args": ["--token-interval", "0.02"]}
    cluster.api("PUT", "/profiles/m", profile)
    cluster.await_model("m")

    def where() -> list[tuple[str, str, int]]:
        rows = [row for row in cluster.replicas("m") if row["state"] != "stopped"]
        return [(row["node_id"], row["state"], row["epoch"]) for row in rows]

    def settled(node: str | None = None) -> bool:
        rows = where()
        ready = len(rows) == 1 and rows[0][1] == "ready" and rows[0][2] > before
        return ready and (node is None or rows[0][0] == node)

    clients = Clients(cluster, "m", 3)
    try:
        wait(lambda: clients.whole > 0, 20, "a first answer", cluster.logs)
        before = where()[0][2]
        cluster.api("PUT", "/profiles/m", {**profile, "context": 8192})
        wait(lambda: settled(), 40, "the changed profile to have rolled", lambda: f"{where()}\n{cluster.logs()}")
        home, _, before = where()[0]
        other = "node-2" if home == "node-1" else "node-1"
        said = cluster.ctl("drain", home, "--wait").stdout.splitlines()[-1]
        assert said.startswith(f"{home}: drained: nothing of llmgw serves here"), said
        assert settled(other), where()
        cluster.ctl("undrain", home)
        cluster.ctl("scale", "m", "2")
        wait(lambda: [row[1] for row in where()] == ["ready"] * 2, 30, "two replicas", lambda: f"{where()}")
        cluster.ctl("scale", "m", "1")
        wait(lambda: [row[1] for row in where()] == ["ready"], 30, "one replica", lambda: f"{where()}")
        count = clients.whole
        wait(lambda: clients.whole > count + 1, 20, "answers after all that", cluster.logs)
    finally:
        clients.stop()
    assert clients.broken == []
    shown = cluster.ctl("events", "-n", "200").stdout
    for words in ("is being drained", "is drained", "another replica serves in its place", "takes replicas again"):
        assert words in shown, shown
