"""Python code run in a child of our own, with our own import path: for libraries that may hang, spin or crash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmgw.errors import CommandError
from llmgw.system.commands import Completed

RunArgv = Callable[[list[str], float], Completed]

_PREAMBLE = "import json, sys\nsys.path[:0] = json.loads(sys.argv[1])\n"


def import_path() -> list[str]:
    """The absolute entries of our import path: what a child needs to import what we import, inside a zipapp too."""
    return [entry for entry in sys.path if entry and Path(entry).is_absolute()]


def run_python(code: str, run: RunArgv, timeout_s: float) -> Mapping[str, Any]:
    """Run `code` in a child interpreter; it prints one JSON object as its last line.

    Args:
        run: starts an argv with a deadline in seconds.

    Raises:
        CommandError: there is no interpreter to start, it failed, or it printed something else; with words.
    """
    if not sys.executable:
        raise CommandError("cannot start a Python child", cause="this program does not know its own interpreter")
    done = run([sys.executable, "-I", "-c", _PREAMBLE + code, json.dumps(import_path())], timeout_s)
    if done.timed_out or done.code != 0:
        raise CommandError(f"a Python child {done.words()}", cause=done.last_line()[:300])
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CommandError("a Python child gave no usable answer", cause=done.last_line()[:300])
    return answer
