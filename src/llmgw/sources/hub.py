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
_ID = re.compile(r"hf:([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?:(.+)")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="next"')
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.")
_PAGES = 50


@frozen
class HubName:
    """`hf:ORG/REPO@REV:FILE` taken apart."""

    repo: str
    revision: str
    path: str


def parse(text: str) -> HubName:
    """Take `hf:ORG/REPO@REV:FILE` apart; without `@REV` it is `main`.

    Raises:
        UsageError: it is not of that form.
    """
    match = _ID.fullmatch(text)
    segments = match[3].split("/") if match else [""]
    if match is None or any(part in ("", ".", "..") for part in segments) or not match[3].isprintable():
        raise UsageError(f"`{text[:200]}` does not name a file on the hub", hint="write `hf:ORG/REPO@REVISION:FILE`")
    return HubName(match[1], match[2] or "main", match[3])


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
    """The file that `hf:ORG/REPO@REV:FILE` names now, at a commit: its address does not change any more.

    Args:
        env: `HF_ENDPOINT` and `HF_TOKEN`; None means the process's own.

    Raises:
        UsageError: it is not of that form, or is one part of a split model.
        NotPublished: the hub has no such repository, revision or file, or does not show it to us.
        InstallError: the hub could not be asked.
    """
    env = os.environ if env is None else env
    name = parse(text)
    shard = _SHARD.search(name.path)
    if shard and int(shard[1]) > 1:
        raise UsageError(
            f"`{text}` is one of {int(shard[1])} parts of a model",
            cause="models in parts are not fetched yet",
            hint="fetch all parts into one directory and name the first one's path",
        )
    base = endpoint(env)
    repo = f"{base}/api/models/{name.repo}"
    head = _json(http, f"{repo}/revision/{quote(name.revision, safe='')}", name, env, policy)[0]
    commit = head.get("sha") if isinstance(head, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise InstallError("cannot read the answer of the hub", cause=f"it names no commit for `{name.repo}`")
    folder = name.path.rpartition("/")[0]
    entry = _find(http, f"{repo}/tree/{commit}{'/' + quote(folder) if folder else ''}", name, env, policy)
    lfs = entry.get("lfs")
    oid = lfs.get("oid") if isinstance(lfs, dict) else None
    sha256 = oid.removeprefix("sha256:").lower() if isinstance(oid, str) else ""
    size = size_of(lfs.get("size")) if isinstance(lfs, dict) else None
    return Asset(
        name.path.rpartition("/")[2],
        f"{base}/{name.repo}/resolve/{commit}/{quote(name.path)}",
        size if size is not None else size_of(entry.get("size")),
        sha256 if SHA256.fullmatch(sha256) else None,
        TEXT,
    )


def _find(http: Http, url: str, name: HubName, env: Mapping[str, str], policy: RetryPolicy | None) -> dict[str, Any]:
    here, seen = url, []
    for _ in range(_PAGES):
        page, response = _json(http, here, name, env, policy)
        if not isinstance(page, list):
            raise InstallError("cannot read the answer of the hub", cause="its list of files is not a list")
        for entry in page:
            if isinstance(entry, dict) and entry.get("type") == "file":
                if entry.get("path") == name.path:
                    return entry
                seen.append(str(entry.get("path"))[:120])
        further = _NEXT.search(response.headers.get("link", ""))
        if further is None or not same_origin(further[1], url):
            break
        here = further[1]
    weights = [path for path in seen if path.endswith((".gguf", ".safetensors"))]
    listed = ", ".join(f"`{path}`" for path in (weights or seen)[:8] if path.isprintable())
    raise NotPublished(
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
