"""The long runs in their short form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.mark.parametrize(
    "line",
    ["fuzz_gateway", "fuzz_gateway_sockets", "chaos_gateway", "usage_gateway", "bench/gateway", "bench/gateway --tls"],
)
def test_the_short_form_ends_well(line: str) -> None:
    name, *flags = line.split()
    argv = [sys.executable, str(SCRIPTS / name), "--quick", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
