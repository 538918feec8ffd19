"""GitHub as a source, against a server that behaves like it."""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from github_server import GithubServer

from llmgw.domain.engines import Asset, EngineSpec, Origin
from llmgw.errors import DigestMismatch, FetchError, InstallError, NotPublished
from llmgw.sources import fetch_asset, make_source
from llmgw.sources.github import GithubSource
from llmgw.system.fetch import FetchLimits
from llmgw.system.http import Http
from llmgw.system.retry import RetryPolicy

REPO = "ggml-org/llama.cpp"
NAME = "llama-b10991-bin-ubuntu-x64.tar.gz"
DATA = b"an archive" * 1000
SHA = hashlib.sha256(DATA).hexdigest()
SPEC = EngineSpec("llama.cpp", "b10991")
QUICK = RetryPolicy(base_s=0.01)


@pytest.fixture
def http() -> Iterator[Http]:
    with Http() as client:
        yield client


@pytest.fixture
def github() -> Iterator[GithubServer]:
    with GithubServer() as server:
        yield server


def listed(http: Http, github: GithubServer, tag: str = "b10991", **options: Any) -> tuple[Asset, ...]:
    source = GithubSource(http, api=github.api, policy=QUICK, **options)
    return source.assets(Origin(REPO, tag), SPEC, "x86_64")


def refused(http: Http, github: GithubServer, tag: str = "b10991", **options: Any) -> InstallError:
    with pytest.raises(InstallError) as caught:
        listed(http, github, tag, **options)
    return caught.value


def test_a_release_is_listed_with_address_size_and_published_digest(http: Http, github: GithubServer) -> None:
    github.release(REPO, "b10991", {NAME: DATA, "llama-b10991-ui.tar.gz": b"ui"})
    assets = listed(http, github)
    assert [asset.name for asset in assets] == [NAME, "llama-b10991-ui.tar.gz"]
    assert (assets[0].size_bytes, assets[0].sha256, assets[0].source) == (len(DATA), SHA, "github")
    assert [asked.path for asked in github.api_server.requests] == [f"/repos/{REPO}/releases/tags/b10991"]


def test_an_asset_is_fetched_through_the_redirect_and_kept_by_its_digest(
    http: Http, github: GithubServer, tmp_path: Path
) -> None:
    github.release(REPO, "b10991", {NAME: DATA})
    env = {"LLMGW_GITHUB_API": github.api, "GITHUB_TOKEN": "hush"}
    told: list[tuple[int, int | None]] = []
    asset = make_source("github", http, env=env).assets(Origin(REPO, "b10991"), SPEC, "x86_64")[0]
    path = fetch_asset(asset, tmp_path, http, env=env, progress=lambda a, b: told.append((a, b)))
    assert path.name == f"{SHA[:16]}-{NAME}"
    assert path.read_bytes() == DATA
    assert told[-1] == (len(DATA), len(DATA))
    api, download = github.api_server.requests
    assert api.headers["authorization"] == "Bearer hush"
    assert "authorization" not in download.headers
    assert all("authorization" not in asked.headers for asked in github.files.requests)
    asked = len(github.api_server.requests)
    assert fetch_asset(asset, tmp_path, http, env=env) == path
    assert len(github.api_server.requests) == asked


def test_a_broken_download_gets_a_new_signature_and_goes_on(http: Http, github: GithubServer, tmp_path: Path) -> None:
    github.release(REPO, "b10991", {NAME: DATA})[NAME].cuts = [4000]
    asset = listed(http, github)[0]
    limits = FetchLimits(retry=QUICK)
    path = fetch_asset(asset, tmp_path, http, env={"LLMGW_GITHUB_API": github.api}, limits=limits)
    assert path.read_bytes() == DATA
    assert [asked.headers.get("range") for asked in github.files.requests] == [None, "bytes=4000-"]
    assert len({asked.path for asked in github.files.requests}) == 2


def test_https_all_the_way(tmp_path: Path) -> None:
    ca = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with GithubServer(context) as github, Http(ca_file=str(tmp_path / "ca.pem")) as http:
        github.release(REPO, "b10991", {NAME: DATA})
        asset = listed(http, github)[0]
        env = {"LLMGW_GITHUB_API": github.api}
        assert fetch_asset(asset, tmp_path, http, env=env).read_bytes() == DATA


