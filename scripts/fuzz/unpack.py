#!/usr/bin/env python3
"""Feed the extractor archives nobody meant well with, and look at what it did to the disk after each of them.

    unpack.py [--seconds 600] [--seed N] [--keep DIR]        prints the figures; exit code 1 when something was found
    unpack.py --quick                                        five seconds
    unpack.py --steady 60        unpacks the same 400 archives so many times: memory must not move at all

Archives are made three ways: random lists of members (names, links and sizes from a dictionary of nasty ones), the
bytes of such archives changed at random with their checksums made right again, and raw changes of the packed file.
After each one: what lies outside the target is as it was (content, mode, time, link count); after a refusal nothing of
the target is left; what came out holds only plain files, directories and links to files inside it, with modes 0755 and
0644. An input that takes more than 5 s is a hang, any exception but a refusal is a crash, and memory is read once a
second: what it was after ten seconds and after each quarter of the rest is printed. Findings are kept in --keep.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import io
import os
import random
import resource
import shutil
import signal
import stat
import struct
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from llmgw.errors import ArchiveRefused, InstallError
from llmgw.install.unpack import unpack

HANG_S = 5
NAMES = [
    "a", "b", "A", "a/b", "a/b/c", "./a", "./", ".", "..", "../x", "a/../b", "a/../../x", "/etc/passwd", "//x", "a//b",
    "a/./b", "", " ", "a\\b", "C:x", "a\nb", "a\x1b[2Jb", "a\x00b", "n" * 255, "n" * 256, "/".join("d" * 17),
    "libllama.so", "libllama.so.0", "llama-server", ".staging-x", ".tmp-x", ".records", "\u202ea", "\u0130", "\u1e9e",
    "a" * 90 + "/" + "b" * 90, "proc/self/fd/3", "é", "e\u0301", "\udcff", "a/\udc80", "conin$", "@OUTSIDE@/new",
    "@OUTSIDE@/precious", "../outside/precious", "../outside/new", "a/../../outside/new",
]  # fmt: skip
MILD = [f"{folder}{stem}{at}" for folder in ("", "a/", "a/b/", "./a/") for stem in ("f", "l") for at in range(8)]
KINDS = [
    tarfile.REGTYPE, tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.SYMTYPE,
    tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, tarfile.AREGTYPE,
    b"x", b"g", b"L", b"K", b"X", b"V", b"\x00", b"Z",
]  # fmt: skip
SIZES = [0, 1, 511, 512, 513, 4096, 70_000]
FIELDS = [b"size", b"path", b"linkpath", b"GNU.sparse.major", b"GNU.sparse.map", b"hdrcharset", b"mode", b"comment"]


class Hang(BaseException):
    """An input took too long."""


class Maker:
    """Makes archives out of a random source; `outside` is a directory nothing may be written to."""

    def __init__(self, seed: int, outside: Path) -> None:
        self._random = random.Random(seed)
        self._outside = str(outside)
        self._nasty = 1.0

    def _name(self) -> str:
        pick = self._random
        if pick.random() > self._nasty:
            return pick.choice(MILD)
        name = pick.choice(NAMES)
        if pick.random() < 0.2:
            name = f"{pick.choice(NAMES)}/{name}"
        return name.replace("@OUTSIDE@", self._outside)

    def _member(self) -> tuple[tarfile.TarInfo, bytes]:
        pick = self._random
        info = tarfile.TarInfo(self._name())
        info.type = pick.choice(KINDS) if pick.random() < self._nasty else pick.choice(KINDS[:7])
        data = pick.randbytes(pick.choice(SIZES)) if pick.random() < 0.7 else b"\0" * pick.choice(SIZES)
        info.size = len(data) if info.isreg() or pick.random() < self._nasty / 5 else 0
        info.mode = pick.choice([0, 0o644, 0o755, 0o7777, 0o4755])
        if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) or pick.random() < self._nasty:
            info.linkname = self._name().rsplit("/", pick.randrange(2))[-1]
        info.uid = info.gid = pick.choice([0, 1000, 2**31])
        if pick.random() < self._nasty / 5:
            info.pax_headers = {pick.choice(FIELDS).decode(): pick.choice(["1", "-1", "9" * 30, "../x", "a\0b"])}
        return info, data if info.size else b""

    def _tar(self) -> bytes:
        pick, raw = self._random, io.BytesIO()
        form = pick.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
        with tarfile.open(fileobj=raw, mode="w", format=form, errors="surrogateescape") as out:
            for _ in range(pick.randrange(1, 12)):
                info, data = self._member()
                try:
                    out.addfile(info, io.BytesIO(data))
                except (ValueError, UnicodeError, OverflowError):
                    continue
        return raw.getvalue()

    def _zip(self) -> bytes:
        pick, raw = self._random, io.BytesIO()
        with zipfile.ZipFile(raw, "w") as out:
            for _ in range(pick.randrange(1, 8)):
                try:
                    info = zipfile.ZipInfo(self._name() or "x")
                    info.create_system = pick.choice([0, 3])
                    kind = stat.S_IFREG
                    if pick.random() < self._nasty:
                        kind = pick.choice([stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR, stat.S_IFIFO, 0])
                    info.external_attr = (kind | 0o777) << 16
                    info.compress_type = pick.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
                    out.writestr(info, pick.randbytes(pick.choice(SIZES)))
                except (ValueError, UnicodeError):
                    continue
        return raw.getvalue()

    def _changed(self, data: bytes) -> bytearray:
        pick, made = self._random, bytearray(data)
        for _ in range(pick.randrange(1, 6)):
            at = pick.randrange(max(1, len(made)))
            way = pick.randrange(6)
            if way == 0:
                made[at : at + 1] = bytes([pick.randrange(256)])
            elif way == 1:
                del made[at : at + pick.choice([1, 512, 4096])]
            elif way == 2:
                made[at:at] = made[at : at + 512]
            elif way == 3:
                made[at : at + 12] = pick.choice([b"\xff" * 12, b"\x80" + b"\0" * 11, b"77777777777\0", b" " * 12])
            elif way == 4:
                made[at : at + 4] = struct.pack("<I", pick.choice([0, 1, 0xFFFFFFFF, len(made)]))
            else:
                header = at - at % 512
                made[header + 156 : header + 157] = pick.choice(KINDS)
        return made

    def archive(self) -> bytes:
        """One more."""
        pick = self._random
        self._nasty = pick.choice([0.0, 0.05, 0.2, 0.6])
        if pick.random() < 0.3:
            made = self._zip()
            return bytes(self._changed(made)) if pick.random() < 0.7 else made
        made = self._tar()
        if pick.random() < 0.6:
            made = bytes(_right_checksums(self._changed(made)))
        packed = gzip.compress(made, 1, mtime=0)
        if pick.random() < 0.1:
            packed += pick.choice([b"x", packed, b"\0" * 100])
        return bytes(self._changed(packed)) if pick.random() < 0.1 else packed


def _right_checksums(data: bytearray) -> bytearray:
    """Make every block that looks like a header pass its checksum, so that the change behind it is reached."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return data


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below `root` that a write could change."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder, name)
            info = path.lstat()
            data = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(info.st_mode) else ""
            found[str(path)] = (info.st_mode, info.st_mtime_ns, info.st_size, info.st_nlink, data)
    return found


