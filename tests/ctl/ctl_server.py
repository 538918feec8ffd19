"""A real HTTP server that answers as the admin API does, with JSON made from domain values."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from llmgw.domain.engines import EngineSpec, EngineState, EngineStatus, Progress
from llmgw.domain.facts import (
    CpuFacts,
    DiskReading,
    FabricFacts,
    Finding,
    GpuFacts,
    GpuReading,
    MemoryFacts,
    NodeFacts,
    NodeWarning,
    NvidiaFacts,
    OsFacts,
    Readings,
    Truth,
    WeightsFile,
)
from llmgw.domain.placement import NodeRefusal, Refusal
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaState, ReplicaStatus
from llmgw.wire.shapes import to_full_json

TOKEN = "0123456789abcdef" * 4
NOW = 1_900_000_000.0

INSTALLING = "installing: downloading llama-b10991-bin-ubuntu-x64.tar.gz (16 MB, 43 %) — über einen „Spiegel“ …"
FAILED = "failed: libgomp.so.1 is missing and no package source of this node has libgomp1"
HOSTILE = "failed: \x1b[2J\x1b]0;owned\x07 said the peer\r\nand \u202eevil\u200b more  words"

FACTS = NodeFacts(
    hostname="gpu-a-01",
    boot_id="b0",
    os=OsFacts("debian", "12", "Debian GNU/Linux 12", "debian", "6.1.0", "2.36", "3.4.30"),
    cpu=CpuFacts("x86_64", 64, "AMD EPYC 9354", ("avx2", "avx512f"), 4, False),
    memory=MemoryFacts(512 * 10**9, None),
    nvidia=NvidiaFacts(Finding(Truth.YES, "driver 580.95.05 is loaded"), "580.95.05", "13.0"),
    gpus=(GpuFacts("GPU-1", 0, "H100", memory_total_bytes=80 * 10**9, compute_cap="9.0"),),
    fabrics=(FabricFacts("ib-a", ("mlx5_0",), 200.0, Finding(Truth.YES, "port 1 of mlx5_0 is active")),),
    labels={"rack": "r12"},
    mgmt_addr="10.0.0.11",
    model_dirs=("/models",),
    revision="7",
)
READINGS = Readings(
    NOW,
    300 * 10**9,
    1.5,
    (DiskReading("/var/lib", 10**12, 2 * 10**12),),
    (GpuReading("GPU-1", 70 * 10**9, 10 * 10**9, 12.0, 41.0),),
)
ENGINES_A = (
    EngineStatus("llama.cpp", "b10991", "cuda-13.3", EngineState.READY, "ready", NOW - 60, usable=True),
    EngineStatus("vllm", None, None, EngineState.FAILED, FAILED, NOW - 90, next_try=NOW + 30),
)
ENGINES_B = (EngineStatus("llama.cpp", "b10991", "cpu", EngineState.INSTALLING, INSTALLING, NOW - 5, Progress(7, 16)),)
ENGINES_EVIL = (EngineStatus("llama.cpp", "b1", None, EngineState.FAILED, HOSTILE, NOW - 5),)
REPLICAS = (
    ReplicaStatus(
        "qwen#0", 3, "qwen", ReplicaState.READY, "ready", NOW - 3600, "llama.cpp", "b10991",
        "10.0.0.11", 17000, 4242, 4, 8192,
    ),
    ReplicaStatus(
        "qwen#1", 3, "qwen", ReplicaState.FAILED, "failed: the model does not load", NOW - 5, exit_words="exited 1",
        last_log=("error loading model: bad magic",), next_try=NOW + 10, restarts=2,
    ),
)  # fmt: skip
REFUSAL = Refusal("big", "no node can run `big`", (
    NodeRefusal("gpu-a-01", "memory", "needs 90 GB of GPU memory, 70 GB are free"),
    NodeRefusal("node-b", "engine", INSTALLING),
))  # fmt: skip
PENDING = ReplicaStatus("big#0", 1, "big", ReplicaState.PENDING, REFUSAL.words, NOW - 9)


def node(node_id: str, presence: str = "connected", words: str = "connected", **given: Any) -> dict[str, Any]:
    """One node as the admin API gives it."""
    return to_full_json(  # type: ignore[no-any-return]
        {
            "node_id": node_id,
            "presence": presence,
            "words": words,
            "version": "0.1.0",
            "last_seen": NOW - 1,
            "draining": False,
            "facts": None,
            "readings": None,
            "engines": (),
            "replicas": (),
            "weights": (),
            "warnings": (),
            "probed_at": NOW - 9,
            **given,
        }
    )


NODES = [
    node(
        "gpu-a-01",
        facts=FACTS,
        readings=READINGS,
        engines=ENGINES_A,
        replicas=REPLICAS,
        weights=(WeightsFile("/models/q.gguf", 5 * 10**9, "gguf", Finding(Truth.NO, "being fetched")),),
        warnings=(NodeWarning("clock-skew", "its clock is 40 s ahead", NOW - 100),),
    ),
    node("node-b", engines=ENGINES_B),
    node("node-c", "lost", "lost: no report for 61 s (3 beats of 5 s)", engines=ENGINES_A[:1]),
    node("node-d", probed_at=None),
    node("node-e"),
]

ROUTES: dict[tuple[str, str], Any] = {
    ("GET", "/api/v1/status"): {
        "version": "0.1.0", "server_id": "s1", "started": NOW - 7200, "epoch": 3,
        "nodes": {"connected": 4, "lost": 1}, "models": {"qwen": "ready", "big": "refused"},
        "gateways": [
            {"pid": 77, "listen": "127.0.0.1:8080", "version": "0.1.0", "index": 0, "in_flight": {"qwen": 2},
             "requests": 9},
        ],
    },
    ("GET", "/api/v1/nodes"): {"nodes": NODES},
    ("GET", "/api/v1/nodes/gpu-a-01"): {"nodes": NODES[:1]},
    ("GET", "/api/v1/nodes/node-d"): NODES[3],
    ("GET", "/api/v1/engines"): to_full_json({
        "wanted": [EngineSpec("llama.cpp", "b10991"), EngineSpec("sglang", "0.5", {"gpu": "yes"})],
        "engines": [
            {"node_id": n["node_id"], "presence": n["presence"], **e} for n in NODES for e in n["engines"]
        ],
    }),
    ("GET", "/api/v1/profiles"): to_full_json({"profiles": [
        {"profile": Profile("qwen", "q.gguf", replicas=2, aliases=("q",)), "state": "ready",
         "words": "1 of 2 replicas is ready", "replicas_ready": 1, "replicas_wanted": 2, "refusal": None},
        {"profile": Profile("big", "b.gguf"), "state": "refused", "words": REFUSAL.words,
         "replicas_ready": 0, "replicas_wanted": 1, "refusal": REFUSAL, "note": "a change of it waits"},
    ]}),
    ("GET", "/api/v1/replicas"): {"replicas": [
        *({"node_id": "gpu-a-01", **to_full_json(r)} for r in REPLICAS),
        {"node_id": None, **to_full_json(PENDING)},
    ]},
    ("GET", "/api/v1/explain/big"): to_full_json({
        "profile": "big", "state": "refused", "words": REFUSAL.words, "lines": REFUSAL.lines(), "placements": [],
        "refusal": REFUSAL,
    }),
    ("GET", "/api/v1/explain/qwen"): {
        "profile": "qwen", "state": "ready", "words": "1 of 2 replicas is ready", "lines": [],
        "placements": [{"node_id": "gpu-a-01", "words": "holds the weights already"}], "refusal": None,
    },
    ("GET", "/api/v1/replicas/qwen%230/logs"): {"lines": ["loading", "evil \x1b[31m red", "done"]},
    ("GET", "/api/v1/keys"): {"keys": [{"name": "alice", "models": ["qwen"]}, {"name": "bob", "models": []}]},
    ("POST", "/api/v1/keys"): {"name": "alice", "key": "lgw-secret"},
    ("DELETE", "/api/v1/keys/alice"): {"deleted": "alice"},
    ("DELETE", "/api/v1/profiles/qwen"): {"deleted": "qwen"},
}  # fmt: skip


class AdminServer:
    """The server, what it answers, and what it was asked."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], Any] = dict(ROUTES)
        self.asked: list[tuple[str, str, Any]] = []
        self.url = ""

    def answer(self, method: str, target: str, token: str | None, body: Any) -> tuple[int, Any]:
        self.asked.append((method, target, body))
        if token != f"Bearer {TOKEN}":
            return 401, {
                "error": {"code": "unauthorized", "message": "this needs the admin token", "cause": "", "hint": ""}
            }
        found = self.routes.get((method, urlsplit(target).path))
        if found is None:
            message = f"there is no `{target}`"
            return 404, {"error": {"code": "not-found", "message": message, "cause": "", "hint": "look at the list"}}
        if callable(found):
            return found(target, body)  # type: ignore[no-any-return]
        return 200, found


@contextmanager
def serving(handle: Callable[[str, str, str | None, Any], tuple[int, Any]]) -> Iterator[str]:
    """Serve until the end of the block; yields the base URL. `handle` returns bytes, or a value for JSON."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _all(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, data = handle(self.command, self.path, self.headers.get("Authorization"), body)
            out = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(out)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(out)

        do_GET = do_PUT = do_POST = do_DELETE = _all

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
