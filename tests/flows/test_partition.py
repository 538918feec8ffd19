"""Nodes cut off by iptables, in the quick form of `scripts/chaos_partition`: nothing moves, nothing runs twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.flow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("iptables") is None or shutil.which("ip") is None,
    reason="needs root, `ip` and `iptables`",
)
def test_a_partition_shorter_than_lost_after_moves_nothing_full_or_one_way(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "chaos_partition", "--quick", "--json", out],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(out.read_text())["runs"]["partition"]
    assert not told["skipped"]
    assert told["figures"]["partitions"] == 3
    assert told["figures"]["needless_moves"] == 0
    assert told["figures"]["served_twice_at_highest_epoch"] == 0
    assert told["figures"]["looks_at_processes"] > 20
