"""Model hubs: `hf:ORG/REPO@REV:FILE`. The revision becomes a commit, the commit a size and a sha256.

The answers' shapes are those of the Hugging Face Hub API (`/api/models/…/revision/…` and `…/tree/…`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from attrs import frozen

from llmgw.domain.engines import Asset
from llmgw.errors import InstallError, NotPublished, UsageError
from llmgw.sources.ask import SHA256, ask, parse_json, size_of
from llmgw.system import http_words
from llmgw.system.http import Http, Response, is_loopback
from llmgw.system.redirects import LOOPBACK_HOSTS, same_origin
from llmgw.system.retry import RetryPolicy, retry_after
from llmgw.units import format_duration

TEXT = "hub"
ENDPOINT = "https://huggingface.co"
HOSTS = frozenset({"huggingface.co", ".huggingface.co", ".hf.co"})
_ID = re.compile(
    r"hf:([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?(?::(.+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="next"')
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_INDEX = "model.safetensors.index.json"
_BESIDE = re.compile(r"[A-Za-z0-9][\w.-]*\.(?:json|txt|model|jinja|tiktoken|py)", re.ASCII)
_BESIDE_BYTES = 256 << 20
_BLOB = re.compile(r"[0-9a-f]{40}")
_PAGES = 50


@frozen
class HubName:
    """`hf:ORG/REPO@REV:FILE` taken apart. Without a file (`path` "") it is the repository's safetensors."""

    repo: str
    revision: str
    path: str


@frozen
class HubFile:
    """One file at a commit. `blob` is git's own name for its bytes (a SHA-1), for files outside LFS."""

    asset: Asset
    blob: str = ""


@frozen
class HubSet:
    """What one name stands for: one file, the parts of a split GGUF, or the files of a safetensors repository.

    Args:
        first: name of the file an engine is given; "" when it is given the directory.
        index: name of the file that lists the shards, "" when there is none.
    """

    repo: str
    commit: str
    files: tuple[HubFile, ...]
    first: str
    index: str = ""


def parse(text: str) -> HubName:
    """Take `hf:ORG/REPO@REV:FILE` apart; without `@REV` it is `main`.

    Raises:
        UsageError: it is not of that form.
    """
    match = _ID.fullmatch(text)
    path = (match[3] or "") if match else ""
    segments = path.split("/") if path else []
    if match is None or any(part in ("", ".", "..") for part in segments) or not path.isprintable():
        raise UsageError(f"`{text[:200]}` does not name a file on the hub", hint="write `hf:ORG/REPO@REVISION:FILE`")
    return HubName(match[1], match[2] or "main", path)


