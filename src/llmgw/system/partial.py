"""A file on its way: `.partial` with a note of what it belongs to, until its bytes are the announced ones."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from llmgw.errors import DigestMismatch, FetchError, FetchStopped
from llmgw.system import http_words
from llmgw.system.files import sync_dir

_BLOCK = 1 << 20


class Partial:
    """Collects the bytes of `dest`. Use as a context manager; only one at a time may exist for a `dest`.

    Args:
        dest: the final path; bytes go to `NAME.partial` beside it, and a note of their origin to `NAME.partial.json`.
        identity: what must be unchanged for old bytes to be gone on with (address, announced size and digest).
        stop: set to end a long hash.
    """

    def __init__(self, dest: Path, identity: dict[str, object], stop: threading.Event | None) -> None:
        self.dest = dest
        self.path = dest.with_name(f"{dest.name}.partial")
        self._note_path = dest.with_name(f"{dest.name}.partial.json")
        self._identity = identity
        self._stop = stop
        self._hash = hashlib.sha256()
        self._fd = -1
        self.done = 0
        self.validator = ""
        self.head = b""

    def __enter__(self) -> Partial:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with writing(self.path):
            self._fd = os.open(self.path, flags, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                    raise FetchError(
                        f"cannot write `{self.path}`", cause="something that is not a file is in its place"
                    )
                note = self._read_note()
                if note is None:
                    os.ftruncate(self._fd, 0)
                else:
                    self.validator = note
                    self._hash_existing()
            except BaseException:
                os.close(self._fd)
                raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self.done == 0:
            self.discard()
        os.close(self._fd)

    def restart(self, validator: str = "") -> None:
        """Forget the bytes so far; `validator` (an ETag or a date) belongs to the bytes that come now."""
        with writing(self.path, self.discard):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            self._hash = hashlib.sha256()
            self.done, self.validator, self.head = 0, validator, b""
            self._note_path.unlink(missing_ok=True)
            self._note_path.write_text(json.dumps({**self._identity, "validator": validator}), "utf-8")

    def write(self, piece: bytes) -> None:
        """Append.

        Raises:
            FetchError: the disk did not take it; the bytes so far are removed when there is no room for them.
        """
        with writing(self.path, self.discard):
            view = memoryview(piece)
            while view:
                view = view[os.write(self._fd, view) :]
        self._hash.update(piece)
        self.done += len(piece)
        if len(self.head) < 64:
            self.head += piece[: 64 - len(self.head)]

    @property
    def sha256(self) -> str:
        """Of the bytes so far."""
        return self._hash.hexdigest()

    def finish(self, sha256: str | None, name: str) -> Path:
        """Check the digest, then move into place.

        Raises:
            DigestMismatch: the bytes are removed.
        """
        if sha256 is not None and self.sha256 != sha256.lower():
            found = self.sha256
            looks = " (the bytes look like an HTML page)" if looks_like_html(self.head) else ""
            self.discard()
            raise DigestMismatch(
                f"`{name}` is not the announced file",
                cause=f"expected sha256 {sha256.lower()}, found {found}{looks}",
                hint="the file was changed at its source, or on the way: ask whoever runs it, do not lift the check",
            )
        with writing(self.dest, self.discard):
            os.fchmod(self._fd, 0o644)
            os.fsync(self._fd)
            self.path.rename(self.dest)
            self._note_path.unlink(missing_ok=True)
            sync_dir(self.dest.parent)
        return self.dest

    def discard(self) -> None:
        """Remove what came so far."""
        for path in (self.path, self._note_path):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)

    def _read_note(self) -> str | None:
        try:
            with self._note_path.open("rb") as handle:
                note = json.loads(handle.read(1 << 16))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(note, dict) or not isinstance(note.get("validator"), str):
            return None
        return note["validator"] if {**self._identity, "validator": note["validator"]} == note else None

    def _hash_existing(self) -> None:
        for block in blocks(self._fd, self._stop, self.path.name):
            self.head = self.head or block[:64]
            self._hash.update(block)
            self.done += len(block)


def blocks(fd: int, stop: threading.Event | None, name: str) -> Iterator[bytes]:
    """The bytes of an open file from where it stands.

    Raises:
        FetchStopped: `stop` was set.
    """
    while block := os.read(fd, _BLOCK):
        yield block
        if stop is not None and stop.is_set():
            raise FetchStopped(f"reading `{name}` was stopped")


def file_sha256(path: Path, stop: threading.Event | None = None) -> str:
    """The sha256 of a regular file, in hex.

    Raises:
        FetchError: it cannot be read.
        FetchStopped: `stop` was set.
    """
    digest = hashlib.sha256()
    with open_regular(path) as fd:
        for block in blocks(fd, stop, path.name):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A read-only descriptor of a regular file; anything else (a pipe would block for ever) is refused.

    Raises:
        FetchError: it is not there, may not be read, or is not a file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FetchError(f"cannot read `{path}`", cause=http_words.os_words(error).lower()) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FetchError(f"cannot read `{path}`", cause="it is not a regular file")
        yield fd
    except OSError as error:
        raise FetchError(f"cannot read `{path}`", cause=http_words.os_words(error).lower()) from error
    finally:
        os.close(fd)


@contextlib.contextmanager
def writing(path: Path, no_room: Callable[[], None] | None = None) -> Iterator[None]:
    """Map an OSError to words; `no_room` is called first when the file system is full."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full and no_room is not None:
            no_room()
        raise FetchError(
            f"cannot write `{path}`",
            cause=http_words.os_words(error).lower(),
            hint="free some space on this file system, or choose another directory" if full else "",
            code="no-space" if full else "",
        ) from error


def fresh_dir(path: Path) -> Path:
    """An empty private directory at `path`; what a killed predecessor left there is removed.

    Raises:
        FetchError: it cannot be made.
    """
    shutil.rmtree(path, ignore_errors=True)
    with writing(path):
        path.mkdir(mode=0o700)
    return path


def looks_like_html(head: bytes) -> bool:
    """Whether a file's first bytes are those of an HTML page."""
    start = head.lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head"))


def sha256_of(data: bytes | bytearray) -> str:
    """The sha256 of bytes in memory, in hex."""
    return hashlib.sha256(data).hexdigest()
