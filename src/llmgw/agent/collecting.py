"""Fetched weights that no replica of this node uses: found and removed on request only.

Only what llmgw fetched is touched: files with a record in `.llmgw`, and what broken-off fetches left behind. Files that
somebody put into the weights directory by hand stay.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from attrs import frozen

from llmgw.errors import FileError
from llmgw.system.files import read_text

RECORDS = ".llmgw"
_LEFT = ("*.partial", "*.partial.json", ".fetching-*", ".*.wheel", ".*.pip")


@frozen
class Unused:
    """Something that may go: `what` is the source it was fetched from, or that it is left over."""

    path: Path
    size_bytes: int
    what: str
    record: Path | None = None


def unused(weights_dir: Path, models: Iterable[str], fetching: Iterable[str]) -> tuple[Unused, ...]:
    """What may be removed.

    Args:
        models: model texts of the replicas this node is to run.
        fetching: sources being fetched now; while there is one, nothing that is on its way is touched.
    """
    wanted, busy = set(models), set(fetching)
    keep = {weights_dir / _local(text) for text in wanted if _local(text)}
    records = {}
    for record in sorted((weights_dir / RECORDS).glob("*.json")):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            data = json.loads(read_text(record, 16 << 20) or "")
            top = _top(weights_dir, str(data["path"]))
            if str(data["text"]) in wanted | busy:
                keep |= {top} if top is not None else set()
            elif top is not None:
                records[record] = (top, str(data["text"]))
    found = []
    for record, (top, text) in records.items():
        if not any(top == each or top in each.parents for each in keep) and top.exists():
            found.append(Unused(top, _size(top), text.partition("#")[0], record))
    for pattern in () if busy else _LEFT:
        found += [Unused(path, _size(path), "left over from a fetch") for path in sorted(weights_dir.glob(pattern))]
    return tuple(found)


def remove(item: Unused) -> None:
    """Remove it; its record goes first, so that nothing half removed counts as fetched.

    Raises:
        FileError: it cannot be removed.
    """
    try:
        if item.record is not None:
            item.record.unlink(missing_ok=True)
        if item.path.is_dir() and not item.path.is_symlink():
            shutil.rmtree(item.path)
        else:
            item.path.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot remove `{item.path}`", cause=error.strerror or str(error)) from error


def _top(weights_dir: Path, path: str) -> Path | None:
    """The entry of the weights directory a record is about; None for a file elsewhere (`file:` is used in place)."""
    parts = Path(path).parts
    if not parts or path.startswith("/") or ".." in parts or parts[0].startswith(RECORDS):
        return None
    return weights_dir / parts[0]


def _local(text: str) -> str:
    scheme = urlsplit(text).scheme
    if scheme == "file":
        return unquote(urlsplit(text).path)
    return "" if scheme in ("hf", "https", "http", "pypi") else text


def _size(path: Path) -> int:
    total = 0
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            stats = each.lstat()
            # a file being fetched in parts has holes: what counts is what its removal frees
            total += min(stats.st_size, stats.st_blocks * 512) if each.is_file() else 0
    return total
