"""`kill -9` of agents while their engines stream and log: nothing of the engines may be lost."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from chaos_lib.cluster import ChaosCluster, Traffic, cluster, engine_identity, marked, numbered_gaps
from chaos_lib.figures import Result, times

_PROFILE = "m"
_BEATS = {"heartbeat_interval": "2s"}
_ADOPTED_WITHIN_S = 180.0


def run(quick: bool) -> Result:
    """200 kills over 10 agents x 2 engines (quick: 6 over 2 x 2); Ctrl-C ends it early, with the figures so far."""
    kills, agents, engines = (6, 2, 2) if quick else (200, 10, 2)
    result = Result("agent-kill")
    with cluster() as made:
        # beats of 2 s: on a busy machine ten agents that start again and again are late for faster ones
        names = made.begin(agents, **_BEATS)
        made.serve(_PROFILE, agents * engines, "--token-interval", "0.02", "--flood", "100", slots=4)
        before = made.await_ready(_PROFILE, agents * engines, 60 + 10 * agents)
        identities = {r["replica_id"]: engine_identity(r["pid"]) for r in before}
        spread = {name: sum(r["node_id"] == name for r in before) for name in names}
        traffic = Traffic(made, _PROFILE, min(10, agents * 2), 150)
        adopted: list[float] = []
        began = time.monotonic()
        stopped = threading.Event()
        # a person who has seen enough gets the figures of what was done
        before_us = signal.signal(signal.SIGINT, lambda *_: stopped.set())

        def once(number: int) -> None:
            name = names[number % agents]
            adopted.append(_kill_and_await(made, name, spread[name]))

        # two at a time, never the same agent twice at once
        with ThreadPoolExecutor(2) as pool:
            for first in range(0, kills, 2):
                if stopped.is_set():
                    break
                list(pool.map(once, range(first, min(first + 2, kills))))
        took = time.monotonic() - began
        signal.signal(signal.SIGINT, before_us)
        after = {r["replica_id"]: r for r in made.replicas(_PROFILE)}
        living = set(marked(made.root))
        traffic.stop()
        lost = [name for name, seen in identities.items() if seen is None or engine_identity(seen[0]) != seen]
        changed = [r["replica_id"] for r in before if after[r["replica_id"]]["pid"] != r["pid"]]
        counted = [numbered_gaps(where) for name in names for where in made.replica_dirs(name)]
        result.tell(kills=len(adopted), agents=agents, engines=len(identities), run_s=round(took, 1))
        result.must("engines_lost", len(lost))
        result.must("pids_changed", len(changed))
        result.must("engines_too_many", len(living) - len(identities))
        result.must("streams_broken", len(traffic.bad))
        result.tell(streams_whole=traffic.whole, tokens=traffic.whole * 150)
        result.must("gaps_in_numbered_log_lines", sum(gaps for _, gaps in counted))
        result.must("logs_read", sum(lines > 0 for lines, _ in counted), agents * engines)
        result.tell(numbered_log_lines=sum(lines for lines, _ in counted))
        result.tell(adoption=times(adopted))
        if traffic.bad:
            result.tell(first_broken=traffic.bad[0])
    return result


def _kill_and_await(made: ChaosCluster, name: str, engines: int) -> float:
    """Kill one agent, start the next, and wait until the server hears from it that its engines are ready."""
    made.kill(name)
    made.until(lambda: made.node(name).get("presence") != "connected", 60, f"the end of {name} to be seen", 0.02)
    began = time.monotonic()
    made.start_agent(name, **made.agent_config(**_BEATS))

    def adopted() -> bool:
        node = made.node(name)
        ready = [r for r in node.get("replicas") or () if r["state"] == "ready"]
        return node.get("presence") == "connected" and len(ready) == engines

    made.until(adopted, _ADOPTED_WITHIN_S, f"{name} to adopt its engines")
    return time.monotonic() - began