def wrong_in(out: Path) -> str:
    """What must not be in an unpacked tree, "" when all is well."""
    root = out.resolve()
    for folder, folders, names in os.walk(out):
        for name in (*folders, *names):
            path = Path(folder, name)
            info = path.lstat()
            if stat.S_ISLNK(info.st_mode):
                if not path.resolve().is_relative_to(root) or not path.resolve().is_file():
                    return f"a link leads to {os.readlink(path)!a}"
            elif not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
                return f"{name!a} is of kind {stat.S_IFMT(info.st_mode):o}"
            elif stat.S_IMODE(info.st_mode) not in (0o755, 0o644):
                return f"{name!a} has mode {stat.S_IMODE(info.st_mode):o}"
    return ""


def _alarm(*_: object) -> None:
    raise Hang


def attempt(archive: Path, out: Path) -> tuple[str, str]:
    """Unpack once; returns what it came to and, for a finding, what is wrong."""
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        unpack(archive, out)
    except ArchiveRefused as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        words = error.words()
        if not words.isprintable():
            return "finding", f"words are not escaped: {words!a}"
        return "refused", "the target was left behind" if out.exists() else ""
    except InstallError as error:
        return "refused by the file system", "the target was left behind" if out.exists() else error.words()
    except Hang:
        return "hang", f"it took more than {HANG_S} s"
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "accepted", wrong_in(out)


