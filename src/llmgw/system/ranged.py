"""Fetching one big file over several connections at once: in pieces by range, resumed piece by piece, verified whole.

`NAME.ranges.partial` has the file's full length (holes where nothing came yet), and a note beside it says which pieces
are there. The bytes count only once their digest is the announced one; then the file gets its name.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from llmgw.errors import DigestMismatch, FetchError, FetchStopped, HttpError
from llmgw.system import http_words
from llmgw.system.fetch import DEFAULT_LIMITS, FetchLimits, Told, aborted_on
from llmgw.system.files import free_space, sync_dir, write_atomic
from llmgw.system.http import Http, Stream
from llmgw.system.partial import file_sha256, writing
from llmgw.system.redirects import open_following
from llmgw.system.retry import retry_after, wait
from llmgw.units import format_size

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_RETRIED = (408, 425, 429, 500, 502, 503, 504)


class Throttle:
    """Lets at most so many bytes a second through, for all who share it. None lets everything through."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int, stop: threading.Event | None) -> None:
        """Wait until `count` more bytes may have come.

        Raises:
            FetchStopped: `stop` was set.
        """
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            pause = self._free_at - now
        if pause > 0.01 and wait(stop, pause):
            raise FetchStopped("the download was stopped")


@frozen
class Ranges:
    """How a big file is fetched.

    Args:
        connections: at once.
        piece_bytes: of one range; files shorter than two pieces are fetched in one go.
        floor_bytes: free space that is left on the file system, whatever comes.
        throttle: shared by all downloads that are to stay within one rate.
    """

    connections: int = 4
    piece_bytes: int = 32 << 20
    floor_bytes: int = 0
    throttle: Throttle = field(factory=lambda: Throttle(None))

    def fits(self, size_bytes: int | None) -> bool:
        """Whether a file is big enough to be fetched in pieces."""
        return self.connections > 1 and size_bytes is not None and size_bytes >= 2 * self.piece_bytes

    def check_room(self, directory: Path, name: str, need: int) -> None:
        """See that `need` more bytes fit above the floor.

        Raises:
            FetchError: they do not.
        """
        space = free_space(directory)
        if need and space.free_bytes < need + self.floor_bytes:
            kept = f" ({format_size(self.floor_bytes)} of it are to stay free)" if self.floor_bytes else ""
            raise FetchError(
                f"`{directory}` has no room for `{name}`",
                cause=f"it needs {format_size(need)} more and has {format_size(space.free_bytes)} free{kept}",
                hint="`llmgw ctl weights collect NODE` removes what is not used, or choose another `weights_dir`",
                code="no-space",
            )


class NoRangesError(Exception):
    """The server does not give parts of the file."""


class _Again(FetchError):
    """This part broke in a way that may pass."""


class _Changed(Exception):
    """The file at the server is another one than the pieces here belong to."""


def fetch_ranged(
    http: Http,
    url: str,
    dest: Path,
    *,
    size_bytes: int,
    sha256: str,
    ranges: Ranges,
    progress: Told | None = None,
    allowed_hosts: frozenset[str] = frozenset(),
    allow_http: bool = False,
    credentials: Mapping[str, str] | None = None,
    limits: FetchLimits = DEFAULT_LIMITS,
    stop: threading.Event | None = None,
) -> Path:
    """Bring the file at `url` to `dest` over several connections; see `fetch` for what they have in common.

    Raises:
        NoRangesError: the server gives no parts; nothing is left behind.
        DigestMismatch, FetchStopped, FetchError: as `fetch`.
    """
    told = progress or (lambda _done, _total: None)
    for last in (False, True):
        job = _Job(http, url, dest, size_bytes, sha256, ranges, told, allowed_hosts, allow_http, credentials, limits)
        try:
            job.run(stop)
            found = file_sha256(job.path, stop)
            if found == sha256.lower():
                job.finish()
                told(size_bytes, size_bytes)
                return dest
            resumed = job.resumed
            job.discard()
            if last or not resumed:
                raise DigestMismatch(
                    f"`{dest.name}` is not the announced file", cause=f"expected sha256 {sha256}, found {found}"
                )
        except _Changed:
            job.discard()
            if last:
                raise job.failed("its file changes while it is fetched") from None
        except NoRangesError:
            job.discard()
            raise
    raise AssertionError("unreachable")


