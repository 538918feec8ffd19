"""The numbered archives: which number is refused, which accepted, and one file each for any interpreter to read."""

from __future__ import annotations

import gzip
import json
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import install_archives as made

REFUSED, ACCEPTED = "refused", "accepted"
NUMBERS = range(1, 45)
ACCEPTED_NUMBERS = (1, 2, 3, 40, 41, 44)
# the archive as a whole is to blame, there is no member to name
NAMELESS = (25, 36, 37, 30)
_MIB = 1 << 20


def accepted() -> dict[str, Callable[[], bytes]]:
    """Name of a case -> makes an archive that must come out."""
    odd = [
        made.folder("a", mode=0o7777),
        made.entry("a/llama-server", b"#!/bin/sh\n", 0o6777),
        made.entry("a/data", b"x", 0o1666),
    ]
    return {
        "01 release tree with link chains": lambda: made.tar_gz(made.good()),
        "01 release tree, pax": lambda: made.tar_gz(made.good(), tarfile.PAX_FORMAT),
        "01 release tree, ustar": lambda: made.tar_gz(made.good(), tarfile.USTAR_FORMAT),
        "02 release tree below ./": lambda: made.tar_gz(made.good("./llama-b1/")),
        "03 zip with execute bits": lambda: made.zipped(
            {"a/llama-server": b"#!", "a/LICENSE": b"MIT"}, modes={"a/llama-server": 0o755}
        ),
        "03 zip, stored": lambda: made.zipped({"a/x": b"1"}, zipfile.ZIP_STORED),
        "40 setuid, sticky, writable by all, a stranger's": lambda: made.tar_gz(odd),
        "41 directory without permissions": lambda: made.tar_gz([made.folder("a", mode=0), made.entry("a/x", b"1")]),
        "44 valid tree without the expected binary": lambda: made.tar_gz([made.entry("a/other", b"x", 0o755)]),
    }


def number(case: str) -> int | None:
    """The number a case belongs to, None for one beside the list."""
    head = case.split(" ", 1)[0]
    return int(head) if head.isdigit() else None


def cases() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Name of a case -> verdict and maker."""
    found = {name: (ACCEPTED, make) for name, make in accepted().items()}
    found |= {name: (REFUSED, make) for name, make in made.hostile().items()}
    return found


def lay_out(directory: Path) -> Path:
    """Write every case as a file, and `cases.json` that says what each must come to."""
    directory.mkdir(parents=True)
    index = []
    for at, (name, (verdict, make)) in enumerate(sorted(cases().items())):
        path = directory / f"{at:03}.archive"
        path.write_bytes(make())
        index.append({"case": name, "verdict": verdict, "file": path.name})
    for name, write in _LARGE.items():
        path = directory / f"large-{len(index):03}.archive"
        write(path)
        index.append({"case": name, "verdict": REFUSED, "file": path.name})
    (directory / "cases.json").write_text(json.dumps(index))
    return directory


def _squeezed(path: Path, *pieces: tuple[bytes, int]) -> None:
    """Write (bytes, times) pairs through gzip without holding them."""
    with gzip.open(path, "wb", 1) as out:
        for piece, times in pieces:
            for _ in range(times):
                out.write(piece)


def _huge_header(path: Path) -> None:
    size = 256 * _MIB
    record = b"%d comment=" % size
    head = made.raw_header(b"pax", b"%011o" % size, b"x")
    _squeezed(path, (head + record, 1), (b"\0" * _MIB, 256), (made.file_block(b"a/x") + made.END, 1))


def _crowd(path: Path) -> None:
    template = made.raw_header(b"a/000000", b"00000000000")
    base = int(template[148:154], 8) - sum(b"000000")
    with gzip.open(path, "wb", 1) as out:
        for at in range(200_000):
            name = b"%06d" % at
            checksum = b"%06o\0 " % (base + sum(name))
            out.write(template[:2] + name + template[8:148] + checksum + template[156:])
        out.write(made.END)


def _ratio_bomb(path: Path) -> None:
    size = 128 * _MIB
    _squeezed(path, (made.raw_header(b"a/z", b"%011o" % size), 1), (b"\0" * _MIB, 128), (made.END, 1))


def _old_sparse(path: Path) -> None:
    """An old GNU sparse header: 8 GiB apparent, one real block."""
    block = bytearray(made.raw_header(b"a/s", b"%011o" % 512, b"S"))
    block[257:265] = b"ustar  \0"
    block[386:398] = b"%011o\0" % ((8 << 30) - 512)
    block[398:410] = b"%011o\0" % 512
    block[483:495] = b"%011o\0" % (8 << 30)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path.write_bytes(gzip.compress(bytes(block) + b"x" * 512 + made.END, 1))


def _stored_bomb(path: Path) -> None:
    """A zip of 4 members, each of which inflates to 32 MiB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=zlib.Z_BEST_SPEED) as out:
        for at in range(4):
            with out.open(f"a/{at}", "w") as member:
                for _ in range(32):
                    member.write(b"\0" * _MIB)


_LARGE: dict[str, Callable[[Path], None]] = {
    "25 gzip bomb of 128 MiB": _ratio_bomb,
    "26 pax header of 256 MiB": _huge_header,
    "27 200000 empty members": _crowd,
    "28 old GNU sparse file of 8 GiB": _old_sparse,
    "zip bomb of 128 MiB": _stored_bomb,
}
