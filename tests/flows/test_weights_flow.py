"""Weights over the whole chain: a split model from a hub, in words while it comes, listed, and removed on request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flows_cluster import wait

sys.path.append(str(Path(__file__).resolve().parent.parent / "install"))

from test_source_sets import REPO, Hub

pytestmark = [pytest.mark.flow, pytest.mark.timeout(180)]


@pytest.fixture
def hub(tiny_gguf: Path) -> Iterator[Hub]:
    with tiny_gguf.open("rb") as handle:
        data = handle.read()
    running = Hub({"tiny.gguf": data, "old.gguf": data[:4096] + bytes(200_000)})
    with running.api, running.cdn:
        yield running


def test_a_model_is_fetched_ahead_served_listed_and_the_unused_one_removed(make_cluster, hub, release_dir) -> None:
    import threading

    cluster = make_cluster()
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{release_dir}"])
    gate = threading.Event()
    hub.cdn.files["/blob/old.gguf"].hold = gate
    cluster.start_agent(env={"HF_ENDPOINT": hub.api.url})
    wait(lambda: cluster.node().get("probed_at"), 40, "the node's first look", cluster.logs)

    # fetched before any replica needs it; how far it is stands in the listing
    said = cluster.ctl("weights", "fetch", f"hf:{REPO}:old.gguf", "node-1").stdout
    assert said.startswith("node-1: fetching: old.gguf (")
    wait(lambda: "fetching: old.gguf (" in cluster.ctl("weights").stdout, 20, "its progress", cluster.logs)
    gate.set()
    wait(lambda: "fetching:" not in cluster.ctl("weights").stdout, 20, "its end", cluster.logs)

    # a replica's model comes from the hub too
    cluster.await_engine("ready")
    cluster.apply(name="tiny", model=f"hf:{REPO}:tiny.gguf", context=256, slots=1)
    cluster.await_model("tiny")
    status, answer = cluster.chat("tiny")
    assert status == 200, answer

    # only what no replica uses goes, and only when it was said so
    refused = cluster.ctl("weights", "collect", "node-1", code=None)
    assert refused.returncode != 0
    assert "old.gguf (" in refused.stderr
    assert "tiny.gguf" not in refused.stderr
    done = cluster.ctl("weights", "collect", "node-1", "--yes").stdout
    assert "1 removed" in done
    assert [path.name[17:] for path in (cluster.root / "node-1" / "weights").glob("*.gguf")] == ["tiny.gguf"]
    assert cluster.ctl("weights", "collect", "node-1").stdout == "node-1: nothing is unused\n"
    assert cluster.chat("tiny")[0] == 200