class _Job:
    def __init__(
        self,
        http: Http,
        url: str,
        dest: Path,
        size: int,
        sha256: str,
        ranges: Ranges,
        told: Told,
        allowed_hosts: frozenset[str],
        allow_http: bool,
        credentials: Mapping[str, str] | None,
        limits: FetchLimits,
    ) -> None:
        self._http, self._url, self._dest, self._size = http, url, dest, size
        self._ranges, self._told, self._limits = ranges, told, limits
        self._hosts, self._allow_http, self._credentials = allowed_hosts, allow_http, credentials or {}
        self.path = dest.with_name(f"{dest.name}.ranges.partial")
        self._note = dest.with_name(f"{dest.name}.ranges.partial.json")
        self._identity = {
            "url": http_words.shown(url), "size": size, "sha256": sha256, "piece": ranges.piece_bytes,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._said = 0.0
        self._validator = ""
        self._have: set[int] = set()
        self._came: dict[int, int] = {}
        self._read_note()
        self.resumed = bool(self._have)
        count = -(-size // ranges.piece_bytes)
        self._left = [piece for piece in range(count) if piece not in self._have][::-1]

    def failed(self, cause: str, retry_after_s: float | None = None) -> FetchError:
        return FetchError(f"cannot fetch `{http_words.shown(self._url)}`", cause=cause, retry_after_s=retry_after_s)

    def _again(self, cause: str, retry_after_s: float | None = None) -> _Again:
        return _Again(self.failed("").message, cause=cause, retry_after_s=retry_after_s)

    def run(self, stop: threading.Event | None) -> None:
        self._ranges.check_room(self._dest.parent, self._dest.name, len(self._left) * self._ranges.piece_bytes)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with writing(self.path):
            fd = os.open(self.path, flags, 0o600)
        try:
            with writing(self.path):
                os.ftruncate(fd, self._size)
            workers = [
                threading.Thread(target=self._work, args=(fd,), name="fetch-range", daemon=True)
                for _ in range(min(self._ranges.connections, max(1, len(self._left))))
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.05)
                    if stop is not None and stop.is_set():
                        self._end.set()
            self._tell(True)
        finally:
            os.close(fd)
        if stop is not None and stop.is_set():
            raise FetchStopped(f"fetching `{http_words.shown(self._url)}` was stopped")
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        with writing(self.path):
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            self.path.chmod(0o644)
            self.path.replace(self._dest)
            sync_dir(self._dest.parent)
        self._note.unlink(missing_ok=True)

    def discard(self) -> None:
        self._note.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _read_note(self) -> None:
        try:
            note = json.loads(self._note.read_bytes())
            if self.path.stat().st_size == self._size and {**note, **self._identity} == note:
                self._validator = str(note["validator"])
                self._have = {int(piece) for piece in note["have"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self._have = set()

    def _work(self, fd: int) -> None:
        try:
            while not self._end.is_set():
                with self._lock:
                    if not self._left:
                        return
                    piece = self._left.pop()
                self._piece(fd, piece)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            self._end.set()

    def _piece(self, fd: int, piece: int) -> None:
        first = piece * self._ranges.piece_bytes
        last = min(first + self._ranges.piece_bytes, self._size) - 1
        failures = 0
        self._ranges.check_room(self._dest.parent, self._dest.name, last + 1 - first)
        while True:
            try:
                self._attempt(fd, piece, first + self._came.get(piece, 0), last)
                break
            except FetchError as error:
                if not isinstance(error, _Again):
                    raise
                failures += 1
                pause = self._limits.retry.pause(failures, error.retry_after_s)
                if pause is None or wait(self._end, pause):
                    raise
        # the bytes are on the disk before the note says so: a power cut must not leave holes that count
        with writing(self.path):
            os.fdatasync(fd)
        with self._lock:
            self._have.add(piece)
            note = {**self._identity, "validator": self._validator, "have": sorted(self._have)}
            write_atomic(self._note, json.dumps(note).encode())

    def _attempt(self, fd: int, piece: int, at: int, last: int) -> None:
        headers = {"Accept": "*/*", "Range": f"bytes={at}-{last}"}
        try:
            with (
                open_following(
                    self._http,
                    self._url,
                    headers=headers,
                    credentials=self._credentials,
                    allowed_hosts=self._hosts,
                    allow_http=self._allow_http,
                    connect_timeout_s=self._limits.connect_timeout_s,
                    read_timeout_s=self._limits.silence_s,
                ) as stream,
                aborted_on(stream, self._end),
            ):
                self._judge(stream, at, last)
                for block in stream:
                    if at + len(block) > last + 1:
                        raise self.failed("it sends more than the part it was asked for")
                    self._ranges.throttle.take(len(block), self._end)
                    with writing(self.path):
                        os.pwrite(fd, block, at)
                    at += len(block)
                    self._came[piece] = at - piece * self._ranges.piece_bytes
                    self._tell(False)
                    if self._end.is_set():
                        raise FetchStopped("the download was stopped")
        except HttpError as error:
            raise self._again(error.cause) from error
        if at != last + 1:
            raise self._again(f"a part of it ended {last + 1 - at} bytes early")

    def _judge(self, stream: Stream, at: int, last: int) -> None:
        if stream.status == 200:
            raise NoRangesError
        if stream.status in _RETRIED:
            after = retry_after(stream.headers)
            raise self._again(f"it answered {stream.status}", after)
        if stream.status == 416:
            raise _Changed
        if stream.status != 206:
            raise self.failed(f"it answered {stream.status}")
        match = _CONTENT_RANGE.fullmatch(stream.headers.get("content-range", ""))
        if match is None or (int(match[1]), int(match[2])) != (at, last):
            raise self.failed("it answered with another part than the one it was asked for")
        validator = stream.headers.get("etag", "") or stream.headers.get("last-modified", "")
        with self._lock:
            if int(match[3]) != self._size or (self._validator and validator != self._validator):
                raise _Changed
            self._validator = validator

    def _tell(self, now: bool) -> None:
        with self._lock:
            if not now and time.monotonic() - self._said < 0.1:
                return
            self._said = time.monotonic()
            piece = self._ranges.piece_bytes
            whole = sum(min(piece, self._size - each * piece) for each in self._have)
            done = whole + sum(count for each, count in self._came.items() if each not in self._have)
        self._told(min(done, self._size), self._size)
