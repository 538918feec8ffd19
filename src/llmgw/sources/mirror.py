"""Mirrors: a directory, on a web server or on disk, with a `SHA256SUMS` as `sha256sum` writes it."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from llmgw.domain.engines import Asset, EngineSpec, Origin
from llmgw.errors import InstallError, NotPublished
from llmgw.sources.ask import NAME, ask
from llmgw.system import http_words
from llmgw.system.files import read_text
from llmgw.system.http import Http
from llmgw.system.retry import RetryPolicy

_SUMS = "SHA256SUMS"
_LINE = re.compile(r"\\?([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


class MirrorSource:
    """`BASE/TAG/SHA256SUMS`, else `BASE/SHA256SUMS`, with the files beside it."""

    def __init__(self, base: str, http: Http, policy: RetryPolicy | None = None) -> None:
        self._base = base.rstrip("/") + "/"
        self._http = http
        self._policy = policy

    @property
    def text(self) -> str:
        return http_words.shown(self._base)

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]:  # noqa: ARG002
        """What `SHA256SUMS` lists; sizes are unknown until the download begins. See `Source.assets`."""
        tried = []
        for folder in (f"{self._base}{quote(origin.tag, safe='')}/", self._base):
            response = ask(self._http, folder + _SUMS, f"the mirror `{self.text}`", policy=self._policy)
            if response.status == 200:
                sums = parse_sums(response.body.decode("utf-8", "replace"), folder + _SUMS)
                names = _of_tag(sums, origin.tag, flat=folder == self._base)
                if names:
                    return tuple(Asset(name, folder + quote(name), None, sums[name], self.text) for name in names)
                tried.append(f"`{http_words.shown(folder + _SUMS)}` lists no file of it")
            elif response.status in (403, 404, 410):
                tried.append(f"`{http_words.shown(folder + _SUMS)}` was answered with {response.status}")
            else:
                raise InstallError(
                    f"cannot ask the mirror `{self.text}`", cause=f"it answered {response.status} for `{_SUMS}`"
                )
        raise _missing(origin.tag, f"the mirror `{self.text}`", tried)


class FileSource:
    """The same on this machine's disk: `file:///DIR`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._dir = Path(unquote(urlsplit(text).path))

    @property
    def text(self) -> str:
        return self._text

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]:  # noqa: ARG002
        """What `SHA256SUMS` lists, with sizes. See `Source.assets`."""
        if not self._dir.is_dir():
            raise InstallError(
                f"cannot read the source `{self._text}`",
                cause="the directory is not there",
                hint="mount it, or remove it from `sources`",
            )
        tried = []
        plain_tag = "/" not in origin.tag and origin.tag not in ("", ".", "..")
        for folder in (*((self._dir / origin.tag,) if plain_tag else ()), self._dir):
            text = read_text(folder / _SUMS)
            if text is None:
                tried.append(f"`{folder / _SUMS}` is not there or may not be read")
                continue
            sums = parse_sums(text, str(folder / _SUMS))
            names = _of_tag(sums, origin.tag, flat=folder == self._dir)
            if names:
                return tuple(self._asset(folder / name, sums[name]) for name in names)
            tried.append(f"`{folder / _SUMS}` lists no file of it")
        raise _missing(origin.tag, f"`{self._text}`", tried)

    def _asset(self, path: Path, sha256: str) -> Asset:
        size = path.stat().st_size if path.is_file() else None
        return Asset(path.name, path.as_uri(), size, sha256, self._text)


def parse_sums(text: str, where: str) -> dict[str, str]:
    """File name -> sha256 from the output of `sha256sum`. Lines for files in other directories are left out.

    Raises:
        InstallError: a line cannot be read, or one name has two digests.
    """
    sums: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise InstallError(
                f"cannot read `{http_words.shown(where)}`", cause=f"line {number} is not a digest and a name"
            )
        name, digest = match[2], match[1].lower()
        if not NAME.fullmatch(name):
            continue
        if sums.setdefault(name, digest) != digest:
            raise InstallError(f"cannot read `{http_words.shown(where)}`", cause=f"`{name}` is listed with two digests")
    return sums


def _of_tag(sums: dict[str, str], tag: str, *, flat: bool) -> list[str]:
    """In a directory for many versions, only names with the tag in them belong to it."""
    token = re.compile(rf"(?<![A-Za-z0-9]){re.escape(tag)}(?![A-Za-z0-9])")
    return [name for name in sums if not flat or token.search(name)]


def _missing(tag: str, source: str, tried: list[str]) -> NotPublished:
    return NotPublished(
        f"`{tag}` is not published on {source}",
        cause=", and ".join(tried),
        hint=f"put the release's files there, with a `{_SUMS}` made by `sha256sum * > {_SUMS}`",
    )
