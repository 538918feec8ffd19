"""The server as a source: it asked once for the whole fleet, keeps the archives, and hands them on.

Names, sizes and digests come with the desired set over the agent's own connection; only bytes come over HTTP.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from llmgw.domain.engines import Asset, EngineSpec, Origin, Progress, Release
from llmgw.errors import FetchStopped, HttpError, InstallError, NotPublished
from llmgw.sources.ask import NAME, SHA256
from llmgw.system import http_words
from llmgw.system.fetch import Told
from llmgw.system.http import Http, Response, is_loopback
from llmgw.system.retry import RetryPolicy, retry_after, wait
from llmgw.units import format_duration

TEXT = "server"
PATH = "/assets"
FETCHING = "asset-fetching"
_ASKING_S = 120.0
_STALL_S = 180.0
_PAUSE_S = 0.5


def asset_path(sha256: str, name: str) -> str:
    """Where the server serves a file, below its own address."""
    return f"{PATH}/{sha256.lower()}/{quote(name, safe='')}"


def compose(assets_at: str, dialled: str) -> str:
    """The base address of the server's archives.

    Args:
        assets_at: `http://HOST:PORT` as the server said it; `*` stands for the host the agent dials.
        dialled: URL of the server this agent is connected to, `https://HOST:PORT`; "" when it never was.

    Raises:
        InstallError: the server serves no archives, or only on its own loopback.
    """
    if not assets_at:
        raise InstallError("the server hands on no archives", hint="bring the server to this agent's version")
    mine = urlsplit(dialled).hostname or ""
    host = f"[{mine}]" if ":" in mine else mine
    base = assets_at.replace("//*:", f"//{host}:", 1)
    if is_loopback(urlsplit(base).hostname or "") and not is_loopback(mine):
        raise InstallError(
            "the server's archives cannot be reached from this node",
            cause=f"it serves them at `{assets_at}`, its own loopback",
            hint="set `http.listen` in server.yaml to an address that nodes can reach",
        )
    return base


class Releases:
    """What the server said last; the session writes it, the installer's thread reads it and waits for it.

    Args:
        asking_s: how long an installation waits for the server to have asked.

    Attributes:
        on_news: called from the session's thread when the server has got what it could not get before.
    """

    def __init__(self, asking_s: float = _ASKING_S) -> None:
        self._asking_s = asking_s
        self.on_news: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._known: dict[tuple[str, str], Release] = {}
        self._assets_at = ""
        self._dialled = ""
        self._closed = False

    def take(self, releases: tuple[Release, ...], assets_at: str, dialled: str) -> None:
        """Take the full set that came with the desired set.

        Args:
            dialled: URL of the server it came from.
        """
        with self._changed:
            lacked = {key for key, each in self._known.items() if not each.assets and not each.asking}
            self._known = {(each.engine, each.version): each for each in releases}
            news = any(self._known[key].assets for key in lacked & self._known.keys())
            self._assets_at, self._dialled = assets_at, dialled
            self._changed.notify_all()
        if news:
            self.on_news()

    def close(self) -> None:
        """Let go of whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def find(self, engine: str, version: str) -> tuple[Release, str]:
        """The release, once the server has asked, and the base address of its files.

        Raises:
            NotPublished, InstallError: there is none; in the server's words.
        """
        key = (engine, version)
        with self._changed:

            def settled() -> bool:
                release = self._known.get(key)
                return self._closed or release is None or not release.asking

            self._changed.wait_for(settled, self._asking_s)
            release, assets_at, dialled = self._known.get(key), self._assets_at, self._dialled
        if release is None:
            raise InstallError(f"the server does not hand on {engine} `{version}`")
        if release.asking:
            raise InstallError(
                f"the server has no answer about {engine} `{version}` yet",
                cause=release.words or f"it has been asking for {format_duration(self._asking_s)}",
                retry_after_s=_PAUSE_S,
            )
        if not release.assets:
            words = release.words or "it does not say why"
            raise NotPublished(
                f"the server cannot get {engine} `{version}`", cause=words, retry_after_s=release.retry_after_s
            )
        return release, compose(assets_at, dialled)


