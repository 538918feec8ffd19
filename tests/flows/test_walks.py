"""The three walks of docs/architecture.md, with real processes over loopback with mutual TLS."""

from __future__ import annotations

import json
import subprocess

import pytest

pytestmark = [pytest.mark.flow, pytest.mark.timeout(180)]


def test_a_heartbeat_an_engine_and_a_chat(llmgw_command, make_cluster, release_dir, tiny_gguf):
    cluster = make_cluster(llmgw_command)
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{release_dir}"])
    cluster.start_agent(labels={"rack": "r1"}, model_dirs=[str(tiny_gguf.parent)])

    # walk 2: from the wanted version to a proven directory, in words
    engine = cluster.await_engine("ready")
    assert engine["version"] == "b1"
    assert engine["usable"] is True
    directory = cluster.root / "node-1" / "engines" / "llama.cpp" / "b1-cpu"
    binary = directory / "llama-server"
    assert "build 1" in subprocess.run([binary, "--version"], capture_output=True, text=True).stderr

    # walk 1: what the node said is what ctl prints
    listed = json.loads(cluster.ctl("nodes", "-o", "json").stdout)
    node = next(n for n in listed["nodes"] if n["node_id"] == "node-1")
    assert node["presence"] == "connected"
    assert node["facts"]["labels"] == {"rack": "r1"}
    assert node["facts"]["cpu"]["cores"] > 0
    assert node["probed_at"]
    table = cluster.ctl("nodes").stdout
    assert "node-1" in table
    assert engine["words"] in table

    # walk 3: a chat, whole and streamed
    cluster.apply(name="tiny", model="tiny.gguf", context=512, slots=2)
    cluster.await_model("tiny")
    status, answer = cluster.chat("tiny")
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"].strip()
    with cluster.stream("tiny", 12) as contents:
        pieces = list(contents)
    assert pieces[-1] == "[DONE]"
    assert len(pieces) > 3


def test_embeddings_and_completions_and_the_model_list(make_cluster, release_dir, tiny_gguf, embedding_gguf):
    cluster = make_cluster()
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{release_dir}"])
    cluster.start_agent(model_dirs=[str(tiny_gguf.parent)])
    cluster.await_engine("ready")
    # more than the model is made for
    cluster.apply(name="tiny", model="tiny.gguf", context=4096, slots=1, aliases=["small"])
    cluster.apply(name="vectors", model=embedding_gguf.name, context=256, slots=1, args=["--embeddings"])
    cluster.await_model("tiny")
    cluster.await_model("vectors")

    status, data = cluster.request("POST", "/v1/embeddings", {"model": "vectors", "input": "hello you"})
    assert status == 200, data
    assert len(json.loads(data)["data"][0]["embedding"]) == 96
    status, data = cluster.request("POST", "/v1/completions", {"model": "small", "prompt": "the", "max_tokens": 3})
    assert status == 200, data
    assert json.loads(data)["choices"][0]["text"].strip()
    models = json.loads(cluster.request("GET", "/v1/models")[1])["data"]
    assert {(m["id"], m["state"], m["context"]) for m in models} == {("tiny", "ready", 2048), ("vectors", "ready", 256)}
    assert "a request gets 2048 tokens of context, not the 4096 of the profile" in cluster.ctl("replicas").stdout


def test_two_replicas_share_the_requests(make_cluster, release_dir, tiny_gguf):
    cluster = make_cluster()
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{release_dir}"])
    for node in ("node-1", "node-2"):
        cluster.start_agent(node, model_dirs=[str(tiny_gguf.parent)])
        cluster.await_engine("ready", node)
    cluster.apply(name="tiny", model="tiny.gguf", context=256, slots=1, replicas=2)
    cluster.await_model("tiny")
    from flows_cluster import wait

    wait(lambda: [r["state"] for r in cluster.replicas("tiny")] == ["ready"] * 2, 30, "both replicas", cluster.logs)
    assert {r["node_id"] for r in cluster.replicas("tiny")} == {"node-1", "node-2"}
    assert {cluster.chat("tiny")[0] for _ in range(4)} == {200}
    cluster.ctl("delete", "tiny")
    wait(
        lambda: not cluster.node("node-1")["replicas"] or cluster.node("node-1")["replicas"][0]["state"] == "stopped",
        20,
        "gone",
    )
    assert cluster.chat("tiny")[0] == 404
