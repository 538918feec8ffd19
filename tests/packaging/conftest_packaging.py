"""The executable as `scripts/build_pyz.sh` makes it, and the interpreters it must run on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llmgw

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "flows"))
MINORS = ("3.11", "3.12", "3.13", "3.14")


def build(*argv: str, root: Path = ROOT, umask: int = 0o022, **env: str) -> Path:
    """Run `build_pyz.sh` of a checkout; returns the file."""
    done = subprocess.run(
        [root / "scripts" / "build_pyz.sh", *argv],
        capture_output=True,
        text=True,
        cwd=root,
        umask=umask,
        env=os.environ | {"LLMGW_BUILD_CACHE": str(ROOT / ".cache" / "build")} | env,
    )
    assert done.returncode == 0, done.stderr
    return root / done.stdout.strip()


@pytest.fixture(scope="session")
def pyz() -> Path:
    """This machine's executable: built when anything changed, or the very file `LLMGW_TEST_PYZ` names."""
    given = os.environ.get("LLMGW_TEST_PYZ")
    made = Path(given) if given else build()
    assert made.name == f"llmgw-{llmgw.__version__}-linux-{platform.machine()}.pyz"
    return made


def find_interpreter(minor: str) -> str | None:
    """A CPython of that minor: among `LLMGW_TEST_PYTHONS` (paths, separated by `:`), on PATH, or pyenv's."""
    candidates = [p for p in os.environ.get("LLMGW_TEST_PYTHONS", "").split(":") if p]
    candidates += [found for found in [shutil.which(f"python{minor}")] if found]
    candidates += [str(p) for p in sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin/python3"))]
    for candidate in candidates:
        asked = [candidate, "-IS", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
        except OSError:
            continue
        if done.stdout.strip() == minor:  # a shim of pyenv is there and says that it has no such version
            return candidate
    return None


@pytest.fixture(params=MINORS)
def interpreter(request: pytest.FixtureRequest) -> str:
    """One interpreter after the other."""
    found = find_interpreter(request.param)
    if found is None:
        pytest.skip(f"no CPython {request.param} here: name one in LLMGW_TEST_PYTHONS")
    return found
