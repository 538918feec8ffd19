"""No space left where an agent keeps its state, and where it keeps weights: nothing torn, and no restart needed after.

Small tmpfs mounts in a mount namespace of its own; a file fills them to the last byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from chaos_lib.cluster import ChaosCluster, cluster, engine_identity
from chaos_lib.figures import Result
from chaos_lib.inside import run_inside
from llmgw.agent import handles
from llmgw.errors import LlmgwError


def run(quick: bool) -> Result:
    """20 times full and free again (quick: 2)."""
    return run_inside("disk-full", "chaos_lib.disk_full", quick, "--mount")


def inside(result: Result, quick: bool) -> None:
    rounds = 2 if quick else 20
    seen = {"torn": 0, "refused": 0, "recovered": 0, "engines": 0, "weights_refused": 0, "weights_recovered": 0}
    with cluster() as made, _weights_server(made.models / "m.gguf") as (url, digest):
        work, weights = made.root / "node-0" / "work", made.root / "node-0" / "weights"
        for where, size in ((work, "1m"), (weights, "2m")):
            where.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", where], check=True)
        try:
            made.begin(1)
            agent = made.processes["node-0"].pid
            made.serve("kept", 1)
            (kept,) = made.await_ready("kept", 1)
            identity = engine_identity(kept["pid"])
            for number in range(rounds):
                _full_work_dir(made, work, f"w{number}", seen)
                _full_weights(made, weights, f"f{number}", f"{url}/{number}/m.gguf#sha256={digest}", seen)
                seen["engines"] += engine_identity(kept["pid"]) != identity
            result.tell(rounds=rounds)
            result.must("torn_files", seen["torn"])
            result.must("work_dir_full_was_told", seen["refused"], rounds)
            result.must("work_dir_recovered_without_restart", seen["recovered"], rounds)
            result.must("weights_full_was_told", seen["weights_refused"], rounds)
            result.must("weights_recovered_without_restart", seen["weights_recovered"], rounds)
            result.must("engines_harmed", seen["engines"])
            result.must("the_agent_is_the_same_process", made.processes["node-0"].pid == agent and _runs(agent), True)
        finally:
            for process in made.processes.values():
                process.kill()
                process.wait()
            for where in (work, weights):
                subprocess.run(["umount", "-l", where], check=False)


def _full_work_dir(made: ChaosCluster, work: Path, name: str, seen: dict[str, int]) -> None:
    ballast = _fill(work)
    made.serve(name, 1)

    def told() -> bool:
        return any("No space left" in r["words"] for r in made.replicas(name))

    with contextlib.suppress(TimeoutError):
        made.until(told, 20, "words about the full disk")
        seen["refused"] += 1
    seen["torn"] += _torn(work)
    ballast.unlink()
    with contextlib.suppress(TimeoutError):
        made.until(lambda: [r["state"] for r in made.replicas(name)] == ["ready"], 60, "recovery")
        seen["recovered"] += 1
    seen["torn"] += _torn(work)
    _drop(made, name)


def _full_weights(made: ChaosCluster, weights: Path, name: str, model: str, seen: dict[str, int]) -> None:
    ballast = _fill(weights)
    made.serve(name, 1, model=model)

    def told() -> bool:
        words = [r["words"] for r in made.replicas(name)] + [_profile_words(made, name)]
        return any("space" in each for each in words)

    with contextlib.suppress(TimeoutError):
        made.until(told, 20, "words about the full disk")
        seen["weights_refused"] += 1
    whole = [each for each in weights.rglob("*.gguf") if each.stat().st_size != (made.models / "m.gguf").stat().st_size]
    seen["torn"] += len(whole)
    ballast.unlink()
    with contextlib.suppress(TimeoutError):
        made.until(lambda: [r["state"] for r in made.replicas(name)] == ["ready"], 60, "recovery")
        seen["weights_recovered"] += 1
    _drop(made, name)
    for each in weights.rglob("*"):
        if each.is_file():
            each.unlink()


def _profile_words(made: ChaosCluster, name: str) -> str:
    return json.dumps([p for p in made.api("GET", "/profiles")["profiles"] if p["profile"]["name"] == name])


def _drop(made: ChaosCluster, name: str) -> None:
    made.api("DELETE", f"/profiles/{name}")
    made.until(lambda: not any(r["pid"] for r in _held(made, name)), 30, f"the end of {name}")


def _held(made: ChaosCluster, name: str) -> list[dict[str, Any]]:
    return [r for r in made.node("node-0").get("replicas") or () if r["profile"] == name]


def _fill(where: Path) -> Path:
    """A file that takes all space there is."""
    ballast = where / "ballast"
    with ballast.open("wb", 0) as handle:
        with contextlib.suppress(OSError):
            while handle.write(b"\0" * 65536):
                pass
        with contextlib.suppress(OSError):
            while handle.write(b"\0"):
                pass
    return ballast


def _torn(work: Path) -> int:
    """State files that are neither whole nor absent."""
    bad = 0
    for path in work.rglob("handle.json"):
        try:
            handles.load(path.parent)
        except LlmgwError:
            bad += 1
    for path in work.rglob("status.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            bad += 1
    epoch = work / "epoch"
    bad += epoch.exists() and not epoch.read_text().strip().isdigit()
    bad += sum(not path.read_text().endswith("\n") for path in work.rglob("api-key"))
    return bad


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists() and os.path.realpath(f"/proc/{pid}/exe") != ""


@contextlib.contextmanager
def _weights_server(model: Path):
    """Serves one model under any path, with ranges left out; yields (url, sha256)."""
    data = model.read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._head()

        def do_GET(self) -> None:
            self._head()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

        def _head(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", hashlib.sha256(data).hexdigest()
    finally:
        server.shutdown()
        server.server_close()
