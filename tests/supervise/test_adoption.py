"""Engines outlive the agent: what the next one adopts, what it calls gone, and whom it never touches."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import evolve
from supervise_fakes import KEY, Bench, alive, ask, kill, spec, status_of, wait_for, wait_gone

from llmgw.agent import handles, procs
from llmgw.agent.handles import replica_dir
from llmgw.agent.supervisor import Supervisor
from llmgw.domain.replicas import ReplicaState


class KilledAgent:
    """An agent in a process of its own."""

    def __init__(self, bench: Bench, *flags: str) -> None:
        program = Path(__file__).with_name("agent_process.py")
        self.process = subprocess.Popen(
            [sys.executable, program, bench.root, *flags], stdout=subprocess.PIPE, start_new_session=True
        )
        told = json.loads(self.process.stdout.readline())
        self.engine_pid, self.port = told["pid"], told["port"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(5)
        self.process.stdout.close()


@pytest.fixture
def killed(bench: Bench) -> Iterator[Callable[..., KilledAgent]]:
    made: list[KilledAgent] = []

    def make(*flags: str) -> KilledAgent:
        made.append(KilledAgent(bench, *flags))
        return made[-1]

    yield make
    for each in made:
        if each.process.poll() is None:
            each.kill()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of ours."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def left_behind(bench: Bench, *flags: str) -> tuple[int, int]:
    """Start an engine and let go of it: its pid and port."""
    supervisor = bench.supervisor(*flags)
    supervisor.set_desired([spec(bench)], 1)
    status = wait_for(supervisor, ReplicaState.READY)
    supervisor.detach()
    return status.pid, status.port


def rewrite(bench: Bench, **changes: object) -> None:
    """Change the handle an agent left."""
    where = replica_dir(bench.work_dir, "m#0")
    handles.save(evolve(handles.load(where), **changes))


def settle(supervisor: Supervisor, bench: Bench) -> int:
    supervisor.set_desired([spec(bench)], 1)
    return wait_for(supervisor, ReplicaState.READY).pid


def test_a_killed_agents_engine_streams_on_and_is_adopted(bench: Bench, killed: Callable[..., KilledAgent]) -> None:
    agent = killed("--token-interval", "0.02")
    connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=10)
    body = json.dumps({"stream": True, "max_tokens": 60, "messages": []})
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    answer.read(200)
    agent.kill()
    supervisor = bench.supervisor()
    adopted = status_of(supervisor)
    assert (adopted.state, adopted.pid, adopted.port) == (ReplicaState.READY, agent.engine_pid, agent.port)
    assert adopted.words == f"ready on 127.0.0.1:{agent.port}"
    assert settle(supervisor, bench) == agent.engine_pid
    rest = answer.read().decode()
    connection.close()
    assert "t59 " in rest
    assert rest.endswith("data: [DONE]\n\n")
    assert bench.engine_pids() == [agent.engine_pid]


def test_no_log_line_is_lost_over_an_agents_death(bench: Bench, killed: Callable[..., KilledAgent]) -> None:
    agent = killed("--flood", "3000")
    agent.kill()
    log = replica_dir(bench.work_dir, "m#0") / "engine.log"
    before = log.stat().st_size
    deadline = time.monotonic() + 10
    while log.stat().st_size < before + 20_000:
        assert time.monotonic() < deadline, "the engine stopped logging when its agent died"
        time.sleep(0.01)
    supervisor = bench.supervisor()
    assert status_of(supervisor).pid == agent.engine_pid
    numbers = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("flood ")]
    assert numbers == list(range(len(numbers)))


def test_an_adopted_engine_that_dies_is_told_with_its_exit_code(
    bench: Bench, killed: Callable[..., KilledAgent]
) -> None:
    agent = killed()
    agent.kill()
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    ask(agent.port, "/fake/set", {"crash": 7})
    again = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != agent.engine_pid)
    assert again.exit_words == "exited 7"
    assert again.restarts == 1


@pytest.mark.parametrize(("code", "words"), [(7, "exited 7"), (-11, "was killed by SIGSEGV")])
def test_an_engine_that_dies_while_no_agent_runs_is_told_with_its_exit_code_and_last_words(
    bench: Bench, killed: Callable[..., KilledAgent], code: int, words: str
) -> None:
    agent = killed()
    agent.kill()
    ask(agent.port, "/fake/set", {"crash": code})
    wait_gone(agent.engine_pid)
    kept = replica_dir(bench.work_dir, "m#0") / "engine.exit"
    deadline = time.monotonic() + 10
    while not kept.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gone = status_of(bench.supervisor())
    assert gone.state is ReplicaState.FAILED
    assert gone.words.startswith(f"it ended while the agent was away ({words}")
    assert gone.words.endswith(f": fake engine: crashing with {code} as told")
    assert words in gone.exit_words


def test_an_engine_outlives_its_killed_keeper_and_only_its_exit_code_is_lost(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)
    keeper = handles.load(replica_dir(bench.work_dir, "m#0")).keeper_pid
    os.kill(keeper, signal.SIGKILL)
    wait_gone(keeper)
    assert ask(ready.port, "/v1/chat/completions", {"max_tokens": 1})["choices"]
    assert status_of(supervisor).pid == ready.pid
    os.kill(ready.pid, signal.SIGKILL)
    again = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != ready.pid)
    assert again.exit_words == "exit code unknown (its keeper was killed)"


def test_a_signal_to_the_engines_group_reaches_it_once_and_its_keeper_never(bench: Bench) -> None:
    supervisor = bench.supervisor("--ignore-term")
    supervisor.set_desired([spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)
    keeper = handles.load(replica_dir(bench.work_dir, "m#0")).keeper_pid
    os.killpg(ready.pid, signal.SIGTERM)
    os.kill(keeper, signal.SIGTERM)  # by mistake of a person
    deadline = time.monotonic() + 10
    while "SIGTERM ignored" not in supervisor.logs("m#0", 10):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ask(ready.port, "/fake/set", {"crash": 9})
    again = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != ready.pid)
    assert again.exit_words == "exited 9"
    assert supervisor.logs("m#0", 100, previous=True).count("SIGTERM ignored") == 1
    wait_gone(keeper)


def test_the_keeper_is_small_and_carries_no_marker(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    ready = wait_for(supervisor, ReplicaState.READY)
    keeper = handles.load(replica_dir(bench.work_dir, "m#0")).keeper_pid
    assert bench.engine_pids() == [ready.pid]
    assert procs.MARKER not in procs.read_environ(keeper)
    rollup = Path(f"/proc/{keeper}/smaps_rollup").read_text().splitlines()
    private_kb = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    assert private_kb < 1000


def test_a_handle_of_the_first_format_is_read_and_its_engine_adopted(bench: Bench) -> None:
    pid, _ = left_behind(bench)
    path = replica_dir(bench.work_dir, "m#0") / "handle.json"
    body = json.loads(json.loads(path.read_text())["handle"])
    body["version"] = 1
    for name in ("keeper_pid", "keeper_ticks", "gpu_free"):
        del body[name]
    text = json.dumps(body, sort_keys=True)
    path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "handle": text}))
    supervisor = bench.supervisor()
    assert settle(supervisor, bench) == pid
    kill(pid)
    again = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != pid)
    assert again.exit_words == "exit code unknown (adopted)"


def test_an_adopted_engine_can_be_stopped(bench: Bench, killed: Callable[..., KilledAgent]) -> None:
    agent = killed("--grandchild")
    agent.kill()
    supervisor = bench.supervisor()
    assert len(bench.engine_pids()) == 2
    supervisor.set_desired([], 1)
    assert wait_for(supervisor, ReplicaState.STOPPED).words.startswith("stopped (exited 0)")
    assert bench.engine_pids() == []


def test_before_the_servers_word_nothing_is_stopped(bench: Bench) -> None:
    pid, _ = left_behind(bench)
    supervisor = bench.supervisor()
    assert status_of(supervisor).state is ReplicaState.READY
    supervisor.detach()
    assert alive(pid)
    third = bench.supervisor()
    assert status_of(third).pid == pid
    third.set_desired([], 1)
    wait_for(third, ReplicaState.STOPPED)
    assert not alive(pid)


def test_an_engine_still_loading_is_adopted_too(bench: Bench) -> None:
    supervisor = bench.supervisor("--load-seconds", "1.5")
    supervisor.set_desired([spec(bench)], 1)
    pid = wait_for(supervisor, ReplicaState.LOADING).pid
    supervisor.detach()
    second = bench.supervisor()
    assert status_of(second).pid == pid
    assert settle(second, bench) == pid


def test_an_engine_that_died_meanwhile_is_gone_and_started_again(bench: Bench) -> None:
    pid, _ = left_behind(bench)
    kill(pid)
    supervisor = bench.supervisor()
    gone = status_of(supervisor)
    assert gone.state is ReplicaState.FAILED
    assert gone.words.startswith("it ended while the agent was away (was killed by SIGKILL")
    assert gone.profile == "m"
    assert gone.last_log[-1].startswith("listening on ")
    assert settle(supervisor, bench) != pid
    assert status_of(supervisor).restarts == 1


def test_workers_of_an_engine_that_died_meanwhile_are_swept(bench: Bench) -> None:
    pid, _ = left_behind(bench, "--grandchild")
    kill(pid)
    assert len(bench.engine_pids()) == 1
    bench.supervisor()
    deadline = time.monotonic() + 5
    while bench.engine_pids():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_without_an_engine_and_without_a_record_are_swept(bench: Bench) -> None:
    pid, _ = left_behind(bench)
    environ = procs.read_environ(pid)
    worker = subprocess.Popen(["sleep", "600"], env=environ)
    kill(pid)
    (replica_dir(bench.work_dir, "m#0") / "handle.json").unlink()
    bench.supervisor()
    assert worker.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("forge", ["pid", "pid and start time"])
def test_a_stranger_on_the_recorded_pid_is_never_signalled(
    bench: Bench, bystander: subprocess.Popen[bytes], forge: str
) -> None:
    pid, _ = left_behind(bench)
    kill(pid)
    changes: dict[str, object] = {"pid": bystander.pid}
    if forge == "pid and start time":
        changes["start_ticks"] = procs.read_stat(bystander.pid).start_ticks
    rewrite(bench, **changes)
    supervisor = bench.supervisor()
    assert f"its pid {bystander.pid} now belongs to another process, which is left alone" in status_of(supervisor).words
    settle(supervisor, bench)
    supervisor.set_desired([], 1)
    wait_for(supervisor, ReplicaState.STOPPED)
    assert bystander.poll() is None


@pytest.mark.parametrize("field", ["boot_id", "start_ticks", "marker", "exe"])
def test_an_engine_is_not_adopted_when_one_mark_of_its_identity_differs(bench: Bench, field: str) -> None:
    pid, _ = left_behind(bench)
    where = replica_dir(bench.work_dir, "m#0")
    true = handles.load(where)
    rewrite(bench, **{field: 1 if field == "start_ticks" else "another"})
    assert handles.load(where).identity() != true.identity()
    from llmgw.agent.child import hold

    assert hold(handles.load(where).identity()) is None
    held = hold(true.identity())
    assert held.pid == pid
    held.close()


def test_a_stranger_on_the_recorded_port_is_neither_adopted_nor_signalled(bench: Bench) -> None:
    pid, _ = left_behind(bench)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        rewrite(bench, port=stranger.getsockname()[1])
        supervisor = bench.supervisor()
        assert status_of(supervisor).state is not ReplicaState.READY
        # the process itself is ours by its marker: it is replaced, the listener is left alone
        assert settle(supervisor, bench) != pid
        assert status_of(supervisor).port != stranger.getsockname()[1]
        assert not alive(pid)


def test_an_engine_that_refuses_its_key_is_replaced(bench: Bench) -> None:
    pid, _ = left_behind(bench)
    (replica_dir(bench.work_dir, "m#0") / "api-key").write_text("another\n")
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench, api_key="another")], 1)
    wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != pid)
    assert not alive(pid)


def test_a_hanging_engine_is_adopted_as_unresponsive_and_lives(bench: Bench) -> None:
    pid, port = left_behind(bench)
    rewrite(bench, health_timeout_s=0.3)
    ask(port, "/fake/set", {"hang_health": True})
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    hung = wait_for(supervisor, ReplicaState.UNRESPONSIVE)
    assert hung.pid == pid
    ask(port, "/fake/set", {"hang_health": False})
    assert wait_for(supervisor, ReplicaState.READY).pid == pid


@pytest.mark.parametrize("damage", ["junk", "flipped", "emptied", "future", "lost"])
def test_a_damaged_handle_is_put_aside_and_the_engine_found_by_its_environment(bench: Bench, damage: str) -> None:
    pid, _ = left_behind(bench)
    path = replica_dir(bench.work_dir, "m#0") / "handle.json"
    text = path.read_text()
    if damage == "lost":
        path.unlink()
    elif damage == "future":
        path.write_text(handles.encode(evolve(handles.decode(text), version=99)))
    else:
        changed = text.replace("20", "21").replace("15", "16").replace("1", "2", 1)
        path.write_text({"junk": "{[", "flipped": changed, "emptied": ""}[damage])
    supervisor = bench.supervisor()
    assert settle(supervisor, bench) == pid
    assert bench.engine_pids() == [pid]
    assert handles.load(path.parent).pid == pid
    assert path.with_name("handle.json.broken").exists() == (damage != "lost")


def test_another_agents_engines_on_the_same_machine_are_left_alone(bench: Bench) -> None:
    pid, _ = left_behind(bench)
    other = bench.supervisor(work_dir=bench.root / "other")
    assert other.statuses() == ()
    other.set_desired([], 9)
    other.set_desired([spec(bench)], 9)
    assert wait_for(other, ReplicaState.READY).pid != pid
    other.stop_all()
    assert alive(pid)


def test_a_work_directory_reached_by_another_name_is_the_same(bench: Bench) -> None:
    pid, _ = left_behind(bench)
    alias = bench.root / "alias"
    alias.symlink_to(bench.work_dir)
    supervisor = bench.supervisor(work_dir=alias)
    assert settle(supervisor, bench) == pid
