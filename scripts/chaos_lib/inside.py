"""Runs a part of a chaos run in namespaces of its own, as root, and brings its figures back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from chaos_lib.figures import Result

_SHELL = '"$@"; code=$?; exit $code'  # a shell is the first process: it reaps orphans


def why_not() -> str:
    """Why namespaces cannot be had; "" when they can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    if shutil.which("unshare") is None:
        return "needs `unshare` (util-linux)"
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"cannot make namespaces: {done.stderr.strip()}"


def run_inside(name: str, module: str, quick: bool, *options: str, timeout_s: float = 1200) -> Result:
    """Run `inside(result, quick)` of `module` below `unshare OPTIONS`."""
    result = Result(name)
    problem = why_not()
    if problem:
        return result.skip(problem)
    scripts = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, (str(scripts), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [
            "unshare", *options, "--fork", "--kill-child", "/bin/sh", "-c", _SHELL, "sh",
            sys.executable, "-m", "chaos_lib.inside", name, module, "quick" if quick else "full",
        ],
        capture_output=True, text=True, timeout=timeout_s, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    try:
        data = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        result.failures.append(f"it ended with {done.returncode}: {done.stderr[-3000:]}")
        return result
    result.figures, result.failures, result.skipped = data["figures"], data["failures"], data["skipped"]
    return result


def main(name: str, module: str, quick: bool) -> None:
    import importlib

    result = Result(name)
    run: Callable[[Result, bool], None] = importlib.import_module(module).inside
    run(result, quick)
    print(json.dumps({"figures": result.figures, "failures": result.failures, "skipped": result.skipped}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "quick")