class ServerSource:
    """What the server resolved; see `Source`."""

    text = TEXT

    def __init__(self, releases: Releases) -> None:
        self._releases = releases

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]:  # noqa: ARG002
        """The files of the version as the server has pinned them; waits while it still asks. See `Source.assets`."""
        release, base = self._releases.find(spec.name, spec.version)
        return tuple(_mine(asset, base) for asset in release.assets if NAME.fullmatch(asset.name))


def _mine(asset: Asset, base: str) -> Asset:
    sha256 = asset.sha256 if asset.sha256 and SHA256.fullmatch(asset.sha256) else None
    url = base + asset_path(sha256, asset.name) if sha256 else ""
    return Asset(asset.name, url, asset.size_bytes, sha256, TEXT)


def await_kept(
    http: Http,
    asset: Asset,
    *,
    progress: Told | None = None,
    stop: threading.Event | None = None,
    stall_s: float = _STALL_S,
    policy: RetryPolicy | None = None,
) -> None:
    """Wait until the server has the file whole and verified; many nodes may want it while it is on its way.

    Args:
        progress: told the server's own (bytes done, bytes in all or None).
        stall_s: given up when the server's own download made no progress for that long.

    Raises:
        InstallError: the server cannot get it, in its words, or cannot be asked.
        FetchStopped: `stop` was set.
    """
    policy = policy or RetryPolicy(attempts=6)
    failures, last, moved = 0, Progress(0), time.monotonic()
    while True:
        cause, after = "", None
        try:
            answer = http.request("GET", asset.url, headers={"Range": "bytes=0-0"}, timeout_s=30.0, max_bytes=1 << 16)
            if answer.status in (200, 206):
                return
            said, now = _said(answer)
            if said.get("code") == FETCHING:
                failures = 0
                if now != last:
                    last, moved = now, time.monotonic()
                    if progress is not None:
                        progress(now.done_bytes, now.total_bytes)
                if time.monotonic() - moved < stall_s:
                    if wait(stop, _PAUSE_S):
                        raise FetchStopped(f"waiting for `{asset.name}` was stopped")
                    continue
                raise InstallError(
                    f"the server does not get on with `{asset.name}`",
                    cause=f"{said.get('message', '')}; no byte more for {format_duration(stall_s)}",
                )
            if answer.status not in (503, 504):
                raise _refused(asset, answer, said)
            cause = said.get("message") or f"it answered {answer.status}"
            after = retry_after(answer.headers)
        except HttpError as error:
            if error.status in (200, 206):  # the whole file in answer to a question for its first byte: it is there
                return
            cause = error.cause or error.message
        failures += 1
        pause = policy.pause(failures, after)
        if pause is None:
            raise InstallError(f"cannot ask {http_words.peer(asset.url)} for `{asset.name}`", cause=cause)
        if wait(stop, pause):
            raise FetchStopped(f"waiting for `{asset.name}` was stopped")


def _said(answer: Response) -> tuple[Mapping[str, str], Progress]:
    try:
        data: Any = json.loads(answer.body)
        error, progress = data["error"], data.get("progress") or {}
        done, total = progress.get("done_bytes"), progress.get("total_bytes")
        known = {name: value for name, value in error.items() if isinstance(value, str)}
        return known, Progress(done if isinstance(done, int) else 0, total if isinstance(total, int) else None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, Progress(0)


def _refused(asset: Asset, answer: Response, said: Mapping[str, str]) -> InstallError:
    message = said.get("message") or f"it answered {answer.status}"
    cause = said.get("cause", "")
    return InstallError(
        f"the server cannot hand on `{asset.name}`",
        cause=f"{message}: {cause}" if cause else message,
        hint=said.get("hint", ""),
        retry_after_s=retry_after(answer.headers),
    )
