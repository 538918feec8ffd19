"""Whatever clients, engines and routes do: every request gets one answer, and nothing is left of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_walk import walk


@pytest.mark.parametrize("seed", [1, 17])
def test_a_random_walk_leaves_nothing_behind(seed: int, tmp_path: Path) -> None:
    done = walk(tmp_path, seed, 2.0)
    assert len(done.right) > 20
