"""A GPU is free when its memory is back, not when its engine is gone: real engines, a made GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping

from supervise_fakes import Bench, ask, kill, spec, status_of, wait_for

from llmgw.agent.devices import Devices
from llmgw.domain.devices import DeviceMemory
from llmgw.domain.replicas import ReplicaState
from llmgw.system.clock import RealClock

GB = 10**9


class Card:
    """GPU-1 with 24 GB, and GPU-2 that is always free; `free` is what the next reading says."""

    def __init__(self) -> None:
        self.free: int | None = 23 * GB
        self.read_at: float | None = None
        self.broken = False

    def __call__(self) -> Mapping[str, DeviceMemory] | None:
        if self.broken:
            return None
        at = time.monotonic() if self.read_at is None else self.read_at
        cards = {"GPU-1": self.free, "GPU-2": 23 * GB}
        return {uuid: DeviceMemory(free, 24 * GB, at) for uuid, free in cards.items() if free is not None}


def on(bench: Bench, replica_id: str, *gpus: str, **changes: object) -> object:
    return spec(bench, replica_id, gpus=gpus or ("GPU-1",), **changes)


def taken(bench: Bench, card: Card, **settings: object) -> object:
    """A supervisor whose `old#0` serves on GPU-1 and has filled it but for 3 GB."""
    supervisor = bench.supervisor(gpu_free=card, **settings)
    supervisor.set_desired([on(bench, "old#0")], 1)
    wait_for(supervisor, ReplicaState.READY, "old#0")
    card.free = 3 * GB
    return supervisor


def test_a_gpu_is_free_when_its_memory_is_back(bench: Bench) -> None:
    card = Card()
    supervisor = taken(bench, card)
    supervisor.set_desired([on(bench, "new#0"), on(bench, "else#0", "GPU-2"), spec(bench, "cpu#0")], 1)
    wait_for(supervisor, ReplicaState.STOPPED, "old#0")
    words = "waiting until `GPU-1` has its memory back (20 GB of 24 GB still taken)"
    wait_for(supervisor, ReplicaState.PENDING, "new#0", where=lambda status: status.words == words)
    card.free = int(19.8 * GB)
    less = "waiting until `GPU-1` has its memory back (3.2 GB of 24 GB still taken)"
    wait_for(supervisor, ReplicaState.PENDING, "new#0", where=lambda status: status.words == less)
    wait_for(supervisor, ReplicaState.READY, "else#0")  # nobody else waits
    wait_for(supervisor, ReplicaState.READY, "cpu#0")
    assert len(bench.engine_pids("new#0")) == 0
    card.free = 23 * GB
    wait_for(supervisor, ReplicaState.READY, "new#0")
    starting = [each for each in bench.history if each.replica_id == "new#0" and each.state is ReplicaState.STARTING]
    assert starting[0].words == f"starting on 127.0.0.1:{starting[0].port}"


def test_a_restart_waits_too_and_keeps_the_words_about_the_exit(bench: Bench) -> None:
    card = Card()
    supervisor = taken(bench, card)
    ask(status_of(supervisor, "old#0").port, "/fake/set", {"crash": 7})
    waiting = wait_for(supervisor, ReplicaState.PENDING, "old#0")
    assert waiting.words.startswith("waiting until `GPU-1` has its memory back (")
    assert waiting.words.endswith(" still taken) (before: exited 7)")
    card.free = 23 * GB
    assert wait_for(supervisor, ReplicaState.READY, "old#0").restarts == 1


def test_memory_that_never_comes_back_is_said_and_the_engine_tries(bench: Bench) -> None:
    card = Card()
    supervisor = taken(bench, card, gpu_wait_s=1.0)
    supervisor.set_desired([on(bench, "new#0", args=("--crash-at-start", "1"))], 1)
    said = "`GPU-1` did not get its memory back: 20 GB of 24 GB still taken "
    failed = wait_for(supervisor, ReplicaState.FAILED, "new#0", where=lambda status: said in status.words)
    assert failed.words.startswith(
        "exited 1: fake engine: cannot start, leaving with 1; before it was started, `GPU-1`"
    )
    assert " after `old#0` left it; end the process that holds it" in failed.words
    first = next(each for each in bench.history if each.replica_id == "new#0" and each.state is ReplicaState.STARTING)
    assert said in first.words
    # what was lost before its start is not waited for again
    last = wait_for(supervisor, ReplicaState.FAILED, "new#0", where=lambda status: "gave up" in status.words)
    assert said not in last.words
    assert last.restarts == 3


def test_a_reading_from_before_the_end_does_not_free_the_gpu(bench: Bench) -> None:
    card = Card()
    supervisor = taken(bench, card)
    card.free, card.read_at = 23 * GB, time.monotonic()
    supervisor.set_desired([on(bench, "new#0")], 1)
    words = "waiting until `GPU-1` has its memory back (not read since `old#0` left it)"
    wait_for(supervisor, ReplicaState.PENDING, "new#0", where=lambda status: status.words == words)
    card.read_at = None
    wait_for(supervisor, ReplicaState.READY, "new#0")


def test_memory_that_can_no_longer_be_read_keeps_nobody_waiting(bench: Bench) -> None:
    card = Card()
    supervisor = taken(bench, card)
    supervisor.set_desired([on(bench, "new#0")], 1)
    wait_for(supervisor, ReplicaState.PENDING, "new#0", where=lambda status: "its memory back" in status.words)
    card.broken = True
    wait_for(supervisor, ReplicaState.READY, "new#0")


def test_what_was_free_before_an_adopted_engine_is_known_from_its_handle(bench: Bench) -> None:
    card = Card()
    taken(bench, card).detach()
    supervisor = bench.supervisor(gpu_free=card)
    supervisor.set_desired([on(bench, "new#0")], 1)
    words = "waiting until `GPU-1` has its memory back (20 GB of 24 GB still taken)"
    wait_for(supervisor, ReplicaState.PENDING, "new#0", where=lambda status: status.words == words)
    card.free = 23 * GB
    wait_for(supervisor, ReplicaState.READY, "new#0")


def test_an_engine_that_died_while_no_agent_ran_may_still_hold_its_memory(bench: Bench) -> None:
    card = Card()
    first = taken(bench, card)
    pid = status_of(first, "old#0").pid
    first.detach()
    kill(pid)
    supervisor = bench.supervisor(gpu_free=card)
    supervisor.set_desired([on(bench, "old#0")], 1)
    wait_for(supervisor, ReplicaState.PENDING, "old#0", where=lambda status: "its memory back" in status.words)
    card.free = 23 * GB
    wait_for(supervisor, ReplicaState.READY, "old#0")


class Clock(RealClock):
    """A monotonic time that stands until it is moved."""

    at = 1000.0

    def monotonic(self) -> float:
        return self.at


def test_a_gpu_left_long_ago_is_read_before_it_is_given_up() -> None:
    clock, card = Clock(), Card()
    devices = Devices(card, clock, 60.0)
    card.read_at = clock.at
    devices.note_left("old#0", devices.before(("GPU-1", "GPU-9")))
    card.read_at, clock.at = 990.0, 2000.0
    assert "not read since" in devices.waiting(("GPU-1",))
    clock.at += 5.0
    assert devices.waiting(("GPU-1",)) == ""
    assert devices.taken(("GPU-1",)).startswith("the memory of `GPU-1` has not been read for 16m45s")
    devices.note_entered(("GPU-1",))
    assert devices.taken(("GPU-1",)) == ""


def test_several_gpus_are_awaited_in_one_sentence() -> None:
    clock, card = Clock(), Card()
    devices = Devices(card, clock, 60.0)
    both = ("GPU-1", "GPU-2")
    devices.note_left("old#0", dict.fromkeys(both, 24 * GB))
    card.read_at = clock.at
    assert devices.waiting(both) == (
        "waiting until `GPU-1` has its memory back (1.0 GB of 24 GB still taken), and for 1 more"
    )
    assert devices.waiting(()) == ""
