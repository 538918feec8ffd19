"""A replica's life with a real engine process: start, ready, crash, stop, and the sentences about it."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error

import pytest
from attrs import evolve
from supervise_fakes import Bench, alive, ask, spec, status_of, wait_for

from llmgw.domain.engines import InstalledEngine
from llmgw.domain.replicas import ReplicaState
from llmgw.domain.restarts import RestartPolicy
from llmgw.testing.fake_provider import INSTALLED, FakeProvider


def test_an_engine_becomes_ready_and_answers_to_its_key_only(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    status = wait_for(supervisor, ReplicaState.READY)
    assert status.words == f"ready on 127.0.0.1:{status.port}"
    assert (status.slots, status.context, status.restarts, status.exit_words) == (2, 1024, 0, "")
    answer = ask(status.port, "/v1/chat/completions", {"max_tokens": 3, "messages": []})
    assert answer["choices"][0]["message"]["content"] == "t0 t1 t2 "
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(status.port, "/v1/chat/completions", {}, key="")
    refused.value.close()
    assert refused.value.code == 401
    assert [each.state for each in bench.history] == [ReplicaState.STARTING, ReplicaState.READY]


def test_a_crash_loop_is_told_with_the_engines_own_words_and_given_up(bench: Bench) -> None:
    supervisor = bench.supervisor("--crash-at-start", "3")
    supervisor.set_desired([spec(bench)], 1)
    last = wait_for(supervisor, ReplicaState.FAILED, where=lambda status: "gave up" in status.words)
    assert "gave up after 3 failed starts within" in last.words
    assert (last.next_try, last.restarts, last.pid) == (None, 3, None)
    assert bench.engine_pids() == []
    starts = [each.words for each in bench.history if each.state is ReplicaState.STARTING]
    assert len(starts) == 3
    assert starts[1].endswith(" (before: exited 3)")


def test_a_failed_start_is_told_with_its_next_try(bench: Bench) -> None:
    supervisor = bench.supervisor("--crash-at-start", "3", restarts=RestartPolicy(100.0))
    supervisor.set_desired([spec(bench)], 1)
    failed = wait_for(supervisor, ReplicaState.FAILED)
    assert failed.words.startswith("exited 3: fake engine: cannot start, leaving with 3; next try in ")
    assert failed.exit_words == "exited 3"
    assert failed.last_log[-1] == "fake engine: cannot start, leaving with 3"
    assert 60 < failed.next_try - time.time() <= 125


def test_a_changed_spec_starts_anew_after_giving_up(bench: Bench) -> None:
    supervisor = bench.supervisor(restarts=RestartPolicy(0.05, 0.05, budget=1))
    supervisor.set_desired([spec(bench, args=("--crash-at-start", "1"))], 1)
    wait_for(supervisor, ReplicaState.FAILED, where=lambda status: "gave up" in status.words)
    supervisor.set_desired([spec(bench, digest="d2")], 1)
    assert wait_for(supervisor, ReplicaState.READY).restarts == 0


def test_a_model_that_is_not_there_is_named_whatever_the_engine_could_say(bench: Bench) -> None:
    supervisor = bench.supervisor("--crash-at-start", "1", restarts=RestartPolicy(100.0))
    supervisor.set_desired([evolve(spec(bench), model="/nonexistent/model.gguf")], 1)
    words = wait_for(supervisor, ReplicaState.FAILED).words
    assert words.startswith("exited 1: the model `/nonexistent/model.gguf` is not on this node")


def test_a_signal_is_told_by_name(bench: Bench) -> None:
    supervisor = bench.supervisor("--crash-at-start", "-4")
    supervisor.set_desired([spec(bench)], 1)
    words = wait_for(supervisor, ReplicaState.FAILED).words
    assert words.startswith("was killed by SIGILL (the CPU lacks an instruction this build uses)")


def test_an_engine_that_dies_at_work_is_started_again(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)
    ask(ready.port, "/fake/set", {"crash": 7})
    again = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != ready.pid)
    failed = next(each for each in bench.history if each.state is ReplicaState.FAILED)
    assert failed.words.startswith("ended after ")
    assert " of being ready: exited 7: fake engine: crashing with 7 as told; next try in " in failed.words
    assert (again.restarts, again.exit_words, again.last_log) == (1, "exited 7", ())


def test_a_program_that_is_not_there_is_said_and_tried_again(bench: Bench) -> None:
    missing = InstalledEngine("fake", "1", "cpu", "/nonexistent", "/nonexistent/engine")
    supervisor = bench.supervisor(engine=lambda name, version: missing)
    supervisor.set_desired([spec(bench)], 1)
    words = wait_for(supervisor, ReplicaState.FAILED).words
    assert words.startswith("cannot start `/nonexistent/engine`: No such file or directory")
    assert "next try in" in words or "gave up" in words or "trying again now" in words


def test_stopping_asks_first_and_says_how_it_ended(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    pid = wait_for(supervisor, ReplicaState.READY).pid
    supervisor.set_desired([], 1)
    stopped = wait_for(supervisor, ReplicaState.STOPPED)
    assert stopped.words == "stopped (exited 0): no longer wanted here"
    assert (stopped.pid, stopped.port) == (None, None)
    assert not os.path.exists(f"/proc/{pid}")  # reaped


def test_an_engine_that_ignores_sigterm_is_killed_after_the_timeout(bench: Bench) -> None:
    supervisor = bench.supervisor("--ignore-term", stop_timeout_s=1.0)
    supervisor.set_desired([spec(bench)], 1)
    wait_for(supervisor, ReplicaState.READY)
    began = time.monotonic()
    supervisor.set_desired([], 1)
    assert wait_for(supervisor, ReplicaState.DRAINING).words == "stopping (no longer wanted here)"
    stopped = wait_for(supervisor, ReplicaState.STOPPED)
    assert 1.0 <= time.monotonic() - began < 4.0
    assert "was killed by SIGKILL" in stopped.words
    assert bench.engine_pids() == []


def test_an_open_request_is_cut_by_the_second_sigterm(bench: Bench) -> None:
    supervisor = bench.supervisor("--token-interval", "30", stop_timeout_s=2.0)
    supervisor.set_desired([spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)

    def hang() -> None:
        with pytest.raises(OSError):
            ask(ready.port, "/v1/chat/completions", {"max_tokens": 2}, timeout_s=30)

    client = threading.Thread(target=hang)
    client.start()
    while not ask(ready.port, "/fake/stats")["in_flight"]:
        time.sleep(0.01)
    supervisor.set_desired([], 1)
    assert "exited 1" in wait_for(supervisor, ReplicaState.STOPPED).words
    client.join(5)
    assert not client.is_alive()


def test_a_grandchild_in_its_own_session_is_swept_on_stop(bench: Bench) -> None:
    supervisor = bench.supervisor("--grandchild")
    supervisor.set_desired([spec(bench)], 1)
    wait_for(supervisor, ReplicaState.READY)
    assert len(bench.engine_pids()) == 2
    supervisor.set_desired([], 1)
    wait_for(supervisor, ReplicaState.STOPPED)
    assert bench.engine_pids() == []


def test_a_grandchild_is_swept_when_only_the_leader_is_killed(bench: Bench) -> None:
    supervisor = bench.supervisor("--grandchild")
    supervisor.set_desired([spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)
    (grandchild,) = set(bench.engine_pids()) - {ready.pid}
    os.kill(ready.pid, signal.SIGKILL)
    again = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != ready.pid)
    assert "was killed by SIGKILL" in again.exit_words
    assert not alive(grandchild)
    assert len(bench.engine_pids()) == 2


def test_slow_loading_is_progress_and_outlives_the_deadline(bench: Bench) -> None:
    supervisor = bench.supervisor("--load-seconds", "1.5", start_deadline_s=0.7)
    supervisor.set_desired([spec(bench)], 1)
    loading = wait_for(supervisor, ReplicaState.LOADING)
    assert loading.words == f"loading on 127.0.0.1:{loading.port} (`/health` answers 503)"
    assert wait_for(supervisor, ReplicaState.READY).restarts == 0


def test_a_start_without_any_progress_ends_at_the_deadline(bench: Bench) -> None:
    supervisor = bench.supervisor("--never-bind", start_deadline_s=600.0)
    supervisor.set_desired([spec(bench, start_deadline_s=0.8)], 1)
    failed = wait_for(supervisor, ReplicaState.FAILED, where=lambda status: status.pid is None)
    assert failed.words.startswith("no sign of progress for 800ms while starting (no log line,")
    assert failed.last_log[0].startswith("fake engine ")


def test_three_missed_answers_are_unresponsive_and_an_answer_heals_it(bench: Bench) -> None:
    supervisor = bench.supervisor(provider=FakeProvider(health_timeout_s=0.3))
    supervisor.set_desired([spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)
    ask(ready.port, "/fake/set", {"hang_health": True})
    hung = wait_for(supervisor, ReplicaState.UNRESPONSIVE)
    assert hung.words.startswith("unresponsive: 3 checks in a row failed (no answer on `/health`: ")
    assert hung.words.endswith(f"; each may take 300ms); process {ready.pid} is alive")
    assert hung.pid == ready.pid
    ask(ready.port, "/fake/set", {"hang_health": False})
    assert wait_for(supervisor, ReplicaState.READY).pid == ready.pid


def test_a_replica_waits_for_its_engine_in_the_engines_own_words(bench: Bench) -> None:
    engines: dict[str, InstalledEngine] = {}
    supervisor = bench.supervisor(
        engine=lambda name, version: engines.get(name), engine_words=lambda name: "fetching b10991 (cpu), 43 %"
    )
    supervisor.set_desired([spec(bench)], 1)
    waiting = wait_for(supervisor, ReplicaState.PENDING)
    wait_for(supervisor, ReplicaState.PENDING, where=lambda status: status.words == "fetching b10991 (cpu), 43 %")
    assert waiting.pid is None
    engines["fake"] = INSTALLED
    supervisor.poke()
    wait_for(supervisor, ReplicaState.READY)


def test_an_unknown_provider_is_said(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench, engine="tgi")], 1)
    assert wait_for(supervisor, ReplicaState.FAILED).words == "this node has no provider `tgi`"


def test_a_providers_bug_becomes_the_replicas_words(bench: Bench) -> None:
    class Broken(FakeProvider):
        def launch(self, engine: object, plan: object) -> object:
            raise KeyError("oops")

    supervisor = bench.supervisor(provider=Broken())
    supervisor.set_desired([spec(bench)], 1)
    assert (
        "the provider of `fake` cannot launch it: KeyError: 'oops'" in wait_for(supervisor, ReplicaState.FAILED).words
    )


def test_stop_all_stops_everything_and_starts_nothing_more(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench), spec(bench, "n#0")], 1)
    wait_for(supervisor, ReplicaState.READY)
    wait_for(supervisor, ReplicaState.READY, "n#0")
    assert supervisor.stop_all() == ()
    assert bench.engine_pids() == []
    supervisor.set_desired([spec(bench)], 2)
    assert supervisor.stop_all() == ()
    assert status_of(supervisor).state is ReplicaState.STOPPED


def test_an_engine_that_hangs_and_does_nothing_is_started_anew_with_words(bench: Bench) -> None:
    supervisor = bench.supervisor(provider=FakeProvider(health_timeout_s=0.3), hang_timeout_s=2.0)
    supervisor.set_desired([spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)
    os.kill(ready.pid, signal.SIGSTOP)
    again = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != ready.pid, timeout_s=30)
    assert again.restarts == 1
    failed = next(each for each in bench.history if each.state is ReplicaState.FAILED)
    assert failed.words.startswith(
        "hung: no health answer, no log line and next to no CPU time for 2s (`supervisor.hang_timeout`); last: no "
    )
    assert not alive(ready.pid)


def test_an_engine_at_work_is_never_started_anew_though_it_does_not_answer(bench: Bench) -> None:
    supervisor = bench.supervisor(provider=FakeProvider(("--burn-cpu",), health_timeout_s=0.3), hang_timeout_s=1.0)
    supervisor.set_desired([spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)
    ask(ready.port, "/fake/set", {"hang_health": True})
    wait_for(supervisor, ReplicaState.UNRESPONSIVE)
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        assert status_of(supervisor).pid == ready.pid
        time.sleep(0.05)
    assert status_of(supervisor).state is ReplicaState.UNRESPONSIVE
    ask(ready.port, "/fake/set", {"hang_health": False})
    assert wait_for(supervisor, ReplicaState.READY).pid == ready.pid
