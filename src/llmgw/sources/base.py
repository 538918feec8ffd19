"""What a source is, and which one a line of configuration names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from llmgw.domain.engines import Asset, EngineSpec, Origin
from llmgw.errors import UsageError
from llmgw.system import http_words
from llmgw.system.http import Http, is_loopback

if TYPE_CHECKING:
    from llmgw.sources.server import Releases


class Source(Protocol):
    """Lists what a version of an engine is made of."""

    @property
    def text(self) -> str:
        """As written in the configuration, such as `github`."""
        ...

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]:
        """The files of one version.

        Args:
            origin: where the provider publishes.
            spec: the wanted engine.
            arch: of the node, as `uname -m` has it.

        Raises:
            NotPublished: this source does not have the version, or not yet.
            InstallError: the source could not be asked; `retry_after_s` when it said when to come back.
        """
        ...


def make_source(
    text: str, http: Http, *, env: Mapping[str, str] | None = None, releases: Releases | None = None
) -> Source:
    """The source that `text` names: `server`, `github`, `pypi`, `https://mirror/base/` or `file:///dir`.

    Args:
        releases: what the server said of its releases; None where there is no server to ask.
        env: looked up for `GITHUB_TOKEN` and `LLMGW_GITHUB_API`; None means the process's own.

    Raises:
        UsageError: it names none.
    """
    from llmgw.sources.github import GithubSource
    from llmgw.sources.mirror import FileSource, MirrorSource
    from llmgw.sources.pypi import PypiSource
    from llmgw.sources.server import ServerSource

    if text == ServerSource.text and releases is not None:
        return ServerSource(releases)
    if text == "github":
        return GithubSource.from_env(http, os.environ if env is None else env)
    if text == "pypi":
        return PypiSource()
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme == "file" and parts.path.startswith("/") and parts.netloc in ("", "localhost"):
        return FileSource(text)
    if parts.scheme == "https" and parts.hostname:
        return MirrorSource(text, http)
    if parts.scheme == "http" and is_loopback(parts.hostname or ""):
        return MirrorSource(text, http)
    raise UsageError(
        f"`{http_words.shown(text)}` is not a source of engines",
        cause="plain http is for loopback only" if parts.scheme == "http" else "",
        hint="write `server`, `github`, `pypi`, `https://mirror/base/` or `file:///dir`",
    )
