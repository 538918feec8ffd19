"""Our own extractor: one bad member refuses the whole archive, and nothing is ever written outside the given directory.

`tarfile` and `zipfile` only read here: their own extraction is not a boundary (see design.md). Files are created with
`O_EXCL` below a chain of directory descriptors opened with `O_NOFOLLOW`; symbolic links are created last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from attrs import frozen

from llmgw.errors import ArchiveRefused, InstallError
from llmgw.install.members import Limits, Parts, Plan, refuse, split_name

_CHUNK = 1 << 20
_PAX_ALLOWED = {"path", "linkpath", "size", "mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment"}
# ValueError: a name that claims to be UTF-8 and is not, a negative seek; found by scripts/fuzz/unpack.py
_ZIP_FAULTS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    ValueError,
    OverflowError,
    NotImplementedError,
    EOFError,
    RuntimeError,
)


@frozen
class Unpacked:
    """What came out: number of files, their bytes, and the single top folder ("" when there is none)."""

    files: int
    total_bytes: int
    top: str


def unpack(archive: Path, into: Path, *, prefix: str = "", limits: Limits | None = None) -> Unpacked:
    """Unpack a `.tar.gz` or a zip (a wheel) into a new directory.

    Args:
        archive: told apart by its first bytes, not by its name.
        into: created here; must not exist. Removed again when the archive is refused.
        prefix: only members below this directory are written, without it; all members are judged all the same.
        limits: bounds; None means the usual ones.

    Raises:
        ArchiveRefused: a member is unsafe or the archive is damaged; names the member.
        InstallError: the node's file system refused (full, read-only).
    """
    bounds = limits or Limits()
    below = split_name(prefix) if prefix else ()
    try:
        into.mkdir(mode=0o755)
    except OSError as error:
        raise InstallError(f"cannot unpack into `{into}`", cause=error.strerror or str(error)) from error
    try:
        with archive.open("rb") as handle, _Writer(into, below) as writer:
            magic = handle.read(4)
            handle.seek(0)
            if magic[:2] == b"\x1f\x8b":
                _tar(handle, writer, bounds)
            elif magic == b"PK\x03\x04":
                _zip(handle, writer, bounds)
            else:
                raise refuse(None, "it is neither a .tar.gz nor a zip")
            return writer.result()
    except BaseException as error:
        shutil.rmtree(into, ignore_errors=True)
        if isinstance(error, OSError):
            raise InstallError(f"cannot unpack `{archive.name}`", cause=error.strerror or str(error)) from error
        raise


class _Writer:
    """Creates files, directories and links below one directory, and nowhere else."""

    def __init__(self, root: Path, below: Parts) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fchmod(self._root, 0o755)
        self._below = below
        self._at: Parts = ()
        self._at_fd: int | None = None
        self._files = 0
        self._bytes = 0
        self._tops: set[str] = set()
        self._flat = False

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)
        if self._at_fd is not None:
            os.close(self._at_fd)

    def result(self) -> Unpacked:
        if not self._files:
            raise refuse(None, "it holds no file that is wanted")
        return Unpacked(self._files, self._bytes, next(iter(self._tops)) if len(self._tops) == 1 else "")

    def _place(self, parts: Parts) -> Parts | None:
        """Where a member goes, None when it is not below the wanted directory (or is that directory)."""
        if parts[: len(self._below)] != self._below or len(parts) == len(self._below):
            return None
        return parts[len(self._below) :]

    @contextlib.contextmanager
    def _parent(self, parts: Parts) -> Iterator[int]:
        if parts != self._at or self._at_fd is None:
            fd = self._descend(parts)
            if self._at_fd is not None:
                os.close(self._at_fd)
            self._at, self._at_fd = parts, fd
        # of our own, so that a second parent may be asked for meanwhile
        fd = os.dup(self._at_fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _descend(self, parts: Parts) -> int:
        fd = os.dup(self._root)
        try:
            for part in parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
                deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                os.close(fd)
                fd = deeper
                os.fchmod(fd, 0o755)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _note(self, at: Parts, *, is_dir: bool) -> None:
        # a plain file at the top counts as a top of its own: then there is no folder to strip
        self._tops.add(at[0] if is_dir or len(at) > 1 else "/".join(("", *at)))

    def directory(self, parts: Parts) -> None:
        if at := self._place(parts):
            self._note(at, is_dir=True)
            with self._parent(at):
                pass

    def file(self, parts: Parts, source: IO[bytes], size: int, executable: bool, name: str) -> None:
        at = self._place(parts)
        if at is None:
            _drain(source, size, name)
            return
        self._note(at, is_dir=False)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            self._parent(at[:-1]) as parent,
            os.fdopen(os.open(at[-1], flags, 0o600, dir_fd=parent), "wb", buffering=0) as out,
        ):
            left = size
            while left:
                data = source.read(min(_CHUNK, left))
                if not data:
                    raise refuse(name, "its data ends before its announced size")
                view = memoryview(data)
                while view:
                    view = view[out.write(view) :]
                left -= len(data)
            os.fchmod(out.fileno(), 0o755 if executable else 0o644)
        self._files += 1
        self._bytes += size

    def hardlink(self, parts: Parts, goal: Parts) -> None:
        at, source = self._place(parts), self._place(goal)
        if at is None or source is None:
            if at is not None:
                raise refuse("/".join(parts), "it is a hard link to a file that is not wanted")
            return
        self._note(at, is_dir=False)
        with self._parent(at[:-1]) as parent, self._parent(source[:-1]) as origin:
            os.link(source[-1], at[-1], src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
        self._files += 1

    def symlink(self, parts: Parts, target: str) -> None:
        if at := self._place(parts):
            self._note(at, is_dir=False)
            with self._parent(at[:-1]) as parent:
                os.symlink(target, at[-1], dir_fd=parent)


def _drain(source: IO[bytes], size: int, name: str) -> None:
    while size:
        data = source.read(min(_CHUNK, size))
        if not data:
            raise refuse(name, "its data ends before its announced size")
        size -= len(data)


class _Gunzip:
    """A one-stream gzip reader that counts: `read` for tarfile, bounded in ratio and total."""

    def __init__(self, handle: IO[bytes], limits: Limits) -> None:
        self._handle = handle
        self._limits = limits
        self._archive_bytes = max(1, os.fstat(handle.fileno()).st_size)
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = b""
        self._out = 0
        self.tail = b""

    def read(self, size: int = -1) -> bytes:
        assert size > 0
        made = bytearray()
        while len(made) < size and not self._inflate.eof:
            if not self._pending:
                self._pending = self._handle.read(1 << 16)
                if not self._pending:
                    raise refuse(None, "it is cut short")
            try:
                made += self._inflate.decompress(self._pending, size - len(made))
            except zlib.error as error:
                raise refuse(None, f"it is damaged ({error})") from error
            self._pending = self._inflate.unconsumed_tail
        if self._inflate.eof and (self._inflate.unused_data or self._handle.read(1)):
            raise refuse(None, "there are bytes after its end")
        self._out += len(made)
        # padding and headers come on top of the files' own bytes
        if self._out > self._limits.total_bytes + self._limits.members * 2048:
            raise refuse(None, f"it unpacks to more than {self._limits.total_bytes} bytes")
        if self._out > self._limits.ratio_free_bytes and self._out > self._limits.ratio * self._archive_bytes:
            raise refuse(None, f"it unpacks to more than {self._limits.ratio} times its size")
        self.tail = (self.tail + bytes(made[-1024:]))[-1024:]
        return bytes(made)


class _Member(tarfile.TarInfo):
    """A header that is refused where tarfile would guess: bad checksums, sparse files, oversized extended headers."""

    header_limit = Limits().header_bytes
    raw_size = 0

    @classmethod
    def frombuf(cls, buf: Any, encoding: Any, errors: Any) -> _Member:
        return cls._checked(super().frombuf, buf, encoding, errors)

    @classmethod
    def _frombuf(cls, buf: Any, encoding: Any, errors: Any, **given: Any) -> _Member:
        # newer releases of CPython read headers through this one
        return cls._checked(super()._frombuf, buf, encoding, errors, **given)  # type: ignore[misc]

    @classmethod
    def _checked(cls, read: Callable[..., Any], *args: Any, **given: Any) -> _Member:
        try:
            made: _Member = read(*args, **given)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
            raise
        except (tarfile.HeaderError, ValueError) as error:
            raise refuse(None, f"a header is damaged ({error})") from error
        made.raw_size = made.size
        if made.size < 0:
            raise refuse(made.name, "its size is negative")
        return made

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        extended = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in (*extended, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if self.size > self.header_limit:
                raise refuse(self.name, f"its extended header is larger than {self.header_limit} bytes")
        elif self.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
            raise refuse(self.name, "it is neither a file, a directory nor a link (a device, a pipe or a sparse file)")
        return super()._proc_member(tar)  # type: ignore[misc]


def _tar(handle: IO[bytes], writer: _Writer, limits: Limits) -> None:
    plan = Plan(limits)
    unzipped = _Gunzip(handle, limits)
    try:
        with tarfile.open(fileobj=unzipped, mode="r|", bufsize=_CHUNK // 4, tarinfo=_Member) as tar:  # type: ignore[call-overload]
            for member in tar:
                _tar_member(tar, member, plan, writer)
            rest = tar.fileobj
            while data := rest.read(_CHUNK):
                if data.strip(b"\0"):
                    raise refuse(None, "there are bytes after its end")
            if len(unzipped.tail) < 1024 or unzipped.tail.strip(b"\0"):
                raise refuse(None, "it is cut short: its end mark is missing")
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise refuse(None, f"it is damaged ({ascii(str(error))[1:-1]})") from error
    for parts, target in plan.links().items():
        writer.symlink(parts, target)


def _tar_member(tar: tarfile.TarFile, member: Any, plan: Plan, writer: _Writer) -> None:
    name = member.name
    strange = {key for key in (*member.pax_headers, *tar.pax_headers) if key not in _PAX_ALLOWED}
    strange = {key for key in strange if not key.startswith(("SCHILY.", "LIBARCHIVE."))}
    if strange or set(tar.pax_headers) - {"comment"}:
        raise refuse(name, "it has extended headers that change how it is read")
    if member.size != member.raw_size:
        raise refuse(name, "its two headers disagree about its size")
    if member.size and not member.isreg():
        raise refuse(name, "it has data although it is not a file")
    if member.isdir():
        writer.directory(plan.directory(name))
    elif member.issym():
        plan.symlink(name, member.linkname)
    elif member.islnk():
        writer.hardlink(*plan.hardlink(name, member.linkname))
    else:
        parts = plan.file(name, member.size)
        source = tar.extractfile(member)
        assert source is not None
        writer.file(parts, source, member.size, bool(member.mode & 0o111), name)


def _zip(handle: IO[bytes], writer: _Writer, limits: Limits) -> None:
    size = os.fstat(handle.fileno()).st_size
    _check_directory_size(handle, size, limits)
    plan = Plan(limits)
    try:
        with zipfile.ZipFile(handle) as archive:
            infos = archive.infolist()
            total = sum(info.file_size for info in infos)
            if total > limits.ratio_free_bytes and total > limits.ratio * size:
                raise refuse(None, f"it unpacks to more than {limits.ratio} times its size")
            _check_layout(handle, infos)
            for info in infos:
                _zip_member(archive, info, plan, writer)
    except _ZIP_FAULTS as error:
        # ascii: a codec's complaint quotes the bytes it stumbled over
        raise refuse(None, f"it is damaged ({ascii(str(error))[1:-1]})") from error


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, plan: Plan, writer: _Writer) -> None:
    name = info.orig_filename
    mode = info.external_attr >> 16 if info.create_system == 3 else 0
    kind = stat.S_IFMT(mode)
    if info.flag_bits & 0x1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise refuse(name, "it is encrypted or compressed in a way that is not read here")
    if name.endswith("/") and kind in (0, stat.S_IFDIR) and info.file_size == 0:
        writer.directory(plan.directory(name[:-1]))
    elif kind in (0, stat.S_IFREG):
        parts = plan.file(name, info.file_size)
        with archive.open(info) as source:
            writer.file(parts, source, info.file_size, bool(mode & 0o111), name)
            if source.read(1):
                raise refuse(name, "its data goes on after its announced size")
    else:
        raise refuse(name, "it is neither a file nor a directory")


def _check_directory_size(handle: IO[bytes], size: int, limits: Limits) -> None:
    """Refuse a zip whose directory would fill memory before zipfile could be asked about it."""
    handle.seek(max(0, size - 65557))
    end = handle.read()
    at = end.rfind(b"PK\x05\x06")
    if at < 0 or len(end) - at < 22:
        raise refuse(None, "it is cut short: its end mark is missing")
    entries, length = struct.unpack_from("<HI", end, at + 10)
    if entries > limits.members or length > limits.members * 1024:
        raise refuse(None, f"it has more than {limits.members} members")
    handle.seek(0)


def _check_layout(handle: IO[bytes], infos: list[zipfile.ZipInfo]) -> None:
    """Entries must lie one after the other, and each local header must say what the directory says."""
    end = 0
    for info in sorted(infos, key=lambda each: each.header_offset):
        name = info.orig_filename
        if info.header_offset < end or (end == 0 and info.header_offset != 0):
            raise refuse(name, "its data overlaps that of another member, or bytes precede the archive")
        handle.seek(info.header_offset)
        header = handle.read(30)
        if len(header) != 30 or header[:4] != b"PK\x03\x04":
            raise refuse(name, "it has no header of its own")
        flags, method = struct.unpack_from("<HH", header, 6)
        packed, plain, name_length, extra = struct.unpack_from("<IIHH", header, 18)
        if method != info.compress_type or (
            not flags & 0x8
            and 0xFFFFFFFF not in (packed, plain)
            and (packed, plain) != (info.compress_size, info.file_size)
        ):
            raise refuse(name, "its two headers disagree about its size")
        if handle.read(name_length) != name.encode("utf-8" if flags & 0x800 else "cp437", "replace"):
            raise refuse(name, "its two headers disagree about its name")
        end = info.header_offset + 30 + name_length + extra + info.compress_size


__all__ = ["ArchiveRefused", "Unpacked", "unpack"]
