"""A bare node, a server, and an operator with a release directory."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "flows"), str(ROOT / "tests" / "packaging")]

from conftest_packaging import pyz  # noqa: E402
from flows_cluster import MODULE, Cluster, sweep  # noqa: E402
from onboard_node import Node, missing  # noqa: E402
from onboard_operator import Operator  # noqa: E402

__all__ = ["pyz"]


@pytest.fixture
def make_node(assets: Path) -> Iterator[Callable[..., Node]]:
    """Makes bare machines, and ends them afterwards."""
    if words := missing():
        pytest.skip(words)
    made: list[Node] = []
    # the upper layer of an overlay must not lie on the file system of the lower one
    base = Path(tempfile.mkdtemp(prefix="llmgw-node-", dir="/dev/shm"))

    def make(name: str = "bare", init: str = "systemd") -> Node:
        node = Node(base / f"{name}-{len(made)}", assets, name=name, init=init)
        made.append(node)
        return node

    yield make
    for node in made:
        node.stop()
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def server(tmp_path: Path, release_dir: Path) -> Iterator[Cluster]:
    """A server with mutual TLS whose nodes are to have the test engine."""
    cluster = Cluster(tmp_path / "cluster", MODULE)
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{release_dir}"])
    yield cluster
    try:
        cluster.close()
    finally:
        sweep(cluster.root)


@pytest.fixture
def release(pyz: Path, tmp_path: Path) -> Path:
    """A release directory as the build leaves it: the executable and SHA256SUMS."""
    made = tmp_path / "release"
    made.mkdir()
    os.link(pyz, made / pyz.name) if os.stat(pyz).st_dev == os.stat(made).st_dev else shutil.copy(pyz, made)
    sums = [line for line in (pyz.parent / "SHA256SUMS").read_text().splitlines() if line.endswith(pyz.name)]
    (made / "SHA256SUMS").write_text(sums[0] + "\n")
    return made


@pytest.fixture
def operator(tmp_path: Path, assets: Path, release: Path) -> Operator:
    """Somebody with ssh, the CA and a release."""
    return Operator(tmp_path / "operator", tmp_path / "cluster" / "pki", release, assets)


@pytest.fixture
def offline(tmp_path: Path, operator: Operator) -> Operator:
    """The same with a CA but no server: for what happens before and without one."""
    from llmgw.pki import authority

    authority.init_ca(operator.pki, now=time.time())
    return operator
