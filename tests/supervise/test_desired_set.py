"""Repeated, reordered and changed desired sets: at most one engine per replica, removals first."""

from __future__ import annotations

import os
import signal

from supervise_fakes import Bench, spec, status_of, wait_for

from llmgw.agent.ports import ephemeral_range
from llmgw.domain.replicas import ReplicaState


def test_a_set_said_many_times_starts_one_engine(bench: Bench) -> None:
    supervisor = bench.supervisor("--load-seconds", "0.3")
    for _ in range(20):
        supervisor.set_desired([spec(bench), spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)
    for _ in range(20):
        supervisor.set_desired([spec(bench)], 1)
    assert wait_for(supervisor, ReplicaState.READY).pid == ready.pid
    assert bench.engine_pids() == [ready.pid]


def test_an_older_set_or_an_older_spec_changes_nothing(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench, epoch=5, digest="new")], 5)
    ready = wait_for(supervisor, ReplicaState.READY)
    supervisor.set_desired([], 4)
    supervisor.set_desired([spec(bench, epoch=4, digest="old")], 5)
    supervisor.set_desired([spec(bench, epoch=4), spec(bench, epoch=5, digest="new")], 5)
    supervisor.set_desired([spec(bench, "n#0")], 4)
    supervisor.set_desired([spec(bench, epoch=5, digest="new"), spec(bench, "o#0")], 5)
    wait_for(supervisor, ReplicaState.READY, "o#0")
    assert status_of(supervisor).pid == ready.pid
    assert status_of(supervisor).state is ReplicaState.READY
    assert status_of(supervisor, "n#0") is None


def test_a_changed_digest_replaces_the_engine_after_the_old_one_is_gone(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    old = wait_for(supervisor, ReplicaState.READY)
    supervisor.set_desired([spec(bench, digest="d2", slots=1)], 1)
    new = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.digest == "d2")
    assert new.pid != old.pid
    assert new.slots == 1
    assert bench.engine_pids() == [new.pid]
    assert supervisor.logs("m#0", 10, previous=True)[-1] == "stopped"


def test_a_higher_epoch_replaces_the_engine(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    old = wait_for(supervisor, ReplicaState.READY)
    supervisor.set_desired([spec(bench, epoch=2)], 2)
    new = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.epoch == 2)
    assert new.pid != old.pid


def test_a_replica_waits_until_another_has_left_its_gpu(bench: Bench) -> None:
    supervisor = bench.supervisor("--ignore-term", stop_timeout_s=60.0)
    supervisor.set_desired([spec(bench, "old#0", gpus=("GPU-1",))], 1)
    old = wait_for(supervisor, ReplicaState.READY, "old#0")
    supervisor.set_desired([spec(bench, "new#0", gpus=("GPU-1",)), spec(bench, "cpu#0")], 1)
    waiting = wait_for(
        supervisor, ReplicaState.PENDING, "new#0", where=lambda status: "has left its GPU" in status.words
    )
    assert waiting.words == "waiting until `old#0` has left its GPU"
    wait_for(supervisor, ReplicaState.READY, "cpu#0")
    assert status_of(supervisor, "new#0").state is ReplicaState.PENDING
    os.kill(old.pid, signal.SIGKILL)
    wait_for(supervisor, ReplicaState.READY, "new#0")
    assert old.pid not in bench.engine_pids()


def test_ports_lie_outside_the_kernels_range_and_rest_after_use(bench: Bench) -> None:
    low, high = ephemeral_range()
    supervisor = bench.supervisor()
    seen = []
    for digest in ("d1", "d2", "d3"):
        supervisor.set_desired([spec(bench, digest=digest)], 1)
        seen.append(wait_for(supervisor, ReplicaState.READY, where=lambda status, d=digest: status.digest == d).port)
    assert all(not low <= port <= high for port in seen)
    assert len(set(seen)) == 3
