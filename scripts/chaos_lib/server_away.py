"""The server killed, and the server stopped: engines and gateways must not notice, and nothing may move."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from chaos_lib.cluster import ChaosCluster, Traffic, cluster, engine_identity
from chaos_lib.figures import Result

_PROFILE = "m"
_LOST_AFTER_BEATS = 3


def run(quick: bool) -> Result:
    """Server killed for 60 s, SIGSTOP for 60 s (quick: 4 s and 5 s).

    Beats are ten times as fast as by default (0.5 s), and nodes are lost after three: 60 s are to this cluster what ten
    minutes are to one with the defaults.
    """
    agents = 2 if quick else 4
    away_s, stopped_s, after_s = (4.0, 5.0, 2.0) if quick else (60.0, 60.0, 25.0)
    result = Result("server-away")
    with cluster() as made:
        made.begin(agents, lost_after_beats=_LOST_AFTER_BEATS)
        made.serve(_PROFILE, agents * 2, "--token-interval", "0.02", slots=4)
        before = made.await_ready(_PROFILE, agents * 2)
        identities = [engine_identity(r["pid"]) for r in before]
        result.tell(agents=agents, engines=len(before), lost_after_s=_LOST_AFTER_BEATS * 0.5)

        traffic = Traffic(made, _PROFILE, 6, 60)
        made.kill("server")
        _look(away_s, identities, result, "engine_stops_while_the_server_was_away")
        whole, bad = traffic.whole, len(traffic.bad)
        result.tell(server_away_s=away_s, streams_whole_meanwhile=whole)
        result.must("streams_broken_while_the_server_was_away", bad)
        made.start_server(scheduling={"lost_after": _LOST_AFTER_BEATS})
        made.await_ready(_PROFILE, agents * 2)
        _look(after_s, identities, result, "engine_stops_after_the_server_came_back")
        result.must("replicas_moved_by_the_kill", _moved(before, made))

        server = made.processes["server"].pid
        bad, whole = len(traffic.bad), traffic.whole
        os.kill(server, signal.SIGSTOP)
        _look(stopped_s, identities, result, "engine_stops_while_the_server_was_stopped")
        os.kill(server, signal.SIGCONT)
        _look(after_s, identities, result, "engine_stops_after_the_server_went_on")
        made.await_ready(_PROFILE, agents * 2)
        traffic.stop()
        result.tell(server_stopped_s=stopped_s, streams_whole_while_stopped=traffic.whole - whole)
        result.must("streams_broken_by_the_stop", len(traffic.bad) - bad)
        result.must("replicas_moved_by_the_stop", _moved(before, made))
        if traffic.bad:
            result.tell(first_broken=traffic.bad[0])
    return result


def _look(seconds: float, identities: list[tuple[int, int] | None], result: Result, what: str) -> None:
    """Watch the engines' processes for a while."""
    until = time.monotonic() + seconds
    stopped: set[Any] = set()
    while time.monotonic() < until:
        stopped |= {seen for seen in identities if seen is None or engine_identity(seen[0]) != seen}
        time.sleep(0.1)
    result.must(what, len(stopped))


def _moved(before: list[dict[str, Any]], made: ChaosCluster) -> int:
    """Replicas that are elsewhere, under another epoch, or another process than before."""
    now = {r["replica_id"]: r for r in made.replicas(_PROFILE)}
    marks = ("node_id", "epoch", "pid", "port")
    return sum(any(now.get(r["replica_id"], {}).get(mark) != r[mark] for mark in marks) for r in before)
