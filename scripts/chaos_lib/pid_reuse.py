"""The pids and ports of dead engines are given to strangers while no agent runs: none may be signalled or adopted.

In a pid namespace of its own the next pid can be chosen (`ns_last_pid`), so the reuse is real, not made up in a file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from chaos_lib.cluster import ChaosCluster, cluster, engine_identity, marked
from chaos_lib.figures import Result, times
from chaos_lib.inside import run_inside

_PROFILE = "m"
_REPLICAS = 5
_LISTENER = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server, open(sys.argv[3], "ab", 0) as log:
    log.write(b"listening\\n")
    while True:
        peer, _ = server.accept()
        peer.settimeout(1)
        try:
            log.write(b"told " + peer.recv(4096) + b"\\n")
        except OSError:
            pass
        peer.close()
"""


def run(quick: bool) -> Result:
    """50 pids given away, 5 a round (quick: 5); in each round one stranger listens on the port of the dead engine."""
    return run_inside("pid-reuse", "chaos_lib.pid_reuse", quick, "--pid", "--mount-proc")


def inside(result: Result, quick: bool) -> None:
    rounds = 1 if quick else 10
    seen: dict[str, int] = {"reused": 0, "signalled": 0, "adopted": 0, "asked": 0, "listeners": 0}
    back: list[float] = []
    with cluster() as made:
        made.begin(1)
        made.serve(_PROFILE, _REPLICAS)
        made.await_ready(_PROFILE, _REPLICAS)
        for _ in range(rounds):
            back.append(_round(made, seen))
    result.tell(rounds=rounds)
    result.must("pids_given_to_a_stranger", seen["reused"], rounds * _REPLICAS)
    result.must("strangers_signalled", seen["signalled"])
    result.must("strangers_taken_for_an_engine", seen["adopted"])
    result.must("strangers_on_a_recorded_port", seen["listeners"], rounds)
    result.must("strangers_on_a_recorded_port_that_were_asked_anything", seen["asked"])
    result.tell(engines_back_after_the_agents_start=times(back))


def _round(made: ChaosCluster, seen: dict[str, int]) -> float:
    before = made.await_ready(_PROFILE, _REPLICAS)
    made.kill("node-0")
    for replica in before:
        os.kill(replica["pid"], signal.SIGKILL)
    made.until(lambda: not any(Path(f"/proc/{r['pid']}").exists() for r in before), 10, "the engines' end", 0.01)
    heard = made.root / "heard"
    heard.unlink(missing_ok=True)
    strangers = []
    for number, replica in enumerate(before):
        argv = ["/bin/sleep", "600"]
        if number == 0:
            argv = [sys.executable, "-c", _LISTENER, replica["host"], str(replica["port"]), str(heard)]
        pid = replica["pid"]
        if _spawn_as(pid, argv):
            strangers.append((pid, engine_identity(pid)))
            seen["reused"] += 1
    made.until(heard.exists, 10, "the listener")
    seen["listeners"] += 1
    began = time.monotonic()
    made.start_agent("node-0", **made.agent_config())
    pids = {r["pid"] for r in before}

    def anew() -> bool:
        now = made.replicas(_PROFILE)
        fresh = [r for r in now if r["state"] == "ready" and r["pid"] not in (None, *pids)]
        return made.node("node-0").get("presence") == "connected" and len(fresh) == _REPLICAS

    made.until(anew, 60, "new engines")
    took = time.monotonic() - began
    now: list[dict[str, Any]] = made.replicas(_PROFILE)
    seen["adopted"] += sum(r["pid"] in pids or r["port"] == before[0]["port"] for r in now)
    seen["asked"] += heard.read_bytes().count(b"told ")
    for pid, identity in strangers:
        if identity is None or engine_identity(pid) != identity or _pending(pid) or pid in marked(made.root):
            seen["signalled"] += 1
    for pid, _ in strangers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return took


def _spawn_as(pid: int, argv: list[str]) -> bool:
    """Start a process with that pid. It blocks every signal, so one that is sent to it stays visible as pending."""
    for _ in range(200):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
            os.execv(argv[0], argv)
        if child == pid:
            return True
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return False


def _pending(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))