def test_a_tag_without_a_release_is_not_published_yet(http: Http, github: GithubServer) -> None:
    error = refused(http, github, "b99999")
    assert isinstance(error, NotPublished)
    assert "`b99999` of `ggml-org/llama.cpp` is not published yet: GitHub has no release of this tag" in error.words()


def test_a_release_without_files_is_not_published_yet(http: Http, github: GithubServer) -> None:
    github.release(REPO, "b10991", {})
    error = refused(http, github)
    assert isinstance(error, NotPublished)
    assert "the release is there, its files are not" in error.words()


def test_files_still_being_uploaded_are_left_out(http: Http, github: GithubServer) -> None:
    github.release(REPO, "b10991", {NAME: DATA, "late.tar.gz": b"x"}, states={"late.tar.gz": "starter"})
    assert [asset.name for asset in listed(http, github)] == [NAME]
    github.release(REPO, "b10991", {NAME: DATA, "late.tar.gz": b"x"}, states={NAME: "starter", "late.tar.gz": "new"})
    assert "its files are not uploaded yet" in refused(http, github).words()


def test_a_file_without_a_digest_is_listed_without_one_and_refused_unless_pinned(
    http: Http, github: GithubServer, tmp_path: Path
) -> None:
    github.release(REPO, "b10991", {NAME: DATA}, digests=False)
    asset = listed(http, github)[0]
    env = {"LLMGW_GITHUB_API": github.api}
    assert asset.sha256 is None
    with pytest.raises(InstallError, match="github publishes no digest for it"):
        fetch_asset(asset, tmp_path, http, env=env)
    assert fetch_asset(asset, tmp_path, http, env=env, sha256=SHA.upper()).read_bytes() == DATA


def test_a_pin_that_differs_from_the_published_digest_is_refused(
    http: Http, github: GithubServer, tmp_path: Path
) -> None:
    github.release(REPO, "b10991", {NAME: DATA})
    asset = listed(http, github)[0]
    with pytest.raises(DigestMismatch) as caught:
        fetch_asset(asset, tmp_path, http, sha256="0" * 64, env={"LLMGW_GITHUB_API": github.api})
    assert "0" * 64 in caught.value.words()
    assert SHA in caught.value.words()
    assert github.files.requests == []
    with pytest.raises(InstallError, match="is not one"):
        fetch_asset(asset, tmp_path, http, sha256="abc", env={"LLMGW_GITHUB_API": github.api})


def test_bytes_other_than_the_published_digest_are_refused(http: Http, github: GithubServer, tmp_path: Path) -> None:
    github.release(REPO, "b10991", {NAME: DATA}, broken_digests={NAME: "a" * 64})
    asset = listed(http, github)[0]
    with pytest.raises(DigestMismatch):
        fetch_asset(asset, tmp_path, http, env={"LLMGW_GITHUB_API": github.api})
    assert list(tmp_path.iterdir()) == []


def test_a_pointer_release_is_followed_one_hop(http: Http, github: GithubServer) -> None:
    github.pointer(REPO, "v0.3.0", "b10621")
    github.release(REPO, "b10621", {"llama-b10621-bin-ubuntu-x64.tar.gz": DATA})
    assert [asset.name for asset in listed(http, github, "v0.3.0")] == ["llama-b10621-bin-ubuntu-x64.tar.gz"]


def test_a_pointer_to_a_pointer_is_refused(http: Http, github: GithubServer) -> None:
    github.pointer(REPO, "v0.3.0", "b1")
    github.pointer(REPO, "b1", "b2")
    assert "points at `b1`, which points elsewhere again" in refused(http, github, "v0.3.0").words()


@pytest.mark.parametrize("target", ["../../x", "v0.4.0", "", "b" + "1" * 500, "<html>"])
def test_a_pointer_that_holds_no_tag_is_refused(http: Http, github: GithubServer, target: str) -> None:
    github.pointer(REPO, "v0.3.0", target)
    assert "does not hold a tag such as `b10991`" in refused(http, github, "v0.3.0").words()


def test_a_pointer_with_other_bytes_than_published_is_refused(http: Http, github: GithubServer) -> None:
    github.pointer(REPO, "v0.3.0", "b1")["nightly-tag.txt"].data = b"b2\n"
    with pytest.raises(DigestMismatch):
        listed(http, github, "v0.3.0")


