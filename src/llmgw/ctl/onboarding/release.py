"""The release for a node's architecture: fetched by this machine, checked against the release's SHA256SUMS."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

import llmgw
from llmgw.errors import DigestMismatch, InstallError, NotPublished, UsageError

if TYPE_CHECKING:
    from llmgw.domain.engines import Asset
    from llmgw.system.http import Http

REPOSITORY = "llmgw/llmgw"
SUMS = "SHA256SUMS"


@frozen
class Release:
    """One file of a release on this machine, seen to have the announced digest."""

    name: str
    version: str
    path: Path
    sha256: str


class Releases:
    """Finds and keeps the files of one version; each architecture is fetched once, however many nodes ask.

    Args:
        source: `github`, `github:OWNER/NAME`, `https://MIRROR/`, or a directory.
        version: without a leading `v`; None means this llmgw's own.
        cache: where files are kept by digest.
    """

    def __init__(self, source: str, version: str | None, cache: Path, http: Http) -> None:
        self.version = version or llmgw.__version__
        self._source = source
        self._cache = cache
        self._http = http
        self._lock = threading.Lock()
        self._have: dict[str, Release] = {}

    def get(self, arch: str) -> Release:
        """The executable for an architecture.

        Raises:
            InstallError, FetchError: it is not published there, cannot be fetched, or has another digest.
        """
        with self._lock:
            if arch not in self._have:
                self._have[arch] = self._fetch(f"llmgw-{self.version}-linux-{arch}.pyz")
            return self._have[arch]

    def _fetch(self, name: str) -> Release:
        from llmgw.sources import fetch_asset
        from llmgw.system.partial import file_sha256

        assets = {asset.name: asset for asset in self._assets()}
        if name not in assets:
            raise NotPublished(
                f"`{name}` is not published on `{self._source}`", cause=f"{self.version} has no such file there",
                hint="name another `--version`, or another source with `--from`",
            )  # fmt: skip
        asset = assets[name]
        if self._source.startswith("github"):
            self._check_sums(assets, asset)
        path = fetch_asset(asset, self._cache, self._http)
        sha256 = file_sha256(path)
        if sha256 != asset.sha256:
            raise DigestMismatch(f"`{name}` is refused", cause=f"its sha256 is {sha256}, announced is {asset.sha256}")
        return Release(name, self.version, path, sha256)

    def _assets(self) -> tuple[Asset, ...]:
        from llmgw.domain.engines import EngineSpec, Origin
        from llmgw.sources import make_source

        source, repository = self._source, REPOSITORY
        if source.startswith("github:"):
            source, repository = "github", source.removeprefix("github:")
        elif "://" not in source and source != "github":
            directory = Path(source).expanduser().resolve()
            if not directory.is_dir():
                raise UsageError(
                    f"`{source}` is not a source of releases", hint="write `github`, an address or a directory"
                )
            source = directory.as_uri()
        tag = f"v{self.version}" if source == "github" else self.version
        return make_source(source, self._http).assets(Origin(repository, tag), EngineSpec("llmgw", self.version), "")

    def _check_sums(self, assets: dict[str, Asset], asset: Asset) -> None:
        """The release's own SHA256SUMS must say what the listing says."""
        from llmgw.sources import fetch_asset
        from llmgw.sources.mirror import parse_sums
        from llmgw.system.files import read_text

        if SUMS not in assets:
            raise InstallError(f"the release {self.version} is refused", cause=f"it has no `{SUMS}`")
        path = fetch_asset(assets[SUMS], self._cache, self._http)
        listed = parse_sums(read_text(path) or "", SUMS).get(asset.name)
        if listed != asset.sha256:
            raise DigestMismatch(
                f"`{asset.name}` is refused", cause=f"`{SUMS}` says {listed}, the release says {asset.sha256}"
            )
