"""What every room's tests may use: a real engine, tiny models, and waiting with a deadline."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def assets() -> Path:
    """Directory with `llama-b1/` (a runnable engine), `release/` (the same as a release) and tiny models."""
    cache = Path(os.environ.get("LLMGW_TEST_CACHE", ROOT / ".cache" / "test-assets"))
    subprocess.run([sys.executable, ROOT / "scripts" / "test_assets.py", cache], check=True, stdout=subprocess.DEVNULL)
    return cache


@pytest.fixture(scope="session")
def real_engine_dir(assets: Path) -> Path:
    """A directory with a real, runnable `llama-server` that calls itself build 1."""
    if platform.machine() != "x86_64":
        pytest.skip("the prebuilt llama-server of the package index is for x86_64 only")
    return assets / "llama-b1"


@pytest.fixture(scope="session")
def release_dir(assets: Path, real_engine_dir: Path) -> Path:
    """`llama-b1-bin-ubuntu-x64.tar.gz`, its SHA256SUMS and `release-b1.json` as the GitHub API gives it."""
    return assets / "release"


@pytest.fixture(scope="session")
def tiny_gguf(assets: Path) -> Path:
    """A model of 0.6 MB with random weights that generates whole words until `max_tokens`."""
    return assets / "tiny.gguf"


@pytest.fixture(scope="session")
def slow_gguf(assets: Path) -> Path:
    """A model slow enough to be interrupted in the middle of an answer."""
    return assets / "slow.gguf"


@pytest.fixture(scope="session")
def embedding_gguf(assets: Path) -> Path:
    """A tiny embedding model."""
    return assets / "tiny-embedding.gguf"


@pytest.fixture(scope="session")
def until() -> Callable[..., object]:
    """`until(lambda: x, 10, "what")`: the first truthy value, or a failure that says what was awaited."""

    def wait(condition: Callable[[], object], timeout_s: float = 15.0, what: str = "condition") -> object:
        deadline = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline:
                pytest.fail(f"waited {timeout_s:g} s for {what}; last value: {value!r}")
            time.sleep(0.02)

    return wait
