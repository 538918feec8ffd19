"""Fetching one file: resumed where it broke, hashed while it streams, never in place before its bytes are right."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from attrs import field, frozen

from llmgw.errors import FetchError, FetchStopped, HttpError
from llmgw.system import http_words
from llmgw.system.http import Http, Stream
from llmgw.system.partial import Partial, blocks, file_sha256, looks_like_html, open_regular
from llmgw.system.redirects import open_following
from llmgw.system.retry import RetryPolicy, retry_after, wait
from llmgw.units import format_duration, format_size

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_RETRIED = (408, 425, 429, 500, 502, 503, 504)

Told = Callable[[int, int | None], None]


@frozen
class FetchLimits:
    """Bounds of one fetch.

    Args:
        min_rate: bytes per second; slower than that over `window_s` seconds ends the attempt.
        silence_s: longest time without a byte.
        unknown_bytes: most bytes taken when neither caller nor server says how many there are.
        retry: when a broken attempt is repeated.
    """

    min_rate: int = 1024
    window_s: float = 60.0
    connect_timeout_s: float = 10.0
    silence_s: float = 30.0
    unknown_bytes: int = 16 << 30
    retry: RetryPolicy = field(factory=RetryPolicy)


DEFAULT_LIMITS = FetchLimits()


class _Again(Exception):
    """The attempt broke in a way that may pass."""

    def __init__(self, error: FetchError) -> None:
        self.error = error


def fetch(
    http: Http,
    url: str,
    dest: Path,
    *,
    size_bytes: int | None = None,
    sha256: str | None = None,
    progress: Told | None = None,
    allowed_hosts: frozenset[str] = frozenset(),
    allow_http: bool = False,
    credentials: Mapping[str, str] | None = None,
    limits: FetchLimits = DEFAULT_LIMITS,
    stop: threading.Event | None = None,
) -> Path:
    """Bring the file at `url` (`https`, `http` or `file`) to `dest`.

    A broken transfer is resumed when the server says that the file is the same; bytes already there are hashed from
    disk. A `dest` that already has the digest is returned at once. Callers keep others from fetching the same `dest`.

    Args:
        size_bytes: announced size: not one byte more is taken, and fewer are refused. None when unknown.
        sha256: announced digest in hex. None when there is none: then the caller must not trust the bytes.
        progress: told (bytes done, bytes in all or None), ten times a second at most, and at the end.
        allowed_hosts: where redirects may lead beside the address's own origin, see `redirects.open_following`.
        allow_http: plain http is good enough (mirrors on loopback, tests).
        credentials: header fields for the address's own origin; no redirect takes them along.
        stop: set from another thread to end it.

    Raises:
        DigestMismatch: the bytes are not the announced ones; they are removed.
        FetchStopped: `stop` was set; what came so far is kept.
        FetchError: anything else, in words.
    """
    told = progress or (lambda _done, _total: None)
    if sha256 is not None and dest.is_file() and file_sha256(dest, stop) == sha256.lower():
        size = dest.stat().st_size
        told(size, size)
        return dest
    identity: dict[str, object] = {"url": http_words.shown(url), "size": size_bytes, "sha256": sha256}
    with Partial(dest, identity, stop) as partial:
        job = _Job(http, url, partial, size_bytes, sha256, told, allowed_hosts, allow_http, credentials or {}, limits)
        if urlsplit(url).scheme == "file":
            job.copy(stop)
        else:
            job.download(stop)
        told(partial.done, partial.done)
        return partial.finish(sha256, dest.name)


@frozen
class _Job:
    http: Http
    url: str
    partial: Partial
    size: int | None
    sha256: str | None
    told: Told
    allowed_hosts: frozenset[str]
    allow_http: bool
    credentials: Mapping[str, str]
    limits: FetchLimits

    @property
    def name(self) -> str:
        return http_words.shown(self.url)

    def failed(self, cause: str, *, hint: str = "", retry_after_s: float | None = None) -> FetchError:
        return FetchError(f"cannot fetch `{self.name}`", cause=cause, hint=hint, retry_after_s=retry_after_s)

    def copy(self, stop: threading.Event | None) -> None:
        parts = urlsplit(self.url)
        if parts.netloc not in ("", "localhost"):
            raise self.failed(f"`file://` with a host (`{parts.netloc}`) is not a local file")
        self.partial.restart()
        with open_regular(Path(unquote(parts.path))) as fd:
            self._take(blocks(fd, stop, self.name), self.size)
        self._whole(self.size)

    def download(self, stop: threading.Event | None) -> None:
        failures, restarted = 0, False
        while True:
            resumed = self.partial.done
            try:
                self._attempt(stop)
                if resumed and self.sha256 is not None and self.partial.sha256 != self.sha256.lower():
                    # the old bytes may be the wrong ones: once, all of them are fetched anew
                    if restarted:
                        return
                    restarted = True
                    self.partial.restart()
                    continue
                return
            except _Again as again:
                if stop is not None and stop.is_set():
                    raise FetchStopped(f"fetching `{self.name}` was stopped") from again
                failures += 1
                pause = self.limits.retry.pause(failures, again.error.retry_after_s)
                if pause is None:
                    raise again.error from again.error.__cause__
                if wait(stop, pause):
                    raise FetchStopped(f"fetching `{self.name}` was stopped") from again

    def _attempt(self, stop: threading.Event | None) -> None:
        have = self.partial.done
        if self.size is not None and have > self.size:
            self.partial.restart()
            have = 0
        if have and have == self.size:
            return
        headers: dict[str, str] = {"Accept": "*/*"}
        if have and (self.partial.validator or self.sha256 is not None):
            headers["Range"] = f"bytes={have}-"
            if self.partial.validator:
                headers["If-Range"] = self.partial.validator
        try:
            with (
                open_following(
                    self.http,
                    self.url,
                    headers=headers,
                    credentials=self.credentials,
                    allowed_hosts=self.allowed_hosts,
                    allow_http=self.allow_http,
                    connect_timeout_s=self.limits.connect_timeout_s,
                    read_timeout_s=min(self.limits.silence_s, self.limits.window_s),
                ) as stream,
                aborted_on(stream, stop),
            ):
                total = self._accept(stream, have)
                self._take(self._paced(stream, stop), total)
                if stop is not None and stop.is_set():
                    raise FetchStopped(f"fetching `{self.name}` was stopped")
                self._whole(total)
        except HttpError as error:
            kept = f" ({format_size(self.partial.done)} are kept)" if self.partial.done else ""
            raise _Again(self.failed(error.cause + kept)) from error

    def _accept(self, stream: Stream, have: int) -> int | None:
        """Judge the answer's head; returns how many bytes the whole file has, None when nobody says."""
        if stream.status == 206:
            match = _CONTENT_RANGE.fullmatch(stream.headers.get("content-range", ""))
            total = None if match is None or match[3] == "*" else int(match[3])
            same = not self.partial.validator or _validator(stream) in ("", self.partial.validator)
            if (
                match is not None
                and have
                and int(match[1]) == have
                and same
                and (total is None or self.size in (None, total))
            ):
                return self.size if total is None else total
            self.partial.restart()
            raise _Again(self.failed("it answered a request to go on with other bytes than those asked for"))
        if stream.status == 416 and have:
            self.partial.restart()
            raise _Again(self.failed("its file has changed: it does not reach as far as the bytes already here"))
        if stream.status != 200:
            raise self._refused(stream)
        length = stream.headers.get("content-length", "")
        total = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None
        if self.size is not None and total is not None and total != self.size:
            raise self.failed(self._other_size(stream, total), hint=_HTML_HINT if _is_html(stream) else "")
        self.partial.restart(_validator(stream))
        return self.size if self.size is not None else total

    def _other_size(self, stream: Stream, total: int) -> str:
        what = "an HTML page" if _is_html(stream) else "a file"
        return f"it answered 200 with {what} of {total} bytes where a file of {self.size} bytes was announced"

    def _refused(self, stream: Stream) -> FetchError | _Again:
        if stream.status in _RETRIED:
            after = retry_after(stream.headers)
            later = f" and asks to come back in {format_duration(after)}" if after else ""
            return _Again(self.failed(f"it answered {stream.status}{later}", retry_after_s=after))
        meaning = {401: " (not allowed)", 403: " (not allowed)", 404: " (not there)", 407: " (the proxy wants a login)"}
        return self.failed(f"it answered {stream.status}{meaning.get(stream.status, '')}")

    def _paced(self, stream: Stream, stop: threading.Event | None) -> Iterator[bytes]:
        start, count = time.monotonic(), 0
        for piece in stream:
            yield piece
            if stop is not None and stop.is_set():
                raise FetchStopped(f"fetching `{self.name}` was stopped")
            count += len(piece)
            spent = time.monotonic() - start
            if spent >= self.limits.window_s:
                if count < self.limits.min_rate * spent:
                    rate = format_size(round(count / spent))
                    raise _Again(self.failed(f"it sends too slowly: {rate} a second over {format_duration(spent)}"))
                start, count = time.monotonic(), 0

    def _take(self, pieces: Iterator[bytes], total: int | None) -> None:
        cap = self.limits.unknown_bytes if total is None else total
        said = 0.0
        for piece in pieces:
            if self.partial.done + len(piece) > cap:
                self.partial.discard()
                raise self.failed(f"it sends more than the announced {cap} bytes")
            self.partial.write(piece)
            now = time.monotonic()
            if now - said >= 0.1:
                said = now
                self.told(self.partial.done, total)

    def _whole(self, total: int | None) -> None:
        if total is None or self.partial.done == total:
            return
        done, head = self.partial.done, self.partial.head
        if looks_like_html(head):
            self.partial.discard()
            raise self.failed(
                f"it answered with an HTML page of {done} bytes where a file of {total} bytes was announced",
                hint=_HTML_HINT,
            )
        short = self.failed(f"it ended after {done} of {total} bytes")
        if urlsplit(self.url).scheme == "file":
            raise short
        raise _Again(short)


_HTML_HINT = "a proxy or a login page may answer in its place: open the address in a browser on this machine"


def _is_html(stream: Stream) -> bool:
    return "html" in stream.headers.get("content-type", "").lower()


def _validator(stream: Stream) -> str:
    """What tells one version of the file from another: a strong ETag, else its date (RFC 9110, 13.1.5)."""
    etag = stream.headers.get("etag", "")
    if etag and not etag.startswith("W/"):
        return etag
    return stream.headers.get("last-modified", "")


@contextlib.contextmanager
def aborted_on(stream: Stream, stop: threading.Event | None) -> Iterator[None]:
    """Wake the reader when `stop` is set, even while it waits for a byte."""
    if stop is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if stop.is_set():
                stream.abort()
                return

    watcher = threading.Thread(target=watch, name="fetch-stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def cache_name(sha256: str, name: str) -> str:
    """The name under which a verified file is kept: by its digest, with a readable rest.

    Args:
        sha256: hex digest of the file.
        name: what its source calls it; characters that are no good in a file name become `_`.
    """
    clean = re.sub(r"[^A-Za-z0-9._+-]", "_", name)[-120:].lstrip(".-") or "file"
    return f"{sha256.lower()[:16]}-{clean}"
