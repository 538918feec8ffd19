"""The long runs of docs/security.md in their quick form: each script judges itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("flood_wire", "120 silent + 12 flooding sockets: a good agent joined in "),
        ("fuzz_wire", "tracebacks and faults in the server's log: 0"),
        ("rotate_wire", "sessions ended by the server 0"),
        ("bench/wire", "0 faulty"),
    ],
)
def test_the_quick_form_of(script: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, "--quick"], capture_output=True, text=True, timeout=190, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout
