"""Plugins that lie beside the program: distributions in a directory, appended last so that none can shadow our own."""

from __future__ import annotations

import os
import site
import stat
from pathlib import Path


def add(directory: str) -> str:
    """Make the distributions in `directory` importable, as `pip install --target` puts them there.

    A directory that other users could write to is left out: whoever can write there would run as us.

    Returns:
        Words when it was left out; "" when it was added, or is not there.
    """
    path = Path(directory)
    try:
        info = path.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"plugins in `{path}` are left out: {error.strerror}"
    if not stat.S_ISDIR(info.st_mode):
        return f"plugins in `{path}` are left out: it is not a directory"
    if info.st_mode & 0o022 or info.st_uid not in (0, os.geteuid()):
        return f"plugins in `{path}` are left out: other users can write there (`chown root` and `chmod go-w` it)"
    site.addsitedir(str(path))
    return ""