def endpoint(env: Mapping[str, str]) -> str:
    """The hub's address: `HF_ENDPOINT`, else the public one.

    Raises:
        InstallError: it is neither https nor on loopback.
    """
    base = (env.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    parts = urlsplit(base)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        raise InstallError(
            "cannot use the hub named by `HF_ENDPOINT`",
            cause="it is neither https nor on loopback",
            hint="write an `https://` address",
        )
    return base


def allowed(env: Mapping[str, str]) -> tuple[frozenset[str], bool]:
    """Where a file may come from, and whether plain http will do (only with a hub on loopback)."""
    parts = urlsplit(endpoint(env))
    if is_loopback(parts.hostname or ""):
        return HOSTS | LOOPBACK_HOSTS, True
    return HOSTS | {parts.netloc.rpartition("@")[2].lower()}, False


def credentials(url: str, env: Mapping[str, str]) -> dict[str, str]:
    """`HF_TOKEN` as a header field, for the hub itself only."""
    token = env.get("HF_TOKEN", "")
    return {"Authorization": f"Bearer {token}"} if token and same_origin(url, endpoint(env)) else {}


def resolve(text: str, http: Http, *, env: Mapping[str, str] | None = None, policy: RetryPolicy | None = None) -> Asset:
    """The one file that `hf:ORG/REPO@REV:FILE` names now; see `resolve_set`.

    Raises:
        UsageError: it stands for several files.
    """
    found = resolve_set(text, http, env=env, policy=policy)
    if len(found.files) != 1 or not found.first:
        raise UsageError(f"`{text}` stands for {len(found.files)} files", hint="name one file")
    return found.files[0].asset


def resolve_set(
    text: str, http: Http, *, env: Mapping[str, str] | None = None, policy: RetryPolicy | None = None
) -> HubSet:
    """What `hf:ORG/REPO@REV:FILE` stands for now, at a commit: the addresses do not change any more.

    One part of a split GGUF stands for all of its parts; no file at all for the repository's safetensors with all
    that belongs to them.

    Args:
        env: `HF_ENDPOINT` and `HF_TOKEN`; None means the process's own.

    Raises:
        UsageError: it is not of that form.
        NotPublished: the hub has no such repository, revision or file, does not show it to us, or lacks a part.
        InstallError: the hub could not be asked.
    """
    env = os.environ if env is None else env
    name = parse(text)
    base = endpoint(env)
    repo = f"{base}/api/models/{name.repo}"
    head = _json(http, f"{repo}/revision/{quote(name.revision, safe='')}", name, env, policy)[0]
    commit = head.get("sha") if isinstance(head, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise InstallError("cannot read the answer of the hub", cause=f"it names no commit for `{name.repo}`")
    folder = name.path.rpartition("/")[0]
    listed = _list(http, f"{repo}/tree/{commit}{'/' + quote(folder) if folder else ''}", name, env, policy)

    def file(path: str) -> HubFile:
        return _file(f"{base}/{name.repo}/resolve/{commit}/{quote(path)}", path, listed[path])

    if not name.path:
        return HubSet(
            name.repo, commit, tuple(map(file, _tensors(name, listed))), "", _INDEX if _INDEX in listed else ""
        )
    if name.path not in listed:
        raise _lacks(name, listed)
    shard = _SHARD.fullmatch(name.path)
    paths = [name.path]
    if shard and int(shard[3]) > 1:
        paths = [f"{shard[1]}-{number:05d}-of-{shard[3]}.gguf" for number in range(1, int(shard[3]) + 1)]
        missing = [path for path in paths if path not in listed]
        if missing:
            raise NotPublished(
                f"`{name.repo}` at `{name.revision}` has not all parts of `{name.path}`",
                cause=f"`{missing[0]}` is missing" + (f" and {len(missing) - 1} more" if missing[1:] else ""),
                hint="it is tried again; check the revision if its upload is not under way",
            )
    return HubSet(name.repo, commit, tuple(map(file, paths)), paths[0].rpartition("/")[2])


def _tensors(name: HubName, listed: Mapping[str, dict[str, Any]]) -> list[str]:
    shards = [path for path in listed if path.endswith(".safetensors")]
    if not shards or "config.json" not in listed:
        weights = [path for path in listed if path.endswith(".gguf")]
        raise NotPublished(
            f"`{name.repo}` at `{name.revision}` is no safetensors model",
            cause="it has no `*.safetensors`" if not shards else "it has no `config.json`",
            hint=f"name one of its files: {', '.join(f'`{path}`' for path in weights[:8])}" if weights else "",
        )
    beside = [
        path for path, entry in listed.items() if _BESIDE.fullmatch(path) and (entry.get("size") or 0) < _BESIDE_BYTES
    ]
    return sorted({*shards, *beside})


def _file(url: str, path: str, entry: dict[str, Any]) -> HubFile:
    lfs = entry.get("lfs")
    oid = lfs.get("oid") if isinstance(lfs, dict) else None
    sha256 = oid.removeprefix("sha256:").lower() if isinstance(oid, str) else ""
    size = size_of(lfs.get("size")) if isinstance(lfs, dict) else None
    blob = entry.get("oid")
    asset = Asset(
        path.rpartition("/")[2],
        url,
        size if size is not None else size_of(entry.get("size")),
        sha256 if SHA256.fullmatch(sha256) else None,
        TEXT,
    )
    return HubFile(asset, blob if isinstance(blob, str) and _BLOB.fullmatch(blob) and lfs is None else "")


def _list(
    http: Http, url: str, name: HubName, env: Mapping[str, str], policy: RetryPolicy | None
) -> dict[str, dict[str, Any]]:
    """The files of one folder, page by page."""
    here, seen = url, {}
    for _ in range(_PAGES):
        page, response = _json(http, here, name, env, policy)
        if not isinstance(page, list):
            raise InstallError("cannot read the answer of the hub", cause="its list of files is not a list")
        for entry in page:
            if isinstance(entry, dict) and entry.get("type") == "file" and isinstance(entry.get("path"), str):
                seen[entry["path"]] = entry
        further = _NEXT.search(response.headers.get("link", ""))
        if further is None or not same_origin(further[1], url):
            break
        here = further[1]
    return seen


def _lacks(name: HubName, seen: Mapping[str, Any]) -> NotPublished:
    weights = [path for path in seen if path.endswith((".gguf", ".safetensors"))]
    listed = ", ".join(f"`{path[:120]}`" for path in (weights or list(seen))[:8] if path.isprintable())
    return NotPublished(
        f"`{name.repo}` at `{name.revision}` has no file `{name.path}`",
        cause=f"it has {listed}" if listed else "there are no files at that place",
        hint="name one of these, spelled exactly so",
    )


def _json(
    http: Http, url: str, name: HubName, env: Mapping[str, str], policy: RetryPolicy | None
) -> tuple[Any, Response]:
    what = f"the hub {http_words.peer(url)}"
    response = ask(http, url, what, headers=credentials(url, env), policy=policy)
    if response.status == 200:
        return parse_json(response, what), response
    token = "the token in `HF_TOKEN` does not open it" if env.get("HF_TOKEN") else "`HF_TOKEN` is not set"
    if response.status in (401, 403):
        raise NotPublished(
            f"{what} does not show `{name.repo}`",
            cause=f"it answered {response.status}: the model is private, gated or not there, and {token}",
            hint="check the name, accept the model's terms on its page, and set `HF_TOKEN` for this node",
        )
    if response.status == 404:
        raise NotPublished(
            f"{what} has no `{name.repo}` at `{name.revision}`",
            cause="it answered 404",
            hint="check repository and revision, spelled exactly as on the model's page",
        )
    if response.status == 429:
        after = retry_after(response.headers)
        raise InstallError(
            f"cannot ask {what}",
            cause=f"its rate limit is used up{f', free again in {format_duration(after)}' if after else ''}",
            hint="set `HF_TOKEN`",
            code="rate-limited",
            retry_after_s=after,
        )
    raise InstallError(f"cannot ask {what}", cause=f"it answered {response.status} for `{name.repo}`")
