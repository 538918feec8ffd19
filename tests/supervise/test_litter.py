"""Directories of replicas nobody wants any more are removed after a week, and no others."""

from __future__ import annotations

import os
import time

from supervise_fakes import Bench, spec, wait_for

from llmgw.agent import litter
from llmgw.agent.handles import make_replica_dir, replica_dir
from llmgw.domain.replicas import ReplicaState

DAY_S = 86400.0


def aged(bench: Bench, replica_id: str, days: float, *files: str) -> object:
    where = replica_dir(bench.work_dir, replica_id)
    make_replica_dir(where)
    then = time.time() - days * DAY_S
    for name in files:
        (where / name).write_text("x")
        os.utime(where / name, (then, then))
    os.utime(where, (then, then))
    return where


def test_only_old_unwanted_directories_without_a_handle_go(bench: Bench) -> None:
    old = aged(bench, "old#0", 8, "engine.log", "api-key")
    kept = [
        aged(bench, "wanted#0", 8, "engine.log"),
        aged(bench, "young#0", 6, "engine.log"),
        aged(bench, "running#0", 8, "handle.json"),
        aged(bench, "doubtful#0", 8, "handle.json.broken"),
    ]
    assert litter.collect(bench.work_dir, ["wanted#0"], time.time()) == [old]
    assert not old.exists()
    assert all(each.exists() for each in kept)


def test_a_supervisor_collects_after_the_servers_first_word_and_not_before(bench: Bench) -> None:
    old = aged(bench, "old#0", 8, "engine.log")
    supervisor = bench.supervisor()
    assert old.exists()
    supervisor.set_desired([spec(bench)], 1)
    wait_for(supervisor, ReplicaState.READY)
    deadline = time.monotonic() + 10
    while old.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
