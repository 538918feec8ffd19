"""Each chaos run in its short form: the long one is the same program with more repetitions (docs/reliability.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.flow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("run", ["agent-kill", "engine-kill", "server-away", "pid-reuse", "disk-full", "crash-points"])
def test_the_invariants_hold_under(run: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "chaos", run, "--quick", "--json", figures],
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(figures.read_text())["runs"][run]
    if told["skipped"]:
        pytest.skip(told["skipped"])
    assert told["figures"]
    assert told["failures"] == []


def test_an_unknown_run_is_named_with_the_known_ones() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "chaos", "flood"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no run `flood`; known: agent-kill, " in done.stderr
