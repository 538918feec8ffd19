"""Starting further processes of this very llmgw: same file, same interpreter."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import zipfile
from pathlib import Path


def own_argv() -> list[str]:
    """The command that runs this llmgw again: the one-file executable when it was started as one, else the package."""
    started = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    if started is not None and started.is_file() and zipfile.is_zipfile(started):
        # as closed to PYTHONPATH and foreign site-packages as this process was started
        flags = [flag for flag, on in (("-I", sys.flags.isolated), ("-S", sys.flags.no_site)) if on]
        return [sys.executable, *flags, str(started.resolve())]
    return [sys.executable, "-m", "llmgw"]


def own_words() -> str:
    """What a person types in this shell to run this llmgw again: `llmgw` only where that is this one."""
    started = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    if started is not None and started.name == "llmgw" and os.access(started, os.X_OK):
        found = shutil.which("llmgw")
        if found is not None and Path(found).samefile(started):
            return "llmgw"
        return shlex.quote(str(started.absolute()))
    return shlex.join(own_argv())


def own_env() -> dict[str, str]:
    """The environment for a process of our own: this one's, with output that is written at once."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}
