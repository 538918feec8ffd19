"""GitHub releases, by tag: never `latest`, which points at a release without files.

The answer's shape is that of GitHub's REST API, "Get a release by tag name"; `digest` is there since June 2025.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from llmgw.domain.engines import Asset, EngineSpec, Origin
from llmgw.errors import DigestMismatch, FetchError, HttpError, InstallError, NotPublished
from llmgw.sources.ask import NAME, SHA256, ask, parse_json, size_of
from llmgw.system.http import Http, Response, is_loopback
from llmgw.system.partial import sha256_of
from llmgw.system.redirects import LOOPBACK_HOSTS, host_allowed, open_following
from llmgw.system.retry import RetryPolicy, retry_after
from llmgw.units import format_duration

API = "https://api.github.com"
HOSTS = frozenset({"github.com", "release-assets.githubusercontent.com", "objects.githubusercontent.com"})
_POINTER = "nightly-tag.txt"
_POINTED = re.compile(r"b\d{1,9}")
_REPO = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")


class GithubSource:
    """Releases of a GitHub repository.

    Args:
        http: the client.
        api: base of the API; another one than GitHub's own for closed networks.
        token: raises the rate limit; sent to the API only.
        now: seconds since the epoch, to tell how far away a reset is.
        policy: when a broken question is repeated.
    """

    text = "github"

    def __init__(
        self,
        http: Http,
        *,
        api: str = API,
        token: str = "",
        now: Callable[[], float] = time.time,
        policy: RetryPolicy | None = None,
    ) -> None:
        self._http = http
        self._api = api.rstrip("/")
        self._token = token
        self._now = now
        self._policy = policy
        parts = urlsplit(self._api)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            raise InstallError(
                "cannot use the GitHub API named by `LLMGW_GITHUB_API`",
                cause="it is neither https nor on loopback",
                hint="write an `https://` address",
            )

    @classmethod
    def from_env(cls, http: Http, env: Mapping[str, str]) -> GithubSource:
        """With `LLMGW_GITHUB_API` and `GITHUB_TOKEN` as the environment has them."""
        return cls(http, api=env.get("LLMGW_GITHUB_API") or API, token=env.get("GITHUB_TOKEN", ""))

    def __repr__(self) -> str:
        return f"GithubSource({self._api!r})"

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]:  # noqa: ARG002
        """The uploaded files of the release with the origin's tag; see `Source.assets`."""
        found = self._release(origin.github_repo, origin.tag)
        pointer = next((asset for asset in found if asset.name == _POINTER), None)
        if pointer is None:
            return found
        tag = self._pointed(pointer, origin)
        followed = self._release(origin.github_repo, tag)
        if any(asset.name == _POINTER for asset in followed):
            raise NotPublished(
                f"`{origin.tag}` of `{origin.github_repo}` has no files",
                cause=f"it points at `{tag}`, which points elsewhere again",
                hint="name a version such as `b10991` itself",
            )
        return followed

    def _release(self, repo: str, tag: str) -> tuple[Asset, ...]:
        if not _REPO.fullmatch(repo):
            raise InstallError(f"`{repo}` is not the name of a GitHub repository")
        headers = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        url = f"{self._api}/repos/{repo}/releases/tags/{quote(tag, safe='')}"
        response = ask(self._http, url, "GitHub", headers=headers, policy=self._policy)
        if response.status != 200:
            raise self._refusal(response, repo, tag)
        release = parse_json(response, "GitHub")
        listed = release.get("assets") if isinstance(release, dict) else None
        if not isinstance(listed, list):
            raise InstallError("cannot read the answer of GitHub", cause="it lists no assets")
        uploaded = tuple(asset for asset in map(_asset, listed) if asset is not None)
        if not uploaded:
            raise NotPublished(
                f"`{tag}` of `{repo}` is not published yet",
                cause="the release is there, its files are not" + (" uploaded yet" if listed else ""),
                hint="it is tried again; a release that stays empty was never finished: name another version",
            )
        return uploaded

    def _refusal(self, response: Response, repo: str, tag: str) -> InstallError:
        status, headers = response.status, response.headers
        if status == 404:
            return NotPublished(
                f"`{tag}` of `{repo}` is not published yet",
                cause="GitHub has no release of this tag",
                hint="it is tried again; check the version if it is not a new one",
            )
        if status == 401:
            return InstallError(
                "cannot ask GitHub", cause="it refuses the token in `GITHUB_TOKEN`", hint="renew the token, or unset it"
            )
        wait_s = retry_after(headers, self._now())
        reset = headers.get("x-ratelimit-reset", "")
        if status in (403, 429) and wait_s is None and reset.isascii() and reset.isdigit() and len(reset) < 12:
            spent = headers.get("x-ratelimit-remaining", "0").strip() == "0"
            wait_s = max(1.0, int(reset) - self._now()) if spent or status == 429 else None
        if wait_s is not None or status == 429:
            when = ""
            if wait_s is not None:
                clock = time.strftime("%H:%M", time.localtime(self._now() + wait_s))
                when = f" until {clock} (in {format_duration(wait_s)})"
            limit = headers.get("x-ratelimit-limit", "")
            of = f" of {limit} questions an hour" if limit.isdigit() else ""
            return InstallError(
                "cannot ask GitHub",
                cause=f"the rate limit{of} for this address is used up{when}; all machines behind one address share it",
                hint="set `GITHUB_TOKEN`, or name a mirror or `pypi` under `sources`",
                code="rate-limited",
                retry_after_s=wait_s,
            )
        return InstallError("cannot ask GitHub", cause=f"it answered {status} for `{tag}` of `{repo}`")

    def _pointed(self, pointer: Asset, origin: Origin) -> str:
        hosts, allow_http = allowed(self._api)
        message = f"cannot follow `{origin.tag}` of `{origin.github_repo}` to its build"
        if not host_allowed(pointer.url, hosts):
            raise InstallError(message, cause=f"`{_POINTER}` is on a host this source may not use")
        try:
            with open_following(
                self._http,
                pointer.url,
                headers={},
                credentials={},
                allowed_hosts=hosts,
                allow_http=allow_http,
                connect_timeout_s=10.0,
                read_timeout_s=10.0,
            ) as stream:
                if stream.status != 200:
                    raise InstallError(message, cause=f"`{_POINTER}` was answered with {stream.status}")
                body = bytearray()
                for piece in stream:
                    body += piece
                    if len(body) > 256:
                        break
        except (HttpError, FetchError) as error:
            raise InstallError(message, cause=error.words()) from error
        if pointer.sha256 is not None and sha256_of(body) != pointer.sha256:
            raise DigestMismatch(
                message, cause=f"`{_POINTER}`: expected sha256 {pointer.sha256}, found {sha256_of(body)}"
            )
        tag = bytes(body).strip().decode("ascii", "replace")
        if not _POINTED.fullmatch(tag):
            raise InstallError(message, cause=f"`{_POINTER}` does not hold a tag such as `b10991`")
        return tag


def allowed(api: str) -> tuple[frozenset[str], bool]:
    """Where files of a release may come from, and whether plain http will do: only for an API on loopback."""
    parts = urlsplit(api)
    if is_loopback(parts.hostname or ""):
        return HOSTS | LOOPBACK_HOSTS, True
    return HOSTS | {parts.netloc.rpartition("@")[2].lower()}, False


def _asset(entry: Any) -> Asset | None:
    """One entry of `assets`; None for one that is not (or not wholly) uploaded, or whose name no file could have."""
    if not isinstance(entry, dict) or entry.get("state", "uploaded") != "uploaded":
        return None
    name, url, digest = entry.get("name"), entry.get("browser_download_url"), entry.get("digest")
    if not isinstance(name, str) or not isinstance(url, str) or not NAME.fullmatch(name):
        return None
    sha256 = None
    if isinstance(digest, str) and digest.startswith("sha256:") and SHA256.fullmatch(digest[7:]):
        sha256 = digest[7:].lower()
    return Asset(name, url, size_of(entry.get("size")), sha256, "github")
