"""Directories of replicas that are no longer wanted: logs are kept a week for who asks why, then they go."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from llmgw.agent import handles

_LOG = logging.getLogger("llmgw.agent.litter")
KEEP_S = 7 * 86400.0


def collect(work_dir: Path, wanted: Iterable[str], now: float, keep_s: float = KEEP_S) -> list[Path]:
    """Remove the directories of replicas not in `wanted` in which nothing was written for `keep_s` seconds.

    One that still holds a handle is never removed: an engine may be running in it.

    Args:
        wanted: replica ids.
        now: seconds since the epoch.

    Returns:
        What was removed.
    """
    root = work_dir / "replicas"
    kept = {handles.replica_dir(work_dir, each).name for each in wanted}
    removed = []
    try:
        places = [each for each in root.iterdir() if each.is_dir() and not each.is_symlink()]
    except OSError:
        return []
    for where in places:
        if where.name in kept or not _is_old(where, now - keep_s):
            continue
        try:
            shutil.rmtree(where)
        except OSError as error:
            _LOG.warning("cannot remove `%s`: %s", where, error.strerror or error)
            continue
        removed.append(where)
        _LOG.info("removed `%s`: its replica has not been wanted here for a week", where)
    return removed


def _is_old(where: Path, before: float) -> bool:
    """Whether nothing in the directory is newer than `before`, and no handle is in it."""
    try:
        found = [where, *where.iterdir()]
        names = {each.name for each in found}
        if "handle.json" in names or "handle.json.broken" in names:
            return False
        return all(each.lstat().st_mtime < before for each in found)
    except OSError:
        return False