@pytest.mark.parametrize("status", [403, 429])
def test_the_rate_limit_is_told_with_its_reset(http: Http, github: GithubServer, status: int) -> None:
    now = time.time()
    github.rate_limit(status, reset_at=now + 1380)
    error = refused(http, github, now=lambda: now)
    clock = time.strftime("%H:%M", time.localtime(int(now + 1380)))
    assert "the rate limit of 60 questions an hour for this address is used up" in error.words()
    assert f"until {clock} (in 23m" in error.words() or f"until {clock} (in 22m59s" in error.words()
    assert error.retry_after_s == pytest.approx(1380, abs=1.5)
    assert "GITHUB_TOKEN" in error.hint
    assert len(github.api_server.requests) == 1


def test_the_secondary_limits_retry_after_is_told(http: Http, github: GithubServer) -> None:
    github.rate_limit(403, retry_after=60)
    assert refused(http, github).retry_after_s == 60


def test_a_403_that_is_no_rate_limit_is_not_called_one(http: Http, github: GithubServer) -> None:
    github.api_statuses = [403]
    error = refused(http, github)
    assert "answered 403" in error.words()
    assert error.retry_after_s is None


def test_a_refused_token_is_told_and_not_shown(http: Http, github: GithubServer) -> None:
    github.api_statuses = [401]
    error = refused(http, github, token="hush")
    assert "refuses the token in `GITHUB_TOKEN`" in error.words()
    assert "hush" not in error.words() + error.hint + repr(GithubSource(http, token="hush"))


def test_a_moment_of_trouble_is_waited_out(http: Http, github: GithubServer) -> None:
    github.release(REPO, "b10991", {NAME: DATA})
    github.api_statuses = [502, 503]
    assert len(listed(http, github)) == 1
    github.api_statuses = [502, 502, 502]
    assert "GitHub answered 502" in refused(http, github).words()


def test_an_api_that_cannot_be_reached_is_told(http: Http) -> None:
    source = GithubSource(http, api="http://127.0.0.1:1", policy=QUICK)
    with pytest.raises(InstallError, match="refused the connection"):
        source.assets(Origin(REPO, "b1"), SPEC, "x86_64")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"<html>login</html>", "not JSON (an HTML page"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "lists no assets"),
        (b'{"assets": {}}', "lists no assets"),
        (b'{"assets": [1, null, {}]}', "not published yet"),
    ],
)
def test_answers_of_another_shape_are_refused(http: Http, github: GithubServer, body: bytes, word: str) -> None:
    path = f"/repos/{REPO}/releases/tags/b10991"
    github.api_server.answer = None
    github.api_server.put(path, body, content_type="text/html")
    assert word in refused(http, github).words()


def test_names_that_no_file_should_have_are_left_out(http: Http, github: GithubServer) -> None:
    github.release(REPO, "b10991", {NAME: DATA, "../evil": b"", "-rf": b"", ".hidden": b"", "a b": b""})
    assert [asset.name for asset in listed(http, github)] == [NAME]


@pytest.mark.parametrize("url", ["https://evil.test/x", "file:///etc/passwd", "pypi:evil==1.0", "http://10.0.0.1/x"])
def test_a_listing_may_not_point_just_anywhere(http: Http, tmp_path: Path, url: str) -> None:
    asset = Asset(NAME, url, 1, SHA, "github")
    with pytest.raises((InstallError, FetchError)) as caught:
        fetch_asset(asset, tmp_path, http, env={"PATH": ""})
    assert "is refused" in caught.value.words()


def test_a_renamed_repository_is_followed_on_the_same_host_only(http: Http, github: GithubServer) -> None:
    github.release("new/name", "b10991", {NAME: DATA})
    github.api_server.put("/repos/x")
    answer = github._answer
    old = "/repos/old/name/releases/tags/b10991"
    where = "/repos/new/name/releases/tags/b10991"

    def moved(asked: Any) -> Any:
        from github_server import Served

        return Served(redirect=where) if asked.path == old else answer(asked)

    github.api_server.answer = moved
    source = GithubSource(http, api=github.api, policy=QUICK)
    assert len(source.assets(Origin("old/name", "b10991"), SPEC, "x86_64")) == 1
    where = github.files.url_of("/x")
    with pytest.raises(InstallError, match="redirects the question to another host"):
        source.assets(Origin("old/name", "b10991"), SPEC, "x86_64")


def test_plain_http_apis_are_for_loopback_only(http: Http) -> None:
    with pytest.raises(InstallError, match="neither https nor on loopback"):
        make_source("github", http, env={"LLMGW_GITHUB_API": "http://10.0.0.1/api"})
