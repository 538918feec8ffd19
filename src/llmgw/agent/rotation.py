"""Rotation of an engine's log without the engine's help: it appends, so the beginning can be taken away under it.

A run has `engine.log` and, once it was rotated, `engine.log.rotated` (what was taken away last) and `engine.log.cut`
(how many bytes were taken away in all). The run before it has the same three under `engine.log.1`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from pathlib import Path

from llmgw.errors import FileError
from llmgw.system.files import read_text, write_atomic

_COLLAPSE_RANGE = 0x08  # FALLOC_FL_COLLAPSE_RANGE, fallocate(2)
_PIECE = 1 << 20
_CATCH_UP = 8
steady = threading.Lock()
"""Held while the three files change together, and by who reads more than one of them."""


def _rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.rotated")


def _cut(path: Path) -> Path:
    return path.with_name(f"{path.name}.cut")


def cut_bytes(path: Path) -> int:
    """Bytes of this run that were taken away from `path` so far."""
    text = (read_text(_cut(path), 64) or "").strip()
    return int(text) if text.isdigit() else 0


def rotated_end(path: Path, limit: int) -> bytes:
    """The last `limit` bytes that were taken away, as far as they are kept."""
    try:
        with _rotated(path).open("rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - limit))
            return handle.read(limit)
    except OSError:
        return b""


def start_new(current: Path, previous: Path) -> Path:
    """Make room for a new run's log; the last run's is kept as the previous one. Returns the new log's path.

    Raises:
        FileError: the old log could not be put aside.
    """
    if not current.exists():
        return current
    try:
        with steady:
            for of in (_rotated, _cut):
                if of(current).exists():
                    of(current).replace(of(previous))
                else:
                    of(previous).unlink(missing_ok=True)
            current.replace(previous)
    except OSError as error:
        raise FileError(f"cannot put the log `{current}` aside", cause=error.strerror or str(error)) from error
    return current


def rotate(path: Path, limit_bytes: int) -> bool:
    """Move all but the end of a log that has grown past `limit_bytes` to its rotated part, which is replaced.

    Where the file system can cut a file's beginning off (ext4, XFS), no line is lost and none is there twice. Elsewhere
    the file is copied and truncated; what the engine writes in the microseconds between the two is lost.

    Returns:
        Whether it was rotated.
    """
    temp = path.with_name(f".{path.name}.rotated.tmp")
    try:
        with path.open("rb+", buffering=0) as log:
            size = os.fstat(log.fileno()).st_size
            if size <= limit_bytes:
                return False
            block = os.fstatvfs(log.fileno()).f_bsize
            cut = (size - 1) // block * block
            with temp.open("wb") as copy:
                os.fchmod(copy.fileno(), 0o600)
                _copy(log.fileno(), copy.fileno(), max(0, cut - limit_bytes), cut)
                with steady:
                    before = cut_bytes(path)
                    if cut == 0 or not _collapse(log.fileno(), cut):
                        cut = _truncate(log.fileno(), copy.fileno(), cut)
                    temp.replace(_rotated(path))
                    write_atomic(_cut(path), f"{before + cut}\n".encode(), 0o600)
    except (OSError, FileError):  # a full disk must not stop the supervisor; the log goes on growing
        with contextlib.suppress(OSError):
            temp.unlink()
        return False
    return True


def _copy(source: int, target: int, begin: int, end: int) -> None:
    while begin < end:
        piece = os.pread(source, min(_PIECE, end - begin), begin)
        if not piece:
            return
        view = memoryview(piece)
        while view:  # near the end of the space a write may take a part only
            view = view[os.write(target, view) :]
        begin += len(piece)


def _collapse(fd: int, length: int) -> bool:
    """Cut the first `length` bytes off; writers that append go on at the new end."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    if fallocate(fd, _COLLAPSE_RANGE, 0, length) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number))


def _truncate(fd: int, copy: int, copied: int) -> int:
    """Copy what has come meanwhile, until nothing has, and truncate at once. Returns the bytes taken away."""
    for _ in range(_CATCH_UP):
        size = os.fstat(fd).st_size
        if size == copied:
            break
        _copy(fd, copy, copied, size)
        copied = size
    os.ftruncate(fd, 0)
    return copied
