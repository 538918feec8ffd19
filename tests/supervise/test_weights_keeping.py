"""Weights on a node: parts are never loaded, what is on its way is reported, what is unused goes on request only."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llmgw.agent import collecting
from llmgw.agent.app_engines import make_weights_dir
from llmgw.agent.weights import Weights, Where
from llmgw.domain.facts import Truth
from llmgw.errors import FetchError, UsageError
from llmgw.system.clock import RealClock

sys.path.append(str(Path(__file__).resolve().parent.parent / "probe"))

from gguf_maker import QWEN, gguf, tensor

MODEL = gguf(QWEN, [tensor("w", (64,), 0, 0)], data=256)

SOURCE = "https://user@host/m.gguf?token=hush#sha256=" + "0" * 64


def weights(*dirs: Path, fetch: Any = None) -> Weights:
    return Weights([str(each) for each in dirs], fetch or (lambda *_: Path("/x")), RealClock())


class TestParts:
    def test_a_file_cut_short_is_the_engines_to_judge(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(MODEL[:-100])
        for name in ("m.gguf", str(tmp_path / "m.gguf"), (tmp_path / "m.gguf").as_uri()):
            assert weights(tmp_path).resolve(name).where is Where.FOUND

    def test_a_set_that_lacks_a_part_is_not_loaded(self, tmp_path: Path) -> None:
        for number in (1, 3):
            (tmp_path / f"big-{number:05d}-of-00003.gguf").write_bytes(MODEL)
        found = weights(tmp_path).resolve("big-00001-of-00003.gguf")
        assert found.words == "`big-00001-of-00003.gguf` is incomplete: 1 of 3 parts are missing (2)"
        (tmp_path / "big-00002-of-00003.gguf").write_bytes(MODEL)
        assert weights(tmp_path).resolve("big-00001-of-00003.gguf").where is Where.FOUND

    def test_safetensors_that_lack_a_shard_are_not_loaded(self, tmp_path: Path) -> None:
        model = tmp_path / "m"
        model.mkdir()
        (model / "config.json").write_text("{}")
        header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (model / "model-00001-of-00002.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + b"\0\0\0\0"
        )
        shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        found = weights(tmp_path).resolve("m")
        assert found.words == "`m` is incomplete: `model-00002-of-00002.safetensors` is missing"

    def test_what_no_header_tells_is_the_engines_to_judge(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"a newer format")
        assert weights(tmp_path).resolve("m.gguf").where is Where.FOUND


class TestOnTheirWay:
    def test_a_fetch_begun_by_hand_is_reported_until_it_is_there(self, tmp_path: Path) -> None:
        go, told, ended = threading.Event(), threading.Event(), threading.Event()

        def fetch(source: str, progress: Any, stop: threading.Event) -> Path:
            progress(430, 1000)
            told.set()
            assert go.wait(10)
            return tmp_path

        mine = Weights((), fetch, RealClock(), ended.set)
        assert mine.begin(SOURCE).startswith("fetching: m.gguf (")
        assert told.wait(5)
        [item] = mine.on_their_way()
        assert item.complete.value is Truth.NO
        assert item.complete.words == "fetching: m.gguf (1.0 kB, 43 %)"
        assert "hush" not in item.path
        assert "user" not in item.path
        assert mine.fetching() == (SOURCE,)
        go.set()
        assert ended.wait(5)
        assert (mine.on_their_way(), mine.fetching()) == ((), ())
        assert mine.begin(SOURCE) == f"is there: {tmp_path}"

    def test_a_failure_is_reported_with_its_words(self) -> None:
        ended = threading.Event()

        def fetch(*_: Any) -> Path:
            raise FetchError("cannot fetch it", cause="it answered 404")

        mine = Weights((), fetch, RealClock(), ended.set)
        mine.begin(SOURCE)
        assert ended.wait(5)
        [item] = mine.on_their_way()
        assert item.complete.words == "cannot fetch m.gguf: cannot fetch it: it answered 404"

    def test_a_path_is_nothing_to_fetch(self) -> None:
        with pytest.raises(UsageError, match="is not fetched from elsewhere"):
            weights().begin("models/m.gguf")


class TestCollecting:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Path:
        (tmp_path / ".llmgw").mkdir()
        for text, name in (("hf:o/r:a.gguf", "1-a.gguf"), ("hf:o/r:b.gguf", "2-b.gguf")):
            (tmp_path / name).write_bytes(bytes(5000))
            self.record(tmp_path, text, name)
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "c-00001-of-00002.gguf").write_bytes(bytes(7000))
        self.record(tmp_path, "hf:o/r:c-00001-of-00002.gguf", "set/c-00001-of-00002.gguf")
        (tmp_path / "by-hand.gguf").write_bytes(bytes(10))
        (tmp_path / "3-d.gguf.partial").write_bytes(bytes(10))
        return tmp_path

    @staticmethod
    def record(directory: Path, text: str, path: str) -> None:
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        (directory / ".llmgw" / f"{name}.json").write_text(json.dumps({"text": text, "path": path}))

    def names(self, store: Path, models: list[str], fetching: list[str]) -> list[str]:
        return sorted(item.path.name for item in collecting.unused(store, models, fetching))

    def test_what_replicas_use_and_what_was_put_there_by_hand_stays(self, store: Path) -> None:
        assert self.names(store, ["hf:o/r:a.gguf"], []) == ["2-b.gguf", "3-d.gguf.partial", "set"]
        assert self.names(store, ["2-b.gguf", "set/c-00001-of-00002.gguf"], []) == ["1-a.gguf", "3-d.gguf.partial"]
        assert self.names(store, [str(store / "1-a.gguf"), (store / "2-b.gguf").as_uri()], []) == [
            "3-d.gguf.partial",
            "set",
        ]

    def test_while_something_is_fetched_nothing_on_its_way_is_touched(self, store: Path) -> None:
        assert self.names(store, [], ["hf:o/r:b.gguf"]) == ["1-a.gguf", "set"]

    def test_removing_takes_the_record_first(self, store: Path) -> None:
        for item in collecting.unused(store, [], []):
            collecting.remove(item)
        assert sorted(path.name for path in store.iterdir()) == [".llmgw", "by-hand.gguf"]
        assert list((store / ".llmgw").iterdir()) == []

    @pytest.mark.parametrize("path", ["../outside", "/etc/passwd", ".llmgw/x", ""])
    def test_a_record_that_leads_elsewhere_removes_nothing(self, tmp_path: Path, path: str) -> None:
        (tmp_path / ".llmgw").mkdir()
        self.record(tmp_path, "hf:o/r:a.gguf", path)
        (tmp_path / ".llmgw" / "broken.json").write_text("[")
        assert collecting.unused(tmp_path, [], []) == ()


def test_llmgw_s_own_weights_directory_is_made_and_a_configured_one_is_not(tmp_path: Path) -> None:
    own, mounted = tmp_path / "own", tmp_path / "mnt" / "weights"
    make_weights_dir(str(own), str(own))
    make_weights_dir(str(mounted), str(own))
    make_weights_dir("/proc/nobody/weights", "/proc/nobody/weights")
    assert own.is_dir()
    assert not mounted.exists()
