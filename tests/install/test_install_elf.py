"""What an ELF file asks for, read from real files, cut ones and hostile ones."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from install_fakes import DEBIAN

from llmgw.install.elf import Elf, NotElf, is_elf, read_elf
from llmgw.install.ldd import too_new

PROGRAM = Path(shutil.which("env") or "/usr/bin/env").resolve()
BYTES = PROGRAM.read_bytes()


def test_a_real_build_is_read_as_readelf_reads_it(real_engine_dir: Path) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    for path in real_engine_dir.iterdir():
        if path.is_symlink() or not is_elf(path):
            continue
        found = read_elf(path)
        said = subprocess.run([readelf, "-V", "-d", "-W", path], capture_output=True, text=True, check=True).stdout
        assert found.needed == tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", said))
        assert set(found.versions) == set(re.findall(r"Name: (\S+)  Flags: \S+(?: \S+)?  Version", said))
        assert found.machine == "x86_64"


def test_versions_above_the_nodes_own_are_told() -> None:
    needs = ("GLIBC_2.34", "GLIBC_2.38", "GLIBCXX_3.4.32", "GLIBC_PRIVATE", "CXXABI_1.3.15", "GLIBCXX_3.4.9")
    assert too_new(needs, DEBIAN) == ("GLIBC_2.38", "GLIBCXX_3.4.32")
    assert too_new(needs, DEBIAN, {"libstdc++.so.6"}) == ("GLIBC_2.38",), "the build brings its own"


@pytest.mark.parametrize("length", [0, 3, 4, 63, 64, 500, len(BYTES) // 2, len(BYTES) - 1])
def test_a_cut_file_is_told_as_such(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut"
    path.write_bytes(BYTES[:length])
    with pytest.raises(NotElf, match="is cut short" if length > 3 else "is not an ELF file"):
        read_elf(path)


def test_a_script_is_not_elf(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("#!/bin/sh\n")
    assert not is_elf(tmp_path / "x")
    assert not is_elf(tmp_path / "not-there")


@settings(max_examples=120, deadline=None)
@given(some.integers(0, min(len(BYTES), 8192) - 8), some.binary(min_size=1, max_size=16), some.booleans())
def test_any_changed_file_is_read_or_refused(at: int, data: bytes, table: bool) -> None:
    changed = bytearray(BYTES)
    if table:
        (segments,) = struct.unpack_from("<Q", changed, 32)
        at = int(segments) + at % 600
    changed[at : at + len(data)] = data
    with tempfile.NamedTemporaryFile() as file:
        file.write(changed)
        file.flush()
        try:
            found = read_elf(Path(file.name))
        except NotElf as error:
            words = str(error)
        else:
            assert isinstance(found, Elf)
            words = " ".join((*found.needed, *found.versions))
    assert words.isprintable()


def hostile(count: int, libraries: int = 1) -> bytes:
    """A file made of nothing but a version table with `count` entries per library."""
    strings = b"\0GLIBC_2.4\0"
    table_at = 64 + 2 * 56
    strings_at = table_at + 6 * 16
    needs_at = strings_at + 16
    aux = b"".join(struct.pack("<IHHII", 0, 0, 2, 1, 16) for _ in range(count))
    needs = b"".join(struct.pack("<HHIII", 1, 0xFFFF, 1, 16, 16) for _ in range(libraries))
    size = needs_at + len(needs) + len(aux)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 0x3E, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    dynamic = struct.pack("<IIQQQQQQ", 2, 4, table_at, table_at, table_at, 96, 96, 8)
    tags = ((1, 1), (5, strings_at), (10, len(strings)), (0x6FFFFFFE, needs_at), (0x6FFFFFFF, libraries), (0, 0))
    table = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    return header + load + dynamic + table + strings.ljust(16, b"\0") + needs + aux


def test_a_version_table_without_end_ends_at_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "many"
    path.write_bytes(hostile(3))
    with pytest.raises(NotElf, match="is cut short"):
        read_elf(path)
    path.write_bytes(hostile(5000))
    with pytest.raises(NotElf, match="it needs more than 1024 symbol versions"):
        read_elf(path)
