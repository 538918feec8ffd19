"""Killed at calls of the kernel: installed or absent. All points are a run by hand; here every forty-fifth."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/chaos_install/crash_points.py"


def test_a_kill_at_a_system_call_leaves_installed_or_absent(release_dir: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    if subprocess.run([strace, "-qq", "-o", "/dev/null", "true"], capture_output=True).returncode != 0:
        pytest.skip("strace may not trace here")
    done = subprocess.run([sys.executable, SCRIPT, "--quick", release_dir], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("installation: killed at ")
    assert lines[0].endswith("; 0 in between")
    assert int(re.match(r"(\d+) kills", lines[1])[1]) >= 4  # type: ignore[index]
