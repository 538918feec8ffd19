"""Killing the control plane costs no token; killing the agent costs no engine."""

from __future__ import annotations

import os

import pytest
from flows_cluster import wait

pytestmark = [pytest.mark.flow, pytest.mark.timeout(180)]


@pytest.fixture
def serving(make_cluster, release_dir, slow_gguf):
    cluster = make_cluster()
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{release_dir}"])
    cluster.start_agent(model_dirs=[str(slow_gguf.parent)])
    cluster.await_engine("ready")
    cluster.apply(name="slow", model="slow.gguf", context=2048, slots=2)
    cluster.await_model("slow")
    return cluster


def test_killing_the_server_does_not_break_a_stream_and_the_next_server_takes_over(serving):
    with serving.stream("slow", 150) as contents:
        first = next(contents)
        serving.kill("server")
        rest = list(contents)
    assert first
    assert rest[-1] == "[DONE]"
    assert len(rest) > 50
    assert serving.chat("slow")[0] == 200, "new requests go on with the last routing snapshot"
    status, _ = serving.request("GET", "/", token=True)
    assert status == 503

    pid = _engine_pid(serving.root)
    serving.start_server(engines={"llama.cpp": "b1"}, sources=["file:///nonexistent"])
    wait(lambda: serving.node().get("presence") == "connected", 60, "the agent to come back", serving.logs)
    wait(lambda: serving.replicas("slow")[0]["state"] == "ready", 60, "the server to see it", serving.logs)
    assert serving.chat("slow")[0] == 200
    assert serving.replicas("slow")[0]["pid"] == pid, "the engine was left alone"


def test_killing_the_agent_does_not_stop_the_engine_and_the_next_agent_adopts_it(serving):
    before = serving.replicas("slow")[0]
    with serving.stream("slow", 150) as contents:
        next(contents)
        serving.kill("node-1")
        rest = list(contents)
    assert rest[-1] == "[DONE]"
    os.kill(before["pid"], 0)
    assert serving.chat("slow")[0] == 200

    serving.start_agent(model_dirs=[])
    wait(lambda: serving.node().get("presence") == "connected", 60, "the agent to come back", serving.logs)
    wait(lambda: [r["state"] for r in serving.replicas("slow")] == ["ready"], 60, "the replica", serving.logs)
    after = serving.replicas("slow")[0]
    assert (after["pid"], after["epoch"], after["port"]) == (before["pid"], before["epoch"], before["port"])
    assert serving.chat("slow")[0] == 200


def test_agent_and_server_killed_together_leave_the_engine_and_find_it_again(serving):
    pid = serving.replicas("slow")[0]["pid"]
    serving.kill("server")
    serving.kill("node-1")
    serving.start_agent(model_dirs=[])
    wait(lambda: "cannot" in serving.log("node-1")() or "refused" in serving.log("node-1")(), 60, "the agent to say so")
    os.kill(pid, 0)
    serving.start_server(engines={"llama.cpp": "b1"}, sources=["file:///nonexistent"])
    wait(lambda: serving.replicas("slow")[0]["state"] == "ready", 60, "the server to see it", serving.logs)
    assert serving.replicas("slow")[0]["pid"] == pid
    assert serving.chat("slow")[0] == 200


def test_a_killed_engine_is_restarted_and_the_death_is_told(serving):
    pid = serving.replicas("slow")[0]["pid"]
    os.kill(pid, 9)
    wait(lambda: serving.replicas("slow")[0]["pid"] not in (pid, None), 60, "a new engine", serving.logs)
    serving.await_model("slow")
    again = serving.replicas("slow")[0]
    assert again["restarts"] >= 1
    assert serving.chat("slow")[0] == 200


def _engine_pid(root) -> int:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as handle:
                    argv = handle.read().split(b"\0")
            except OSError:
                continue
            if argv[0].startswith(str(root).encode()) and argv[0].endswith(b"llama-server"):
                return int(entry)
    pytest.fail("no engine runs")
