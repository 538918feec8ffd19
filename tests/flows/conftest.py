"""Flows run llmgw as a process: the package and, when `scripts/build_pyz.sh` has made it, the one-file executable."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flows_cluster import MODULE, Cluster, sweep

import llmgw

ROOT = Path(__file__).resolve().parents[2]
PYZ = ROOT / "dist" / f"llmgw-{llmgw.__version__}-linux-{platform.machine()}.pyz"


@pytest.fixture(params=["package", "executable"])
def llmgw_command(request: pytest.FixtureRequest) -> list[str]:
    """How llmgw is run."""
    if request.param == "package":
        return MODULE
    if not PYZ.exists():
        pytest.skip(f"{PYZ.name} is not built: run scripts/build_pyz.sh")
    return [sys.executable, "-I", str(PYZ)]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, and ends all their processes afterwards."""
    made: list[Cluster] = []

    def make(command: list[str] | None = None, **options: bool) -> Cluster:
        cluster = Cluster(tmp_path / f"cluster-{len(made)}", command or MODULE, **options)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        try:
            cluster.close()
        finally:
            sweep(cluster.root)
