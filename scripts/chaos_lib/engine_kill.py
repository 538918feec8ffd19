"""`kill -9` of engines in the middle of answers: what the client sees, who is swept, how soon the next one serves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from chaos_lib.cluster import ChaosCluster, cluster, engine_identity, marked
from chaos_lib.figures import Result, times

_TOKENS = 4000
_LONGEST = 60


class _Seen:
    """What the kills showed."""

    def __init__(self) -> None:
        self.out_of_order = self.without_error = self.with_done = self.tokens_lost = self.tokens = 0
        self.at: list[int] = []
        self.restarts: list[float] = []
        self.first_restarts: list[float] = []
        self.unswept = self.sent = self.grandchildren = 0


def run(quick: bool) -> Result:
    """100 kills at random tokens over 25 replicas on 5 agents (quick: 4 over 2 on 1).

    Each engine has a child in a session of its own, and only the engine's own process is killed.
    """
    kills, replicas, agents = (4, 2, 1) if quick else (100, 25, 5)
    result, seen, dice = Result("engine-kill"), _Seen(), random.Random(4)
    with cluster() as made:
        made.begin(agents)
        names = [f"m{number}" for number in range(replicas)]
        flags = ("--token-interval", "0.01", "--log-tokens", "--grandchild")
        for name in names:
            made.serve(name, 1, *flags)
        for name in names:
            made.await_ready(name, 1)
        waiting: dict[str, tuple[int, float, int]] = {}
        for number in range(kills):
            name = names[number % replicas]
            # the others' restarts go on meanwhile; a replica is killed again only when it serves again
            if name in waiting:
                _restarted(made, name, waiting, seen)
            _kill(made, name, dice, waiting, seen)
            for other in list(waiting):
                if _is_back(made, other, waiting):
                    _restarted(made, other, waiting, seen)
        for name in list(waiting):
            _restarted(made, name, waiting, seen)
        left = [pid for pid, marker in marked(made.root).items() if not any(marker.startswith(f"{n}#") for n in names)]
        result.tell(kills=kills, replicas=replicas, agents=agents)
        result.tell(killed_at_token={"first": min(seen.at), "last": max(seen.at)}, tokens_seen=seen.tokens)
        result.tell(tokens_the_engines_logged_as_sent=seen.sent, grandchildren=seen.grandchildren)
        result.must("streams_with_a_missing_or_doubled_token", seen.out_of_order)
        result.must("tokens_sent_by_the_engine_and_not_seen_by_the_client", seen.tokens_lost)
        result.must("streams_without_an_error_event", seen.without_error)
        result.must("streams_that_claim_to_be_whole", seen.with_done)
        result.must("grandchildren_not_swept", seen.unswept + len(left))
        result.must("restarted", len(seen.restarts), kills)
        result.tell(restart_after_the_first_kill=times(seen.first_restarts), restart_of_all=times(seen.restarts))
    return result


def _kill(
    made: ChaosCluster,
    name: str,
    dice: random.Random,
    waiting: dict[str, tuple[int, float, int]],
    seen: _Seen,
) -> None:
    (replica,) = made.replicas(name)
    pid, marker = replica["pid"], marked(made.root)[replica["pid"]]
    others = [other for other, mark in marked(made.root).items() if mark == marker and other != pid]
    stream = made.stream_tokens(name, _TOKENS)
    stream.read(1 + dice.randrange(_LONGEST))
    seen.at.append(len(stream.tokens))
    (where,) = [w for n in _nodes(made) for w in made.replica_dirs(n) if w.name.startswith(f"{name}%")]
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    stream.read()
    sent = _sent(where, pid)
    seen.tokens += len(stream.tokens)
    seen.sent += sent
    seen.grandchildren += len(others)
    seen.tokens_lost += max(0, sent - len(stream.tokens))
    seen.out_of_order += not stream.in_order
    seen.without_error += stream.error is None
    seen.with_done += stream.done and stream.error is None
    waiting[name] = (pid, killed_at, others[0] if others else 0)


def _nodes(made: ChaosCluster) -> list[str]:
    return [name for name in made.processes if name != "server"]


def _sent(where: Path, pid: int) -> int:
    """How many tokens the killed engine had handed to the kernel, by its log."""
    for name in ("engine.log.1", "engine.log"):
        with contextlib.suppress(OSError):
            lines = (where / name).read_text().splitlines()
            if lines and lines[0] == f"fake engine {pid} for `{where.name.split('%')[0]}`":
                return sum(line.startswith("sent t") for line in lines)
    return 0


def _is_back(made: ChaosCluster, name: str, waiting: dict[str, tuple[int, float, int]]) -> bool:
    replicas = made.replicas(name)
    return bool(replicas) and replicas[0]["state"] == "ready" and replicas[0]["pid"] not in (None, waiting[name][0])


def _restarted(made: ChaosCluster, name: str, waiting: dict[str, tuple[int, float, int]], seen: _Seen) -> None:
    made.until(lambda: _is_back(made, name, waiting), 120, f"{name} to serve again", 0.02)
    _, killed_at, grandchild = waiting.pop(name)
    (replica,) = made.replicas(name)
    took = max(0.0, replica["since"] - (time.time() - (time.monotonic() - killed_at)))
    seen.restarts.append(took)
    if replica["restarts"] == 1:
        seen.first_restarts.append(took)
    if grandchild and engine_identity(grandchild) is not None and grandchild in marked(made.root):
        seen.unswept += 1
