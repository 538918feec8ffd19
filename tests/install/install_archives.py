"""Archives made in code: good ones, and every hostile kind."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

TOP = "llama-b1"


def entry(name: str, data: bytes = b"x", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.uid, info.uname = len(data), mode, 1234, "stranger"
    return info, data


def special(name: str, kind: bytes, target: str = "", mode: int = 0o777) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    return info, None


def folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes | None]:
    return special(name, tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes | None]:
    return special(name, tarfile.SYMTYPE, target)


def hard(name: str, target: str) -> tuple[tarfile.TarInfo, bytes | None]:
    return special(name, tarfile.LNKTYPE, target)


def tar(entries: Iterable[tuple[tarfile.TarInfo, bytes | None]], form: int = tarfile.GNU_FORMAT) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=form, errors="surrogateescape") as made:
        for info, data in entries:
            made.addfile(info, io.BytesIO(data) if data is not None else None)
    return raw.getvalue()


def tar_gz(entries: Iterable[tuple[tarfile.TarInfo, bytes | None]], form: int = tarfile.GNU_FORMAT) -> bytes:
    return gzip.compress(tar(entries, form), 1)


def good(prefix: str = f"{TOP}/") -> list[tuple[tarfile.TarInfo, bytes | None]]:
    return [
        folder(prefix.rstrip("/") or "."),
        link(f"{prefix}libllama.so", "libllama.so.0"),
        link(f"{prefix}libllama.so.0", "libllama.so.0.4.1"),
        entry(f"{prefix}libllama.so.0.4.1", b"\x7fELF library", 0o777),
        entry(f"{prefix}llama-server", b"#!/bin/sh\necho hello\n", 0o4755),
        entry(f"{prefix}LICENSE", b"MIT", 0o600),
    ]


def raw_header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A ustar header with a size field written as it is."""
    block = bytearray(512)
    block[0 : len(name)] = name
    block[100:108] = b"0000644\0"
    block[108:116] = block[116:124] = b"0000000\0"
    block[124:136] = size.ljust(12, b"\0")
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _pax_record(key: str, value: bytes) -> bytes:
    body = b" %s=%s\n" % (key.encode(), value)
    length = len(body)
    while len(b"%d" % length) + len(body) != length:
        length = len(b"%d" % length) + len(body)
    return b"%d" % length + body


