"""What an ELF file asks of the node, read from the file itself: its machine, libraries, symbol versions, whole length.

Read before anything of a build is run, from files that came over the network: every offset and count is bounded, only
small pieces are read, and nothing is mapped. Follows the dynamic segment as the loader does (System V ABI, "Dynamic
Section"; the version tables as in the Linux Standard Base, "Symbol Versioning"), so a stripped section table does not
matter. Only little-endian files are known; that is every machine llmgw installs engines on.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from attrs import frozen

_MACHINES = {
    0x3E: "x86_64",
    0xB7: "aarch64",
    0x03: "i386",
    0x28: "arm",
    0xF3: "riscv64",
    0x16: "s390x",
    0x15: "ppc64le",
}
_MAX_SEGMENTS = 128
_MAX_DYNAMIC = 4096
_MAX_NEEDS = 1024
_MAX_NAME = 256
_LOAD, _DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_VERNEED, _DT_VERNEEDNUM = 1, 5, 10, 0x6FFFFFFE, 0x6FFFFFFF


class NotElf(Exception):
    """The file is not a usable ELF file; the text says why, as the end of a sentence about it."""


@frozen
class Elf:
    """One file.

    Args:
        machine: as `uname -m` says it, or a number in hex.
        needed: sonames it is linked to, in order.
        versions: symbol versions it needs, such as `GLIBC_2.34`, in order, each once.
    """

    machine: str
    needed: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


def is_elf(path: Path) -> bool:
    """Whether a file begins as ELF files do; False when it cannot be read."""
    try:
        with path.open("rb") as handle:
            return handle.read(4) == b"\x7fELF"
    except OSError:
        return False


def read_elf(path: Path) -> Elf:
    """Read one file.

    Raises:
        NotElf: it is no ELF file of this kind, is damaged or is cut short.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _File(fd, os.fstat(fd).st_size).read()
    finally:
        os.close(fd)


class _File:
    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size
        self._loads: list[tuple[int, int, int]] = []

    def _at(self, offset: int, length: int) -> bytes:
        if offset < 0 or offset + length > self._size:
            raise NotElf(f"is cut short: it has {self._size} bytes and speaks of byte {offset + length}")
        data = os.pread(self._fd, length, offset)
        if len(data) != length:
            raise NotElf("became shorter while it was read")
        return data

    def read(self) -> Elf:
        head = os.pread(self._fd, 64, 0)
        if head[:4] != b"\x7fELF":
            raise NotElf("is not an ELF file")
        if len(head) < 64:
            raise NotElf(f"is cut short: it has {self._size} bytes, not even a whole header")
        if head[4:6] != b"\x02\x01":
            raise NotElf("is not a 64-bit little-endian program")
        (number,) = struct.unpack_from("<H", head, 18)
        machine = _MACHINES.get(number, f"machine {number:#x}")
        segments_at, sections_at = struct.unpack_from("<QQ", head, 32)
        segment_size, segments, section_size, sections = struct.unpack_from("<4H", head, 54)
        # linkers write the section table last: its end is the end of a whole file
        if sections_at and sections_at + section_size * sections > self._size:
            end = sections_at + section_size * sections
            raise NotElf(f"is cut short: it has {self._size} of {end} bytes")
        if segments > _MAX_SEGMENTS or (segments and segment_size != 56):
            raise NotElf(f"is damaged: it announces {segments} segments of {segment_size} bytes")
        dynamic = self._segments(self._at(segments_at, 56 * segments))
        if dynamic is None:
            return Elf(machine)
        return self._linked(machine, *dynamic)

    def _segments(self, table: bytes) -> tuple[int, int] | None:
        dynamic = None
        for at in range(0, len(table), 56):
            kind, _, offset, address, _, in_file, in_memory, _ = struct.unpack_from("<IIQQQQQQ", table, at)
            if kind == _LOAD:
                if offset + in_file > self._size:
                    raise NotElf(
                        f"is cut short: it has {self._size} bytes, a part of it would end at {offset + in_file}"
                    )
                if in_file > in_memory:
                    raise NotElf("is damaged: a segment is larger in the file than in memory")
                self._loads.append((address, offset, in_file))
            elif kind == _DYNAMIC:
                dynamic = (offset, in_file)
        return dynamic

    def _offset(self, address: int) -> int:
        for begin, offset, length in self._loads:
            if begin <= address < begin + length:
                return offset + address - begin
        raise NotElf(f"is damaged: address {address:#x} is in none of its segments")

    def _linked(self, machine: str, offset: int, length: int) -> Elf:
        table = self._at(offset, min(length, 16 * _MAX_DYNAMIC))
        entries: dict[int, int] = {}
        needed = []
        for at in range(0, len(table) - 15, 16):
            tag, value = struct.unpack_from("<QQ", table, at)
            if tag == 0:
                break
            if tag == _DT_NEEDED:
                needed.append(value)
            entries.setdefault(tag, value)
        if _DT_STRTAB not in entries:
            return Elf(machine)
        strings = self._offset(entries[_DT_STRTAB])
        limit = entries.get(_DT_STRSZ, 0)
        names = tuple(self._string(strings, limit, value) for value in needed[:_MAX_NEEDS])
        versions: dict[str, None] = {}
        if _DT_VERNEED in entries:
            at = self._offset(entries[_DT_VERNEED])
            for name in self._needs(at, min(entries.get(_DT_VERNEEDNUM, 0), _MAX_NEEDS)):
                versions[self._string(strings, limit, name)] = None
        return Elf(machine, names, tuple(versions))

    def _needs(self, at: int, count: int) -> list[int]:
        """Offsets of version names: a chain of libraries, each with a chain of versions."""
        found: list[int] = []
        for _ in range(count):
            _, versions, _, first, following = struct.unpack("<HHIII", self._at(at, 16))
            aux = at + first
            for _ in range(versions):
                _, _, _, name, step = struct.unpack("<IHHII", self._at(aux, 16))
                found.append(name)
                if len(found) > _MAX_NEEDS:
                    raise NotElf(f"is damaged: it needs more than {_MAX_NEEDS} symbol versions")
                if not step:
                    break
                aux += step
            if not following:
                break
            at += following
        return found

    def _string(self, strings: int, limit: int, offset: int) -> str:
        if offset >= limit:
            raise NotElf("is damaged: a name of it is outside of its names")
        data = os.pread(self._fd, min(_MAX_NAME, limit - offset), strings + offset)
        name, end, _ = data.partition(b"\0")
        if not end:
            raise NotElf("is damaged: a name of it does not end")
        text = name.decode("ascii", "replace")
        return text if text.isprintable() else ascii(text)
