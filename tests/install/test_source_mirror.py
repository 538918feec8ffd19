"""Mirrors on a web server and directories on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from github_server import FileServer

from llmgw.domain.engines import EngineSpec, Origin
from llmgw.errors import DigestMismatch, InstallError, NotPublished, UsageError
from llmgw.sources import fetch_asset, make_source
from llmgw.sources.mirror import MirrorSource, parse_sums
from llmgw.system.http import Http
from llmgw.system.retry import RetryPolicy

ORIGIN = Origin("ggml-org/llama.cpp", "b10991")
SPEC = EngineSpec("llama.cpp", "b10991")
NAME = "llama-b10991-bin-ubuntu-x64.tar.gz"
DATA = b"an archive"
SHA = hashlib.sha256(DATA).hexdigest()
SUMS = f"{SHA}  {NAME}\n".encode()


@pytest.fixture
def http() -> Iterator[Http]:
    with Http() as client:
        yield client


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as running:
        yield running


def words(http: Http, text: str, kind: type[InstallError] = NotPublished) -> str:
    with pytest.raises(kind) as caught:
        make_source(text, http).assets(ORIGIN, SPEC, "x86_64")
    return caught.value.words()


def test_a_mirror_is_asked_for_the_versions_own_directory_first(http: Http, server: FileServer, tmp_path: Path) -> None:
    server.put("/base/b10991/SHA256SUMS", SUMS)
    server.put(f"/base/b10991/{NAME}", DATA)
    [asset] = make_source(server.url_of("/base"), http).assets(ORIGIN, SPEC, "x86_64")
    assert (asset.name, asset.sha256, asset.size_bytes) == (NAME, SHA, None)
    assert fetch_asset(asset, tmp_path, http).read_bytes() == DATA


def test_a_flat_mirror_gives_only_names_with_the_tag(http: Http, server: FileServer) -> None:
    other = f"{'1' * 64} *llama-b1099-bin-ubuntu-x64.tar.gz\n{'2' * 64}  llama-b109912.tar.gz\n".encode()
    server.put("/SHA256SUMS", SUMS + other)
    assert [asset.name for asset in make_source(server.url, http).assets(ORIGIN, SPEC, "x86_64")] == [NAME]


def test_a_mirror_without_the_version_says_where_it_looked(http: Http, server: FileServer) -> None:
    text = words(http, server.url_of("/base/"))
    assert f"`{server.url}/base/b10991/SHA256SUMS` was answered with 404" in text
    assert f"`{server.url}/base/SHA256SUMS` was answered with 404" in text
    server.put("/base/SHA256SUMS", b"")
    assert "lists no file of it" in words(http, server.url_of("/base/"))


def test_a_mirror_in_trouble_is_not_taken_for_an_empty_one(http: Http, server: FileServer) -> None:
    server.put("/b10991/SHA256SUMS", SUMS, statuses=[500] * 3)
    with pytest.raises(InstallError, match="answered 500") as caught:
        MirrorSource(server.url, http, RetryPolicy(base_s=0.01)).assets(ORIGIN, SPEC, "x86_64")
    assert not isinstance(caught.value, NotPublished)
    server.put("/b10991/SHA256SUMS", SUMS, statuses=[401])
    assert "answered 401" in words(http, server.url, InstallError)


def test_a_mirrors_login_is_not_shown(http: Http, server: FileServer) -> None:
    text = words(http, server.url.replace("//", "//me:hush@"))
    assert "hush" not in text


def test_a_login_page_is_not_a_list(http: Http, server: FileServer) -> None:
    server.put("/b10991/SHA256SUMS", b"<!DOCTYPE html>\n<html>")
    assert "line 1 is not a digest and a name" in words(http, server.url, InstallError)


def test_a_directory_lists_sizes_too_and_is_copied(http: Http, tmp_path: Path) -> None:
    folder = tmp_path / "a mirror" / "b10991"
    folder.mkdir(parents=True)
    (folder / "SHA256SUMS").write_bytes(SUMS)
    (folder / NAME).write_bytes(DATA)
    [asset] = make_source(folder.parent.as_uri(), http).assets(ORIGIN, SPEC, "x86_64")
    assert (asset.name, asset.sha256, asset.size_bytes) == (NAME, SHA, len(DATA))
    path = fetch_asset(asset, tmp_path / "cache", http)
    assert path.read_bytes() == DATA
    (folder / NAME).write_bytes(b"an Archive")
    path.unlink()
    with pytest.raises(DigestMismatch):
        fetch_asset(asset, tmp_path / "cache", http)


def test_the_real_releases_directory_is_a_source(http: Http, release_dir: Path) -> None:
    origin = Origin("ggml-org/llama.cpp", "b1")
    [asset] = make_source(release_dir.as_uri(), http).assets(origin, SPEC, "x86_64")
    assert asset.name == "llama-b1-bin-ubuntu-x64.tar.gz"
    assert asset.size_bytes == (release_dir / asset.name).stat().st_size


def test_a_directory_without_the_version_says_where_it_looked(http: Http, tmp_path: Path) -> None:
    assert f"`{tmp_path}/SHA256SUMS` is not there" in words(http, tmp_path.as_uri())
    (tmp_path / "SHA256SUMS").write_text(f"{SHA}  llama-b5.tar.gz\n")
    assert "lists no file of it" in words(http, tmp_path.as_uri())
    assert "the directory is not there" in words(http, (tmp_path / "none").as_uri(), InstallError)


def test_a_listed_file_that_is_missing_is_told_when_it_is_wanted(http: Http, tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_bytes(SUMS)
    [asset] = make_source(tmp_path.as_uri(), http).assets(ORIGIN, SPEC, "x86_64")
    assert asset.size_bytes is None
    with pytest.raises(Exception, match="no such file"):
        fetch_asset(asset, tmp_path / "cache", http)


@pytest.mark.parametrize("tag", ["..", ".", "a/b", ""])
def test_a_tag_cannot_leave_the_directory(http: Http, tmp_path: Path, tag: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "SHA256SUMS").write_text(f"{SHA}  secret-{tag}.tar.gz\n")
    with pytest.raises(NotPublished):
        make_source(inner.as_uri(), http).assets(Origin("a/b", tag), SPEC, "x86_64")


def test_sums_are_read_as_sha256sum_writes_them() -> None:
    assert parse_sums(f"# made by us\n{SHA}  a.gz\r\n{SHA.upper()} *./b.gz\n\n", "x") == {"a.gz": SHA, "b.gz": SHA}
    assert parse_sums(f"{SHA}  ../a\n{SHA}  sub/a\n{SHA}  -rf\n", "x") == {}
    with pytest.raises(InstallError, match="two digests"):
        parse_sums(f"{SHA}  a\n{'0' * 64}  a\n", "x")


@pytest.mark.parametrize(
    "text", ["", "gitlab", "http://mirror.test/", "https://", "file://host/dir", "file:dir", "http://[::1", "ftp://x/"]
)
def test_what_is_no_source_is_refused_with_the_choices(http: Http, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_source(text, http)
    assert "`https://mirror/base/`" in caught.value.hint
