"""Whatever clients, engines and routes do: every request gets one answer, and nothing is left of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_walk import walk


@pytest.mark.parametrize(("seed", "processes", "secure"), [(17, 1, False), (3, 2, False), (2, 1, True)])
def test_a_random_walk_leaves_nothing_behind(seed: int, processes: int, secure: bool, tmp_path: Path) -> None:
    done = walk(tmp_path, seed, 2.0, processes, secure)
    assert len(done.right) > 10
