"""Files: atomic writes, locks, free space, small reads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from llmgw.errors import FileError, LockHeld


@frozen
class Space:
    """Free and total bytes of a file system, for an unprivileged writer; `device` tells file systems apart."""

    free_bytes: int
    total_bytes: int
    device: int


def read_text(path: Path, limit: int = 1 << 20) -> str | None:
    """The text of a small file, None when it is not there or may not be read; at most `limit` bytes."""
    try:
        with path.open("rb") as handle:
            return handle.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data` so that a reader, or a power cut, sees the old bytes or the new ones, nothing between.

    Raises:
        FileError: the old content is still there.
    """
    temp = ""
    try:
        fd, temp = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(fd, "wb") as handle:
            os.fchmod(handle.fileno(), mode)
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        Path(temp).replace(path)
        sync_dir(path.parent)
    except OSError as error:
        if temp:
            with contextlib.suppress(OSError):
                Path(temp).unlink()
        raise FileError(f"cannot write `{path}`", cause=error.strerror or str(error), hint=_hint(error)) from error


def sync_dir(path: Path) -> None:
    """Make renames in `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dir(path: Path, mode: int = 0o755) -> Path:
    """Create `path` and its parents.

    Raises:
        FileError: it cannot be created, with a hint.
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot create `{path}`", cause=error.strerror or str(error), hint=_hint(error)) from error
    return path


def free_space(path: Path) -> Space:
    """Space on the file system that holds `path`, or its nearest existing parent.

    Raises:
        FileError: the file system does not answer.
    """
    probe = path
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    try:
        stats = os.statvfs(probe)
        return Space(stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize, probe.stat().st_dev)
    except OSError as error:
        raise FileError(f"cannot read the free space of `{probe}`", cause=error.strerror or str(error)) from error


@contextlib.contextmanager
def lock(path: Path, holder: str) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created when missing); `holder` is written into it for whoever finds it held.

    Raises:
        LockHeld: another process holds it.
        FileError: the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise FileError(
            f"cannot open the lock `{path}`", cause=error.strerror or str(error), hint=_hint(error)
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "another process"
            raise LockHeld(
                f"`{path}` is held by {who}", hint="stop the other one, or give this one its own directory"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{holder} (pid {os.getpid()})\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _hint(error: OSError) -> str:
    return {
        errno.ENOSPC: "free some space on this file system",
        errno.EDQUOT: "raise the quota or free some space",
        errno.EROFS: "the file system is read-only: choose another directory",
        errno.EACCES: "run as a user who may write there, or choose another directory",
        errno.EPERM: "run as a user who may write there, or choose another directory",
    }.get(error.errno or 0, "")
