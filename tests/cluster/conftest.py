"""The bare node of these tests: one for all of them, and none where the machine does not allow it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cluster_node
import pytest


@pytest.fixture(scope="session")
def lab(release_dir: Path) -> Iterator[cluster_node.Lab]:
    if reason := cluster_node.why_not():
        pytest.skip(reason)
    # sockets' paths are short, and pytest's directories are not
    root = Path(tempfile.mkdtemp(prefix="llmgw-lab-"))
    made = cluster_node.Lab(root, release_dir)
    try:
        made.up()
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)