def pax_before(records: dict[str, bytes], member: bytes, kind: bytes = b"x") -> bytes:
    data = b"".join(_pax_record(key, value) for key, value in records.items())
    header = raw_header(b"pax", b"%011o" % len(data), kind)
    return header + data.ljust(-(-len(data) // 512) * 512, b"\0") + member


END = b"\0" * 1024


def file_block(name: bytes = b"a", data: bytes = b"x") -> bytes:
    return raw_header(name, b"%011o" % len(data)) + data.ljust(512, b"\0")


def _deep_chain() -> list[tuple[tarfile.TarInfo, bytes | None]]:
    """Directories and links whose resolved path outgrows PATH_MAX, then a link through them to the outside."""
    made: list[tuple[tarfile.TarInfo, bytes | None]] = []
    path = ""
    for letter in "bcefghijklmnopqr":
        made.append(folder(f"{path}{'d' * 247}"))
        made.append(link(f"{path}{letter}", "d" * 247))
        path += f"{letter}/"
    made.append(link(f"{path}{'l' * 254}", "../" * 16))
    made.append(link("escape", f"{path}{'l' * 254}/../outside"))
    return made


def hostile() -> dict[str, Callable[[], bytes]]:
    """Name of a case -> makes the archive. Every one must be refused as a whole."""
    server = entry("a/llama-server", b"ok", 0o755)

    def of(*entries: tuple[tarfile.TarInfo, bytes | None]) -> Callable[[], bytes]:
        return lambda: tar_gz([server, *entries])

    def pax(*entries: tuple[tarfile.TarInfo, bytes | None]) -> Callable[[], bytes]:
        return lambda: tar_gz([server, *entries], tarfile.PAX_FORMAT)

    def raw(data: bytes) -> Callable[[], bytes]:
        return lambda: gzip.compress(data, 1)

    return {
        "04 parent": of(entry("../x")),
        "05 parent in the middle": of(entry("a/../../x")),
        "06 absolute": of(entry("/abs/x")),
        "07 empty component": of(entry("a//b")),
        "08 backslash": of(entry("a\\b")),
        "08 drive": of(entry("C:x")),
        "09 empty name": raw(file_block(b"", b"x") + END),
        "10 NUL in a name": raw(pax_before({"path": b"a\0b"}, file_block()) + END),
        "11 newline in a name": of(entry("a/b\nc")),
        "11 escape in a name": of(entry("a/\x1b[31mred")),
        "11 right-to-left override": of(entry("a/\u202eexe.so")),
        "12 not UTF-8": raw(file_block(b"a/\xff\xfe") + END),
        "13 absolute link": of(link("a/l", "/etc/passwd")),
        "14 link climbs out": of(link("a/l", "../../etc/passwd")),
        "15 file through a linked directory": of(link("a/d", "."), entry("a/d/x")),
        "16 link to dot, then up": of(link("a/d", "."), entry("a/d/../x")),
        "17 dangling link": of(link("a/l", "nothing")),
        "18 link loop": of(link("a/l", "m"), link("a/m", "l")),
        "18 link to itself": of(link("a/l", "l")),
        "19 PATH_MAX chain": pax(*_deep_chain(), entry("escape/x")),
        "20 PATH_MAX chain, hard link": pax(*_deep_chain(), hard("h", "escape"), entry("h")),
        "21 hard link outside": of(hard("a/h", "../../etc/passwd")),
        "21 hard link absolute": of(hard("a/h", "/etc/passwd")),
        "22 hard link to a link": of(link("a/l", "llama-server"), hard("a/h", "a/l")),
        "23 hard link to a later member": of(hard("a/h", "a/later"), entry("a/later")),
        "24 empty link target": of(link("a/l", "")),
        "25 gzip bomb": gzip_bomb,
        "26 huge pax header": lambda: gzip.compress(pax_before({"comment": b"\0" * (64 << 20)}, file_block()) + END, 9),
        "26 pax header above the limit": raw(pax_before({"comment": b"c" * 70_000}, file_block()) + END),
        "27 too many members": lambda: gzip.compress(
            b"".join(raw_header(b"a/%d" % number, b"00000000000") for number in range(5_050)) + END, 1
        ),
        "28 GNU sparse": raw(raw_header(b"a/s", b"%011o" % 512, b"S") + b"\0" * 512 + END),
        "29 pax sparse": raw(pax_before(_SPARSE, file_block(b"a/s", b"1\n0\n512\n".ljust(512, b"\0"))) + END),
        "30 truncated data": raw(raw_header(b"a/x", b"%011o" % 4096) + b"x" * 100),
        "30 no end mark": raw(file_block(b"a/x")),
        "31 negative size": raw(raw_header(b"a/x", b"\xff" * 12) + END),
        "32 duplicate": of(entry("a/x"), entry("a/x")),
        "32 duplicate by ./": of(entry("a/x"), entry("./a/x")),
        "33 file, then directory": of(entry("a/x"), folder("a/x")),
        "33 file as parent": of(entry("a/x"), entry("a/x/y")),
        "34 case collision": of(entry("a/Lib"), entry("a/lib")),
        "34 case collision of directories": of(entry("Dir/x"), entry("dir/y")),
        "35 two sizes": raw(pax_before({"size": b"3"}, file_block(b"a/x", b"xyz1")) + END),
        "36 second gzip stream": lambda: tar_gz([server]) + tar_gz([entry("evil")]),
        "36 bytes after the stream": lambda: tar_gz([server]) + b"tail",
        "36 bytes after the end mark": raw(file_block(b"a/x") + END + file_block(b"evil") + END),
        "36 damaged second header": raw(file_block(b"a/x") + b"\x01" * 512 + END),
        "39 character device": of(special("a/null", tarfile.CHRTYPE)),
        "39 block device": of(special("a/sda", tarfile.BLKTYPE)),
        "39 pipe": of(special("a/pipe", tarfile.FIFOTYPE)),
        "42 our staging": of(entry(".staging-1/x")),
        "42 our records": of(entry("a/.records")),
        "43 long component": pax(entry("a/" + "n" * 256)),
        "43 deep": pax(entry("/".join("d" * 17) + "/x")),
        "35 global header": raw(pax_before({"path": b"a/other"}, file_block(b"a/x"), b"g") + END),
        "30 cut gzip": lambda: tar_gz([server])[:-20],
        "36 flipped bit": lambda: _flip(tar_gz(good())),
        "beside: nothing of it": lambda: b"<html>not found</html>",
        "beside: empty": lambda: b"",
        "beside: empty tar": raw(END),
        "37 overlapping zip": overlapping_zip,
        "38 zip with two names": two_names_zip,
        "38 zip with two sizes": two_sizes_zip,
        "zip name that is not UTF-8": bad_utf8_zip,
        "zip parent": lambda: zipped({"../x": b"x"}),
        "zip absolute": lambda: zipped({"/x": b"x"}),
        "zip NUL": lambda: zipped({"abcd": b"x"}).replace(b"abcd", b"a\0cd"),
        "zip link": zip_link,
        "zip duplicate": lambda: zipped({"xx": b"1", "xy": b"2"}).replace(b"xy", b"xx"),
        "zip bomb": lambda: zipped({"z": b"\0" * (30 << 20)}),
        "zip cut": lambda: zipped({"a": b"x" * 5000})[:-30],
        "zip with a prefix": lambda: b"PK\x03\x04 stub" + zipped({"a": b"x"}),
        "zip wrong checksum": lambda: zipped({"a": b"content"}, zipfile.ZIP_STORED).replace(b"content", b"CONTENT"),
    }


_SPARSE = {
    "GNU.sparse.major": b"1",
    "GNU.sparse.minor": b"0",
    "GNU.sparse.name": b"a/s",
    "GNU.sparse.realsize": b"8589934592",
}


def gzip_bomb() -> bytes:
    size = 64 << 20
    return gzip.compress(file_block(b"a/x") + raw_header(b"a/z", b"%011o" % size) + b"\0" * size + END, 6)


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, modes: dict[str, int] | None = None) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as made:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            info.create_system = 3
            info.external_attr = (0o100000 | (modes or {}).get(name, 0o644)) << 16
            made.writestr(info, data)
    return raw.getvalue()


def zip_link() -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as made:
        info = zipfile.ZipInfo("l")
        info.create_system = 3
        info.external_attr = 0o120777 << 16
        made.writestr(info, "/etc/passwd")
    return raw.getvalue()


def _central(data: bytes, index: int) -> int:
    at = -1
    for _ in range(index + 1):
        at = data.index(b"PK\x01\x02", at + 1)
    return at


def overlapping_zip() -> bytes:
    data = bytearray(zipped({"a": b"x" * 40, "a2": b"y" * 40}, zipfile.ZIP_STORED))
    at = _central(bytes(data), 1)
    struct.pack_into("<I", data, at + 42, 0)
    return bytes(data)


def two_names_zip() -> bytes:
    data = zipped({"safe": b"x"})
    at = _central(data, 0)
    return data[:at] + data[at:].replace(b"safe", b"evil")


def bad_utf8_zip() -> bytes:
    """A name flagged as UTF-8 that is not: zipfile raises an error that is none of its own."""
    return zipped({"\u00e9\u00e9": b"x"}).replace("\u00e9\u00e9".encode(), b"\xff\xfe\xff\xfe")


def two_sizes_zip() -> bytes:
    data = bytearray(zipped({"a": b"x" * 40}, zipfile.ZIP_STORED))
    struct.pack_into("<I", data, 22, 39)
    return bytes(data)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
