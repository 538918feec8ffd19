"""Big weights over several connections, and models of several files from a server that behaves like a hub."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from github_server import Asked, FileServer, Served

from llmgw.errors import DigestMismatch, FetchError, FetchStopped, InstallError, NotPublished, UsageError
from llmgw.sources import fetch_model
from llmgw.sources.models import model_path
from llmgw.system.fetch import FetchLimits
from llmgw.system.http import Http
from llmgw.system.ranged import NoRangesError, Ranges, Throttle, fetch_ranged
from llmgw.system.retry import RetryPolicy

DATA = random.Random(4).randbytes(1_000_000)
SHA = hashlib.sha256(DATA).hexdigest()
PIECES = Ranges(connections=4, piece_bytes=100_000)
QUICK = FetchLimits(retry=RetryPolicy(base_s=0.01), silence_s=5.0)
REPO = "org/model"
COMMIT = "c" * 40


@pytest.fixture
def http() -> Iterator[Http]:
    with Http() as client:
        yield client


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as running:
        running.put("/m.gguf", DATA)
        yield running


class TestRanges:
    def fetch(self, http: Http, server: FileServer, directory: Path, **more: Any) -> Path:
        given = {"size_bytes": len(DATA), "sha256": SHA, "ranges": PIECES, "limits": QUICK, "allow_http": True}
        return fetch_ranged(http, server.url_of("/m.gguf"), directory / "m.gguf", **{**given, **more})

    def test_a_file_comes_in_parts_over_several_connections(
        self, http: Http, server: FileServer, tmp_path: Path
    ) -> None:
        told: list[int] = []
        assert self.fetch(http, server, tmp_path, progress=lambda done, _: told.append(done)).read_bytes() == DATA
        asked = sorted(int(each.headers["range"][6:].partition("-")[0]) for each in server.requests)
        assert asked == list(range(0, len(DATA), 100_000))
        assert told[-1] == len(DATA)
        assert told == sorted(told)
        assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]

    def test_parts_run_at_the_same_time(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        barrier = threading.Barrier(4, timeout=10)

        def met(asked: Asked) -> None:
            if int(asked.headers["range"][6:].partition("-")[0]) < 400_000:
                barrier.wait()

        server.answer = met
        assert self.fetch(http, server, tmp_path).read_bytes() == DATA
        assert not barrier.broken

    def test_a_part_that_breaks_off_is_gone_on_with(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        server.files["/m.gguf"].cuts = [30_000, 50_000]
        assert self.fetch(http, server, tmp_path).read_bytes() == DATA
        starts = {int(each.headers["range"][6:].partition("-")[0]) % 100_000 for each in server.requests}
        assert {30_000, 50_000} <= starts

    def test_what_came_before_a_stop_is_not_fetched_again(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        stop = threading.Event()
        server.answer = lambda _: stop.set() if len(server.requests) == 7 else None
        with pytest.raises(FetchStopped):
            self.fetch(http, server, tmp_path, stop=stop)
        note = json.loads((tmp_path / "m.gguf.ranges.partial.json").read_text())
        assert note["have"]
        assert not (tmp_path / "m.gguf").exists()
        server.answer = None
        server.requests.clear()
        assert self.fetch(http, server, tmp_path).read_bytes() == DATA
        assert len(server.requests) == 10 - len(note["have"])

    def test_old_parts_of_another_version_are_thrown_away(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        (tmp_path / "m.gguf.ranges.partial").write_bytes(bytes(len(DATA)))
        note = {
            "url": server.url_of("/m.gguf"), "size": len(DATA), "sha256": SHA, "piece": 100_000,
            "validator": '"older"', "have": [0, 1, 2],
        }  # fmt: skip
        (tmp_path / "m.gguf.ranges.partial.json").write_text(json.dumps(note))
        assert self.fetch(http, server, tmp_path).read_bytes() == DATA

    def test_wrong_old_bytes_are_fetched_anew(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        (tmp_path / "m.gguf.ranges.partial").write_bytes(bytes(len(DATA)))
        note = {
            "url": server.url_of("/m.gguf"), "size": len(DATA), "sha256": SHA, "piece": 100_000,
            "validator": server.files["/m.gguf"].tag(), "have": [0, 1, 2],
        }  # fmt: skip
        (tmp_path / "m.gguf.ranges.partial.json").write_text(json.dumps(note))
        assert self.fetch(http, server, tmp_path).read_bytes() == DATA

    def test_other_bytes_than_announced_are_refused_and_removed(
        self, http: Http, server: FileServer, tmp_path: Path
    ) -> None:
        with pytest.raises(DigestMismatch):
            self.fetch(http, server, tmp_path, sha256="0" * 64)
        assert list(tmp_path.iterdir()) == []

    def test_a_server_without_ranges_is_told_apart(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        server.files["/m.gguf"].ignore_range = True
        with pytest.raises(NoRangesError):
            self.fetch(http, server, tmp_path)
        text = server.url_of(f"/m.gguf#sha256={SHA}&size={len(DATA)}")
        assert fetch_model(text, tmp_path, http, ranges=PIECES).read_bytes() == DATA

    def test_a_part_at_the_wrong_place_is_refused(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        server.files["/m.gguf"].shift_range = 7
        with pytest.raises(FetchError, match="cannot fetch"):
            self.fetch(http, server, tmp_path)
        assert not (tmp_path / "m.gguf").exists()

    def test_the_rate_is_kept(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        slow = Ranges(connections=4, piece_bytes=100_000, throttle=Throttle(1_500_000))
        began = time.monotonic()
        self.fetch(http, server, tmp_path, ranges=slow)
        assert time.monotonic() - began > 0.55

    def test_the_floor_of_free_space_is_kept_in_words(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        full = Ranges(piece_bytes=100_000, floor_bytes=1 << 60)
        with pytest.raises(FetchError) as caught:
            self.fetch(http, server, tmp_path, ranges=full)
        assert caught.value.code == "no-space"
        assert "of it are to stay free" in caught.value.words()
        assert server.requests == []


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """One repository at one commit: its API, and 302 to another host for files in LFS."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.api, self.cdn = FileServer("127.0.0.1"), FileServer("localhost")
        self.api.answer = self._answer
        for path, data in files.items():
            self.cdn.put(f"/blob/{path}", data)

    @property
    def env(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.api.url, "HF_TOKEN": "hush"}

    def entry(self, path: str) -> dict[str, Any]:
        data = self.files[path]
        made: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob(data)}
        if path.endswith((".gguf", ".safetensors")):
            made["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 135}
        return made

    def _answer(self, asked: Asked) -> Served | None:
        path = asked.path.partition("?")[0]
        api, tree, resolve = f"/api/models/{REPO}", f"/api/models/{REPO}/tree/{COMMIT}", f"/{REPO}/resolve/{COMMIT}/"
        if path == f"{api}/revision/main":
            return Served(json.dumps({"id": REPO, "sha": COMMIT}).encode())
        if path == tree or path.startswith(f"{tree}/"):
            folder = path[len(tree) + 1 :]
            return Served(json.dumps([self.entry(p) for p in self.files if p.rpartition("/")[0] == folder]).encode())
        if path.startswith(resolve):
            name = path[len(resolve) :]
            if name.endswith((".gguf", ".safetensors")):
                return Served(redirect=self.cdn.url_of(f"/blob/{name}?X-Amz-Signature=hush"))
            return Served(self.files[name])
        return Served(statuses=[404])


PARTS = {f"q4/big-{n:05d}-of-00003.gguf": random.Random(n).randbytes(250_000 + n) for n in (1, 2, 3)}
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
TENSORS = {
    "config.json": b'{"architectures": []}',
    "tokenizer.json": b"{}" * 50,
    "README.md": b"words",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": random.Random(7).randbytes(200_000),
    "model-00002-of-00002.safetensors": random.Random(8).randbytes(200_001),
    "consolidated.safetensors": random.Random(9).randbytes(400_000),
}


class TestSets:
    @pytest.fixture
    def hub(self) -> Iterator[Hub]:
        running = Hub({**PARTS, **TENSORS})
        with running.api, running.cdn:
            yield running

    def test_one_part_stands_for_all_parts_of_a_split_model(self, http: Http, hub: Hub, tmp_path: Path) -> None:
        text, told = f"hf:{REPO}:q4/big-00001-of-00003.gguf", []
        path = fetch_model(
            text, tmp_path, http, env=hub.env, ranges=PIECES, progress=lambda done, total: told.append((done, total))
        )
        assert path.name == "big-00001-of-00003.gguf"
        for name, data in PARTS.items():
            assert (path.parent / Path(name).name).read_bytes() == data
        total = sum(map(len, PARTS.values()))
        assert told[-1] == (total, total)
        assert path.parent.name.startswith(f"org--model@{'c' * 12}-")
        assert model_path(text, tmp_path) == path
        asked = len(hub.api.requests)
        assert fetch_model(text, tmp_path, http, env=hub.env) == path
        assert len(hub.api.requests) == asked
        assert all("authorization" not in each.headers for each in hub.cdn.requests)

    def test_nothing_is_in_place_before_the_last_part_is_verified(self, http: Http, hub: Hub, tmp_path: Path) -> None:
        text = f"hf:{REPO}:q4/big-00002-of-00003.gguf"
        last = hub.cdn.files["/blob/q4/big-00003-of-00003.gguf"]
        last.data = bytes(len(last.data))
        with pytest.raises(DigestMismatch):
            fetch_model(text, tmp_path, http, env=hub.env, limits=QUICK)
        assert model_path(text, tmp_path) is None
        assert [path.name[:10] for path in tmp_path.iterdir()] == [".fetching-"]
        last.data = hub.files["q4/big-00003-of-00003.gguf"]
        hub.cdn.requests.clear()
        path = fetch_model(text, tmp_path, http, env=hub.env)
        assert path.name == "big-00001-of-00003.gguf"
        assert [each.path.partition("?")[0] for each in hub.cdn.requests] == ["/blob/q4/big-00003-of-00003.gguf"]

    def test_a_part_changed_since_is_noticed(self, http: Http, hub: Hub, tmp_path: Path) -> None:
        text = f"hf:{REPO}:q4/big-00001-of-00003.gguf"
        path = fetch_model(text, tmp_path, http, env=hub.env)
        (path.parent / "big-00003-of-00003.gguf").write_bytes(b"spoiled")
        assert model_path(text, tmp_path) is None
        assert (fetch_model(text, tmp_path, http, env=hub.env).parent / "big-00003-of-00003.gguf").stat().st_size > 9

    def test_a_missing_part_is_told(self, http: Http, hub: Hub, tmp_path: Path) -> None:
        del hub.files["q4/big-00002-of-00003.gguf"]
        with pytest.raises(NotPublished) as caught:
            fetch_model(f"hf:{REPO}:q4/big-00001-of-00003.gguf", tmp_path, http, env=hub.env)
        assert "has not all parts" in caught.value.words()
        assert "`q4/big-00002-of-00003.gguf` is missing" in caught.value.words()

    def test_no_file_stands_for_the_safetensors_and_what_belongs_to_them(
        self, http: Http, hub: Hub, tmp_path: Path
    ) -> None:
        path = fetch_model(f"hf:{REPO}@main", tmp_path, http, env=hub.env)
        there = {each.name: each.read_bytes() for each in path.iterdir()}
        assert there == {k: v for k, v in TENSORS.items() if k not in ("README.md", "consolidated.safetensors")}

    def test_small_files_are_held_to_gits_own_name_for_them(self, http: Http, hub: Hub, tmp_path: Path) -> None:
        real = hub._answer

        def other(asked: Asked) -> Served | None:
            lied = asked.path.endswith("/config.json") and "resolve" in asked.path
            return Served(b'{"architectures": {}}') if lied else real(asked)

        hub.api.answer = other
        with pytest.raises(DigestMismatch, match=r"config\.json"):
            fetch_model(f"hf:{REPO}", tmp_path, http, env=hub.env)

    def test_an_index_that_names_what_is_not_there_is_refused(self, http: Http, hub: Hub, tmp_path: Path) -> None:
        del hub.files["model-00002-of-00002.safetensors"]
        with pytest.raises(InstallError) as caught:
            fetch_model(f"hf:{REPO}", tmp_path, http, env=hub.env)
        assert caught.value.words().endswith("names `model-00002-of-00002.safetensors`, which is not in it")

    def test_a_repository_without_safetensors_names_what_it_has(self, http: Http, tmp_path: Path) -> None:
        only = Hub({"one.gguf": b"GGUF"})
        with only.api, only.cdn, pytest.raises(NotPublished) as caught:
            fetch_model(f"hf:{REPO}", tmp_path, http, env=only.env)
        assert "it has no `*.safetensors`" in caught.value.words()
        assert caught.value.hint == "name one of its files: `one.gguf`"

    def test_one_part_by_address_is_refused(self, http: Http, server: FileServer, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is one of 3 parts"):
            fetch_model(server.url_of(f"/big-00001-of-00003.gguf#sha256={SHA}"), tmp_path, http)
