"""Models of several files from a hub: split GGUF and safetensors repositories. They appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from llmgw.errors import DigestMismatch, FetchError, InstallError
from llmgw.sources import hub
from llmgw.sources.ask import NAME
from llmgw.sources.get import fetch_asset
from llmgw.sources.hub import HubFile, HubSet
from llmgw.system.fetch import FetchLimits, Told, fetch
from llmgw.system.files import make_dir, sync_dir
from llmgw.system.http import Http
from llmgw.system.partial import writing
from llmgw.system.ranged import Ranges

STAGING = ".fetching-"
_INDEX_BYTES = 64 << 20


def directory_of(text: str, found: HubSet) -> str:
    """The name of the directory a set is kept in: readable, and one of its own for each name and commit."""
    own = hashlib.sha256(f"{text}\n{found.commit}".encode()).hexdigest()[:8]
    return f"{found.repo.replace('/', '--')}@{found.commit[:12]}-{own}"


def fetch_set(
    text: str,
    found: HubSet,
    dest_dir: Path,
    http: Http,
    *,
    progress: Told,
    stop: threading.Event | None,
    env: Mapping[str, str] | None,
    limits: FetchLimits,
    ranges: Ranges | None,
) -> tuple[Path, ...]:
    """Bring all files of a set; they get their place together, when the last one is verified.

    Returns:
        The files, in the set's order.

    Raises:
        InstallError, FetchError, FileError: it could not be had; what was verified stays for the next attempt.
    """
    target = dest_dir / directory_of(text, found)
    staging = dest_dir / f"{STAGING}{target.name}"
    files = found.files
    if found.index:
        # the index says which shards belong to the model; others beside them are another form of the same weights
        files = _only_needed(found, staging, http, env, limits, stop)
    for file in files:
        if not NAME.fullmatch(file.asset.name):
            raise InstallError(f"{file.asset.name[:100]!a} cannot be the name of a file")
    make_dir(staging)
    total = sum(file.asset.size_bytes or 0 for file in files)
    if ranges is not None:
        there = sum(path.stat().st_size for file in files if (path := staging / file.asset.name).is_file())
        ranges.check_room(dest_dir, target.name, max(0, total - there))
    done = 0
    for file in files:

        def told(came: int, _: int | None, before: int = done) -> None:
            progress(before + came, total)

        _bring(file, staging, http, told, stop, env, limits, ranges)
        done += file.asset.size_bytes or 0
    with writing(target):
        shutil.rmtree(target, ignore_errors=True)
        sync_dir(staging)
        staging.rename(target)
        sync_dir(dest_dir)
    return tuple(target / file.asset.name for file in files)


def _bring(
    file: HubFile,
    staging: Path,
    http: Http,
    told: Told,
    stop: threading.Event | None,
    env: Mapping[str, str] | None,
    limits: FetchLimits,
    ranges: Ranges | None,
) -> None:
    """One file under its own name; one that is there was verified before it got that name."""
    asset = file.asset
    path = staging / asset.name
    if path.is_file() and path.stat().st_size == asset.size_bytes:
        return
    if asset.sha256 is not None:
        kept = fetch_asset(asset, staging, http, progress=told, stop=stop, env=env, limits=limits, ranges=ranges)
    elif file.blob:
        kept = _bring_blob(file, staging, http, told, stop, env, limits)
    else:
        raise InstallError(f"`{asset.name}` is refused", cause="the hub publishes no digest for it", code="no-digest")
    with writing(path):
        kept.rename(path)


def _bring_blob(
    file: HubFile,
    staging: Path,
    http: Http,
    told: Told,
    stop: threading.Event | None,
    env: Mapping[str, str] | None,
    limits: FetchLimits,
) -> Path:
    asset = file.asset
    environ = env if env is not None else {}
    hosts, allow_http = hub.allowed(environ)
    path = staging / f"{asset.name}.unverified"
    fetch(
        http,
        asset.url,
        path,
        size_bytes=asset.size_bytes,
        progress=told,
        allowed_hosts=hosts,
        allow_http=allow_http,
        credentials=hub.credentials(asset.url, environ),
        limits=limits,
        stop=stop,
    )
    # git names a file by the SHA-1 of its length and bytes (git hash-object)
    data = path.read_bytes()
    found = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    if found != file.blob:
        path.unlink()
        raise DigestMismatch(
            f"`{asset.name}` is not the announced file", cause=f"expected git blob {file.blob}, found {found}"
        )
    return path


def _only_needed(
    found: HubSet,
    staging: Path,
    http: Http,
    env: Mapping[str, str] | None,
    limits: FetchLimits,
    stop: threading.Event | None,
) -> tuple[HubFile, ...]:
    by_name = {file.asset.name: file for file in found.files}
    make_dir(staging)
    _bring(by_name[found.index], staging, http, lambda _d, _t: None, stop, env, limits, None)
    try:
        with (staging / found.index).open("rb") as handle:
            needed = {str(name) for name in json.loads(handle.read(_INDEX_BYTES))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FetchError(f"`{found.index}` of `{found.repo}` cannot be read") from error
    missing = sorted(needed - by_name.keys())
    if missing:
        raise InstallError(
            f"`{found.repo}` is not whole", cause=f"its index names `{missing[0][:120]}`, which is not in it"
        )
    return tuple(file for name, file in by_name.items() if name in needed or not name.endswith(".safetensors"))
