from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gguf_maker import QWEN, gguf, tensor

from llmgw.domain.facts import Truth
from llmgw.errors import FileError
from llmgw.probe import weights
from llmgw.probe.weights import WeightsScanner, find_model, read_gguf

MODEL = gguf(QWEN, [tensor("w", [256, 100], 12, 0)], 14400)


def scan(*dirs):
    found, notes = WeightsScanner([str(d) for d in dirs]).scan()
    return {Path(model.path).relative_to(dirs[0]).as_posix(): model for model in found}, notes


def safetensors(size: int, *, keep: int | None = None) -> bytes:
    head = json.dumps({"__metadata__": {}, "w": {"dtype": "F16", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(size if keep is None else keep)


def part(number: int, total: int) -> bytes:
    return gguf({"general.architecture": "x", "split.no": number, "split.count": total}, [tensor("w", [32], 0, 0)], 128)


def test_a_whole_file_is_complete_and_a_short_one_says_how_much_is_there(tmp_path):
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/good.gguf").write_bytes(MODEL)
    (tmp_path / "short.gguf").write_bytes(MODEL[:-100])
    (tmp_path / "stub.gguf").write_bytes(MODEL[:200])
    (tmp_path / "page.gguf").write_bytes(b"<html>not found</html>")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "readme.md").write_text("x")
    found, notes = scan(tmp_path)
    assert notes == ()
    assert sorted(found) == ["deep/er/good.gguf", "empty.gguf", "page.gguf", "short.gguf", "stub.gguf"]
    assert found["deep/er/good.gguf"].complete.value is Truth.YES
    assert found["deep/er/good.gguf"].size_bytes == len(MODEL)
    assert found["short.gguf"].complete.value is Truth.NO
    assert f"{len(MODEL) - 100} of {len(MODEL)} bytes" in found["short.gguf"].complete.words
    for name, words in (("stub", "beyond the end"), ("page", "not a GGUF file"), ("empty", "beyond the end")):
        assert found[f"{name}.gguf"].complete.value is Truth.NO
        assert words in found[f"{name}.gguf"].complete.words


def test_a_tensor_type_nobody_knows_leaves_completeness_unknown(tmp_path):
    (tmp_path / "new.gguf").write_bytes(gguf({}, [tensor("w", [32], 99, 0)], 64))
    assert scan(tmp_path)[0]["new.gguf"].complete.value is Truth.UNKNOWN


def test_a_split_set_is_one_model_and_complete_only_with_every_part(tmp_path):
    for number in range(3):
        (tmp_path / f"big-0000{number + 1}-of-00003.gguf").write_bytes(part(number, 3))
    found, _ = scan(tmp_path)
    (model,) = found.values()
    assert list(found) == ["big-00001-of-00003.gguf"]
    assert (model.complete.value, model.complete.words) == (Truth.YES, "complete, 3 parts")
    assert model.size_bytes == 3 * len(part(0, 3))
    (tmp_path / "big-00002-of-00003.gguf").unlink()
    missing = scan(tmp_path)[0]["big-00001-of-00003.gguf"].complete
    assert (missing.value, missing.words) == (Truth.NO, "incomplete: 1 of 3 parts are missing (2)")
    (tmp_path / "big-00002-of-00003.gguf").write_bytes(part(1, 3)[:-1])
    short = scan(tmp_path)[0]["big-00001-of-00003.gguf"].complete
    assert short.words.startswith("`big-00002-of-00003.gguf` is incomplete")
    (tmp_path / "big-00002-of-00003.gguf").write_bytes(part(1, 4))
    assert "another size" in scan(tmp_path)[0]["big-00001-of-00003.gguf"].complete.words


def test_a_safetensors_folder_is_one_model_by_its_index(tmp_path):
    repo = tmp_path / "Org/Model"
    repo.mkdir(parents=True)
    (repo / "config.json").write_text("{}")
    (repo / "model-1.safetensors").write_bytes(safetensors(100))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (repo / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "`model-2.safetensors` is missing" in scan(tmp_path)[0]["Org/Model"].complete.words
    (repo / "model-2.safetensors").write_bytes(safetensors(100, keep=99))
    assert "`model-2.safetensors` is incomplete" in scan(tmp_path)[0]["Org/Model"].complete.words
    (repo / "model-2.safetensors").write_bytes(safetensors(100))
    good = scan(tmp_path)[0]["Org/Model"]
    assert (good.format, good.complete.value, good.complete.words) == ("safetensors", Truth.YES, "complete, 2 files")
    (repo / "model.safetensors.index.json").write_text('{"weight_map": 7}')
    assert "not readable" in scan(tmp_path)[0]["Org/Model"].complete.words


@pytest.mark.parametrize("raw", [b"", b"\xff" * 8, (9).to_bytes(8, "little") + b'{"a":1}  ', b"[" * 99_999])
def test_bytes_that_are_no_safetensors_are_damaged(tmp_path, raw):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.safetensors").write_bytes(raw)
    assert scan(tmp_path)[0]["."].complete.value is Truth.NO


def test_deeply_nested_json_is_damaged_not_a_crash(tmp_path):
    nested = b"[" * 200_000
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.safetensors").write_bytes(len(nested).to_bytes(8, "little") + nested)
    assert scan(tmp_path)[0]["."].complete.value is Truth.NO


def test_the_fingerprint_follows_content_and_time_and_files_are_read_once(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)
    os.utime(path, ns=(1, 10**18))
    reads = []
    monkeypatch.setattr(weights, "read_gguf", lambda p: reads.append(p) or read_gguf(p))
    scanner = WeightsScanner([str(tmp_path)])
    first = scanner.scan()[0][0].fingerprint
    assert scanner.scan()[0][0].fingerprint == first
    assert len(reads) == 1
    path.write_bytes(MODEL.replace(b"Tiny", b"Tony"))
    os.utime(path, ns=(1, 10**18 + 1))
    assert scanner.scan()[0][0].fingerprint != first
    assert len(reads) == 2


def test_links_inside_a_directory_count_and_those_leading_out_do_not(tmp_path):
    base, outside = tmp_path / "models", tmp_path / "secret"
    (base / "blobs").mkdir(parents=True)
    (base / "snapshots/main").mkdir(parents=True)
    outside.mkdir()
    (base / "blobs/abc").write_bytes(MODEL)
    (outside / "other.gguf").write_bytes(MODEL)
    (base / "snapshots/main/m.gguf").symlink_to("../../blobs/abc")
    (base / "leak.gguf").symlink_to(outside / "other.gguf")
    (base / "dir").symlink_to(outside)
    (base / "self").symlink_to(base)
    (base / "loop.gguf").symlink_to("loop.gguf")
    os.mkfifo(base / "pipe.gguf")
    found, _ = scan(base)
    assert list(found) == ["snapshots/main/m.gguf"]
    assert found["snapshots/main/m.gguf"].complete.value is Truth.YES


def test_the_scan_is_bounded_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MAX_ENTRIES", 5)
    for number in range(9):
        (tmp_path / f"{number}.gguf").write_bytes(MODEL)
    found, notes = scan(tmp_path)
    assert len(found) == 5
    assert "more than 5 entries" in notes[0]
    deep = tmp_path.joinpath(*"abcdefghij")
    deep.mkdir(parents=True)
    (deep / "too-deep.gguf").write_bytes(MODEL)
    assert "too-deep" not in str(scan(tmp_path / "a")[0])


def test_a_missing_model_directory_is_said_and_others_are_scanned(tmp_path):
    (tmp_path / "m.gguf").write_bytes(MODEL)
    (tmp_path / "file").write_text("x")
    found, notes = scan(tmp_path, tmp_path / "nowhere", tmp_path / "file")
    assert list(found) == ["m.gguf"]
    assert "does not exist" in notes[0]
    assert "is not a directory" in notes[1]


def test_a_header_larger_than_the_first_read_is_still_read(tmp_path):
    tokens = [f"token-number-{n:08d}" for n in range(60_000)]
    (tmp_path / "m.gguf").write_bytes(gguf({**QWEN, "tokenizer.ggml.tokens": tokens}, [tensor("w", [32], 0, 0)], 128))
    header, raw = read_gguf(tmp_path / "m.gguf")
    assert len(raw) > 1 << 20
    assert header.lengths["tokenizer.ggml.tokens"] == 60_000
    assert scan(tmp_path)[0]["m.gguf"].complete.value is Truth.YES


def test_a_profiles_model_is_found_in_the_first_directory_that_has_it(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "sub").mkdir(parents=True)
    two.mkdir()
    (two / "m.gguf").write_bytes(MODEL)
    dirs = [str(one), str(two)]
    assert find_model("m.gguf", dirs) == two / "m.gguf"
    (one / "m.gguf").write_bytes(MODEL)
    assert find_model("m.gguf", dirs) == one / "m.gguf"
    assert find_model("sub", dirs) == one / "sub"
    assert find_model(str(two / "m.gguf"), dirs) == two / "m.gguf"
    assert find_model("other.gguf", dirs) is None
    assert find_model("m.gguf", []) is None


@pytest.mark.parametrize(
    "name", ["../secret.gguf", "sub/../../secret.gguf", "", "a\0b", "leak.gguf", "out/secret.gguf"]
)
def test_a_model_outside_the_directories_is_refused(tmp_path, name):
    base = tmp_path / "models"
    base.mkdir()
    (tmp_path / "secret.gguf").write_bytes(MODEL)
    (base / "leak.gguf").symlink_to(tmp_path / "secret.gguf")
    (base / "out").symlink_to(tmp_path)
    with pytest.raises(FileError, match="is refused"):
        find_model(name, [str(base)])


def test_an_absolute_path_outside_is_refused_and_a_loop_is_not_found(tmp_path):
    base = tmp_path / "models"
    base.mkdir()
    (base / "loop").symlink_to("loop")
    with pytest.raises(FileError, match="outside the model directories"):
        find_model("/etc/passwd", [str(base)])
    assert find_model("loop", [str(base)]) is None