def rss_mib() -> float:
    """What this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


def _fast_directory() -> str | None:
    """Memory rather than a disk, where there is one: the disk is not what is being tried."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def campaign(seconds: float, seed: int, keep: Path | None, say: Callable[[str], None] = print) -> int:
    """Run for `seconds`; returns the number of findings."""
    signal.signal(signal.SIGALRM, _alarm)
    warnings.simplefilter("ignore", UserWarning)  # zipfile warns about the double names that are wanted here
    counts: Counter[str] = Counter()
    findings: list[str] = []
    with tempfile.TemporaryDirectory(prefix="llmgw-fuzz-", dir=_fast_directory()) as jail:
        outside, archive, out = Path(jail, "outside"), Path(jail, "archive"), Path(jail, "work", "out")
        (outside / "folder").mkdir(parents=True)
        out.parent.mkdir()
        (outside / "precious").write_text("precious")
        (outside / "precious").chmod(0o600)
        (outside / "folder" / "link").symlink_to("../precious")
        before = snapshot(outside)
        maker = Maker(seed, outside)
        began = read_at = time.monotonic()
        readings: list[tuple[float, float]] = []
        slowest = 0.0
        while (now := time.monotonic()) - began < seconds:
            if now - read_at >= 1:
                gc.collect()
                readings.append((now - began, rss_mib()))
                read_at = now
            data = maker.archive()
            archive.write_bytes(data)
            started = time.process_time()
            outcome, wrong = attempt(archive, out)
            slowest = max(slowest, time.process_time() - started)
            counts[outcome] += 1
            if outcome == "accepted":
                shutil.rmtree(out)
            if snapshot(outside) != before or sorted(os.listdir(jail)) != ["archive", "outside", "work"]:
                outcome, wrong = "escape", "something outside of the target changed"
            if os.listdir(out.parent):
                wrong = wrong or "something was left behind"
                shutil.rmtree(out, ignore_errors=True)
            if wrong and outcome != "refused by the file system":
                name = hashlib.sha256(data).hexdigest()[:16]
                findings.append(f"{name}: {outcome}: {wrong}")
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / name).write_bytes(data)
                if outcome == "escape":
                    break
        settled = [rss for at, rss in readings if at >= min(10.0, seconds / 3)] or [rss_mib()]
    total = sum(counts.values())
    say(f"seed {seed}, Python {sys.version.split()[0]}: {total} archives in {time.monotonic() - began:.0f} s")
    say(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    quarters = [settled[min(len(settled) - 1, len(settled) * part // 4)] for part in range(5)]
    memory = ", ".join(f"{rss:.1f}" for rss in quarters)
    say(f"slowest {slowest * 1000:.0f} ms of CPU; memory in MiB at the start and after each quarter: {memory}")
    for line in findings[:20]:
        say(f"FOUND {line}")
    say(f"{len(findings)} findings")
    # half way everything is warm: what grows after that would grow for ever
    return len(findings) + (quarters[4] - quarters[2] > 4)


def steady(rounds: int, seed: int, say: Callable[[str], None] = print) -> int:
    """The extractor alone, without making archives; returns 1 when it keeps memory."""
    signal.signal(signal.SIGALRM, _alarm)
    warnings.simplefilter("ignore", UserWarning)
    readings = []
    with tempfile.TemporaryDirectory(prefix="llmgw-fuzz-", dir=_fast_directory()) as jail:
        maker, archives, out = Maker(seed, Path(jail, "outside")), [], Path(jail, "out")
        for at in range(400):
            archives.append(Path(jail, str(at)))
            archives[-1].write_bytes(maker.archive())
        for _ in range(rounds):
            for archive in archives:
                if attempt(archive, out)[0] == "accepted":
                    shutil.rmtree(out)
            gc.collect()
            readings.append((rss_mib(), len(gc.get_objects())))
    warm, last = readings[len(readings) // 10], readings[-1]
    say(f"{rounds * 400} unpackings: {warm[0]:.2f} -> {last[0]:.2f} MiB, {warm[1]} -> {last[1]} objects")
    return int(last[0] - warm[0] > 1 or last[1] - warm[1] > 50)


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steady", type=int, metavar="ROUNDS")
    args = parser.parse_args()
    if args.steady:
        return steady(args.steady, args.seed)
    return 1 if campaign(5 if args.quick else args.seconds, args.seed, args.keep) else 0


if __name__ == "__main__":
    sys.exit(main())
