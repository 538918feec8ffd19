"""The fleet benchmark in its quick form: real sessions over mutual TLS join, beat and come back after a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.flow
def test_sixty_agents_join_beat_and_come_back(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench" / "fleet", "--quick", "--json", out],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(out.read_text())
    row, plan = told["fleet"][0], told["reconcile"][0]
    assert row["agents"] == 60
    assert row["reports_per_s"] > 30
    assert row["server_cpu"] < 0.5
    assert row["server_rss_mb"] < 300
    assert row["rejoin_all_s"] < 30
    assert plan["nothing_to_do_s"] < plan["place_all_s"] < 5
