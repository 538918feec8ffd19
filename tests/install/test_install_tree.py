"""Trees: archives laid side by side, copies of libraries turned into links again."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.errors import ArchiveRefused
from llmgw.install import tree


def test_copies_of_a_library_become_a_chain_of_links(tmp_path: Path) -> None:
    for name in ("libx.so", "libx.so.0", "libx.so.0.20.0"):
        (tmp_path / name).write_bytes(b"same" * 100)
    (tmp_path / "libvulkan.so.1").write_bytes(b"v")
    (tmp_path / "libvulkan.so.1.4.313").write_bytes(b"v")
    (tmp_path / "libalone.so").write_bytes(b"same" * 100)
    assert tree.relink(tmp_path) == 3
    assert (tmp_path / "libx.so").readlink() == Path("libx.so.0")
    assert (tmp_path / "libx.so.0").readlink() == Path("libx.so.0.20.0")
    assert (tmp_path / "libvulkan.so.1").readlink() == Path("libvulkan.so.1.4.313")
    assert not (tmp_path / "libalone.so").is_symlink()
    assert (tmp_path / "libx.so").read_bytes() == b"same" * 100


def test_libraries_that_differ_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "libx.so").write_bytes(b"one")
    (tmp_path / "libx.so.0").write_bytes(b"two")
    assert tree.relink(tmp_path) == 0
    assert not (tmp_path / "libx.so").is_symlink()


def test_a_second_archive_is_laid_beside_the_first(tmp_path: Path) -> None:
    for part, names in (("one", ["bin/a", "x"]), ("two", ["bin/b", "y"])):
        for name in names:
            path = tmp_path / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    tree.merge(tmp_path / "one", tmp_path / "out")
    tree.merge(tmp_path / "two", tmp_path / "out")
    found = [path.relative_to(tmp_path / "out").as_posix() for path in tree.walk(tmp_path / "out")]
    assert found == ["x", "y", "bin/a", "bin/b"]


def test_two_archives_with_the_same_file_are_refused(tmp_path: Path) -> None:
    for part in ("one", "two"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "libx.so").write_text(part)
    tree.merge(tmp_path / "one", tmp_path / "out")
    with pytest.raises(ArchiveRefused, match=r"both hold 'libx\.so'"):
        tree.merge(tmp_path / "two", tmp_path / "out")


def test_globs_give_execute_bits_and_do_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "llama-server").write_text("x")
    (tmp_path / "LICENSE").write_text("x")
    (tmp_path / "llama-link").symlink_to("LICENSE")
    tree.mark_executable(tmp_path, ("llama-*",))
    assert (tmp_path / "llama-server").stat().st_mode & 0o111
    assert not (tmp_path / "LICENSE").stat().st_mode & 0o111
