"""Whatever an archive holds: nothing outside changes, a refusal leaves nothing, and all that comes out is plain."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import install_archives as made
import pytest
import unpack_each
from hypothesis import given, settings
from hypothesis import strategies as some

from llmgw.errors import ArchiveRefused
from llmgw.install.members import split_name
from llmgw.install.unpack import unpack

ROOT = Path(__file__).resolve().parents[2]
PARTS = some.sampled_from(["a", "b", "A", "libx.so", "libx.so.0", "..", ".", "", "d" * 247, "\x1b", "é", ".tmp-x"])
PATHS = some.lists(PARTS, min_size=1, max_size=4).map("/".join) | some.text(max_size=12)
FILES = some.builds(made.entry, PATHS, some.binary(max_size=600), some.integers(0, 0o7777))
LINKS = some.builds(made.link, PATHS, PATHS) | some.builds(made.hard, PATHS, PATHS)
FOLDERS = some.builds(made.folder, PATHS, some.integers(0, 0o7777))
ARCHIVES = some.lists(FILES | LINKS | FOLDERS, min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(ARCHIVES, some.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_any_list_of_members_comes_out_plain_or_not_at_all(entries: list, form: int) -> None:  # type: ignore[type-arg]
    try:
        data = made.tar_gz(entries, form)
    except (ValueError, UnicodeError):
        return  # no such archive can be written
    with tempfile.TemporaryDirectory() as jail:
        outside, out = Path(jail, "outside"), Path(jail, "target")
        outside.mkdir()
        (outside / "precious").write_text("precious")
        archive = made.write(Path(jail, "a"), data)
        before = unpack_each.snapshot(Path(jail))
        try:
            unpack(archive, out)
        except ArchiveRefused as error:
            words = error.words()
        else:
            assert unpack_each.strange(out) == []
            now = unpack_each.snapshot(Path(jail))
            assert {name: entry for name, entry in now.items() if not name.startswith("target")} == before
            return
        assert not out.exists()
        assert words.isprintable()
        assert unpack_each.snapshot(Path(jail)) == before


@settings(max_examples=80, deadline=None)
@given(some.binary(max_size=2000), some.sampled_from([b"\x1f\x8b\x08\0\0\0\0\0\0\xff", b"PK\x03\x04", b""]))
def test_any_bytes_are_refused_in_words(data: bytes, magic: bytes) -> None:
    with tempfile.TemporaryDirectory() as jail:
        archive = made.write(Path(jail, "a"), magic + data)
        with pytest.raises(ArchiveRefused) as caught:
            unpack(archive, Path(jail, "out"))
        assert caught.value.words().isprintable()
        assert not Path(jail, "out").exists()


@given(some.text(max_size=60))
def test_a_name_is_refused_or_stays_below(name: str) -> None:
    try:
        parts = split_name(name)
    except ArchiveRefused:
        return
    assert ".." not in parts
    assert Path("/top", *parts).is_relative_to("/top")
    assert "/".join(parts) in (name, name.removeprefix("./"), "")


def test_the_fuzzer_finds_nothing_in_its_quick_form() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/fuzz/unpack.py", "--seconds", "3", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 findings" in done.stdout


def test_unpacking_the_same_archives_again_and_again_keeps_no_memory() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/fuzz/unpack.py", "--steady", "4", "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1600 unpackings: ")
