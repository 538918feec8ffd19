"""Usage against real engines' own counters: the long run in its short form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "usage_gateway"


def test_usage_is_what_real_engines_count_and_broken_off_answers_hold_no_more_than_they_made(
    assets: Path, real_engine_dir: Path
) -> None:
    argv = [sys.executable, str(SCRIPT), "--quick", "--engine", "real"]
    env = os.environ | {"LLMGW_TEST_CACHE": str(assets)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exactly as the engines counted" in done.stdout
