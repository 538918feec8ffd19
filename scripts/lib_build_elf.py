"""ELF files: cut down to what is loaded, and read, for any architecture and with no tool of this machine's.

Offsets are those of the 64-bit format: https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html
"""

from __future__ import annotations

import struct
from pathlib import Path

MACHINES = {62: "x86_64", 183: "aarch64"}
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")


def machine(data: bytes) -> str:
    """The architecture of an ELF file: `x86_64`, `aarch64`, or its number; "" when it is no ELF file."""
    if data[:4] != b"\x7fELF":
        return ""
    number = struct.unpack_from("<H", data, 18)[0]
    return MACHINES.get(number, str(number))


def strip(data: bytes) -> bytes:
    """The file without what is not loaded (symbols for debuggers, the section table): the loader reads segments only.

    A file that is no 64-bit little-endian ELF comes back as it is.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        return data
    head = list(_HEADER.unpack_from(data))
    offset, size, count = head[5], head[9], head[10]
    end = offset + size * count
    for index in range(count):
        segment = _SEGMENT.unpack_from(data, offset + index * size)
        end = max(end, segment[2] + segment[5])
    head[6] = head[12] = head[13] = 0  # where the section table is, how long, and which section has the names
    return _HEADER.pack(*head) + data[_HEADER.size : end]


def libraries(site: Path) -> dict[str, str]:
    """Path -> architecture of every ELF file in a tree."""
    found = {str(p.relative_to(site)): machine(p.read_bytes()[:64]) for p in sorted(site.rglob("*")) if p.is_file()}
    return {path: arch for path, arch in found.items() if arch}
