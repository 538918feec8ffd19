"""The archives the server keeps for its fleet: fetched once, verified, bounded in size, never served before whole."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from attrs import define, field, frozen

from llmgw.domain.engines import Asset, Progress
from llmgw.errors import DigestMismatch, InstallError, LlmgwError, NoSpace, UsageError
from llmgw.server.releases import IMPORTED
from llmgw.system.clock import Clock
from llmgw.system.fetch import cache_name
from llmgw.system.files import free_space, make_dir, sync_dir
from llmgw.system.partial import file_sha256
from llmgw.units import format_size

log = logging.getLogger(__name__)

PIECE = 1 << 20
_FLOOR = 256 << 20
_FAILED_FOR_S = 15.0
_AT_ONCE = 4
_UPLOAD = re.compile(r"upload-([0-9a-f]{64})")
_UPLOAD_AGE_S = 24 * 3600.0


class Fetch(Protocol):
    """Brings one file into a directory, verified (`sources.fetch_asset`)."""

    def __call__(
        self, asset: Asset, dest_dir: Path, *, progress: Callable[[int, int | None], None], stop: threading.Event
    ) -> Path: ...


@frozen
class Standing:
    """How a file is: `path` when it is here and verified, `error` when it cannot be had now, else on its way."""

    words: str = ""
    path: Path | None = None
    progress: Progress | None = None
    error: LlmgwError | None = None


@define
class _Job:
    asset: Asset
    progress: Progress = field(factory=lambda: Progress(0))
    error: LlmgwError | None = None
    until: float = 0.0
    done: bool = False


class Assets:
    """The cache.

    Args:
        directory: beside the state; made when missing.
        limit_bytes: files are removed, least recently used first, to stay within it; imported ones never are.
        imported: digests of files that cannot be fetched again.
    """

    def __init__(
        self,
        directory: Path,
        fetch: Fetch,
        clock: Clock,
        *,
        limit_bytes: int,
        imported: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._dir = directory
        self._fetch = fetch
        self._clock = clock
        self._limit = limit_bytes
        self._imported = imported
        self._lock = threading.Lock()
        self._uploads = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._verified: dict[str, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._turns = threading.Semaphore(_AT_ONCE)
        make_dir(directory, 0o700)
        for left in directory.glob("upload-*"):
            with contextlib.suppress(OSError):
                if clock.now() - left.stat().st_mtime > _UPLOAD_AGE_S:
                    left.unlink()

    def stop(self) -> None:
        """End running downloads; what they have so far stays for the next start."""
        self._stop.set()

    def want(self, asset: Asset) -> Standing:
        """How a file with a digest is; begins to fetch it when it has to be fetched. Does not wait."""
        sha256 = asset.sha256 or ""
        path = self._path(asset)
        with self._lock:
            if self._whole(path):
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(int(self._clock.now() * 1e9), path.stat().st_mtime_ns))
                return Standing(path=path)
            job = self._jobs.get(sha256)
            if job is not None and (not job.done or self._clock.monotonic() < job.until):
                return Standing(self._words(job), progress=job.progress, error=job.error)
            job = self._jobs[sha256] = _Job(asset, Progress(0, asset.size_bytes))
            threading.Thread(target=self._work, args=(job, path), name="fetch-asset", daemon=True).start()
            return Standing(self._words(job), progress=job.progress)

    def keeps(self, asset: Asset) -> bool:
        """Whether the file is here (it may have to be verified again before it is served)."""
        return asset.sha256 is not None and self._path(asset).is_file()

    def put_piece(self, asset: Asset, offset: int, piece: bytes) -> int:
        """Take a piece of an upload.

        Args:
            asset: with size and digest.
            offset: where the piece belongs; one that does not go on where the last one ended changes nothing.

        Returns:
            How many bytes are here; all of them only once they were verified.

        Raises:
            DigestMismatch: all are here and are not the announced ones; they are removed.
            NoSpace: it would not fit.
        """
        size, sha256, path = asset.size_bytes or 0, asset.sha256 or "", self._path(asset)
        part = self._dir / f"upload-{sha256}"
        with self._uploads:
            with self._lock:
                if self._whole(path):
                    return size
            have = part.stat().st_size if part.exists() else 0
            if have == size and have:
                # all came, and the server ended before it had looked at them
                self._accept(asset, part, path)
                return have
            if offset != have:
                return have
            if have + len(piece) > size:
                raise UsageError(f"`{asset.name}` is longer than the {size} bytes announced")
            if have == 0:
                self._make_room(asset.name, size)
            try:
                with part.open("ab") as out:
                    out.write(piece)
                    have += len(piece)
                    if have == size:
                        out.flush()
                        os.fsync(out.fileno())
            except OSError as error:
                part.unlink(missing_ok=True)
                raise NoSpace(f"cannot write `{part}`", cause=error.strerror or str(error)) from error
            if have == size:
                self._accept(asset, part, path)
            return have

    def _accept(self, asset: Asset, part: Path, path: Path) -> None:
        found = file_sha256(part)
        if found != asset.sha256:
            part.unlink(missing_ok=True)
            raise DigestMismatch(
                f"`{asset.name}` is refused", cause=f"expected sha256 {asset.sha256}, found {found}",
                hint="the file was damaged on its way, or belongs to another SHA256SUMS",
            )  # fmt: skip
        part.replace(path)
        sync_dir(self._dir)
        self._note(path)

    def _work(self, job: _Job, path: Path) -> None:
        asset = job.asset

        def told(done: int, total: int | None) -> None:
            job.progress = Progress(done, total if total is not None else asset.size_bytes)

        error: LlmgwError | None = None
        try:
            with self._turns:
                if asset.source == IMPORTED:
                    self._look(asset, path)
                    there = path
                else:
                    if not path.exists():
                        self._make_room(asset.name, asset.size_bytes or 0)
                    there = self._fetch(asset, self._dir, progress=told, stop=self._stop)
                self._note(there)
                self._make_room(asset.name, 0, keep=there)
        except LlmgwError as failure:
            error = failure
            log.error("cannot get %s from %s: %s", asset.name, asset.source, failure.words())
        except Exception as failure:
            log.exception("fetching %s failed", asset.name)
            error = InstallError("a fault inside the server", cause=type(failure).__name__)
        with self._lock:
            after = getattr(error, "retry_after_s", None)
            job.error, job.done = error, True
            job.until = self._clock.monotonic() + (max(1.0, min(after, 600.0)) if after else _FAILED_FOR_S)
            if error is None:
                self._jobs.pop(asset.sha256 or "", None)

    def _look(self, asset: Asset, path: Path) -> None:
        """Verify an imported file again: nothing but another import can bring it back."""
        gone = "is not in the cache any more"
        if path.is_file():
            if file_sha256(path, self._stop) == asset.sha256:
                return
            path.unlink(missing_ok=True)
            gone = "was damaged in the cache and is removed"
        raise InstallError(
            f"`{asset.name}` was imported and {gone}", hint="import it again: `llmgw ctl engines import FILE`"
        )

    def _words(self, job: _Job) -> str:
        done, total = job.progress.done_bytes, job.progress.total_bytes
        how_far = f"{format_size(total)}, {100 * done // total} %" if total else f"{format_size(done)} so far"
        return f"the server is fetching `{job.asset.name}` from {job.asset.source} ({how_far})"

    def _path(self, asset: Asset) -> Path:
        return self._dir / cache_name(asset.sha256 or "", asset.name)

    def _note(self, path: Path) -> None:
        stats = path.stat()
        with self._lock:
            self._verified[path.name] = (stats.st_size, stats.st_mtime_ns)

    def _whole(self, path: Path) -> bool:
        try:
            stats = path.stat()
        except OSError:
            return False
        return self._verified.get(path.name) == (stats.st_size, stats.st_mtime_ns)

    def _make_room(self, name: str, need: int, keep: Path | None = None) -> None:
        """Remove what was served longest ago until `need` bytes fit.

        Raises:
            NoSpace: they do not fit even then.
        """
        files = []
        for path in self._dir.iterdir():
            with contextlib.suppress(OSError):
                stats = path.stat()
                files.append((stats.st_atime_ns, stats.st_size, path))
        total = sum(size for _, size, _ in files)
        stay = {sha256[:16] for sha256 in self._imported()}
        for _, size, path in sorted(files):
            if total + need <= self._limit:
                break
            if path == keep or path.name[:16] in stay or _UPLOAD.fullmatch(path.name) or ".partial" in path.name:
                continue
            path.unlink(missing_ok=True)
            total -= size
            log.info("removed %s (%s) from the cache to stay within %s", path.name, format_size(size), self._limit)
        if need and total + need > self._limit:
            raise NoSpace(
                f"`{name}` ({format_size(need)}) does not fit into the cache of {format_size(self._limit)}",
                cause=f"{format_size(total)} in it were imported or are on their way",
                hint="raise `assets_limit` in server.yaml",
            )
        space = free_space(self._dir)
        if need and space.free_bytes < need + _FLOOR:
            raise NoSpace(
                f"`{self._dir}` needs {format_size(need)} for `{name}` and has {format_size(space.free_bytes)} free",
                hint="free some space on the server's file system",
            )
