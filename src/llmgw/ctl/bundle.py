"""Bundles for closed networks: one zip file with `SHA256SUMS` and `ENGINE/VERSION/NAME` members, nothing compressed.

What is read was made by anybody: names, sizes and digests are checked here, and digests by the server again.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from attrs import frozen

from llmgw.ctl.client import Client
from llmgw.errors import UsageError
from llmgw.system.clock import Clock
from llmgw.units import format_size

SUMS = "SHA256SUMS"
_MEMBER = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})/([A-Za-z0-9][A-Za-z0-9._+!-]{0,63})/([A-Za-z0-9_][\w.+~-]{0,199})"
)
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_SUMS_LIMIT = 4 << 20
_UPLOAD_PIECE = 1 << 20
_DOWNLOAD_PIECE = 8 << 20
_PATIENCE_S = 600.0

Say = Callable[[str], None]


@frozen
class File:
    """One archive: `open` gives its bytes."""

    name: str
    size: int
    sha256: str
    open: Callable[[], contextlib.AbstractContextManager[Any]]


@frozen
class Release:
    """The files of one version."""

    engine: str
    version: str
    files: tuple[File, ...]


@frozen
class Chosen:
    """One file to export."""

    engine: str
    version: str
    name: str
    sha256: str

    @property
    def member(self) -> str:
        return f"{self.engine}/{self.version}/{self.name}"


def choose(listed: Any, engine: str | None, version: str | None, globs: Sequence[str]) -> tuple[Chosen, ...]:
    """What to export of the server's releases: the files it keeps, or those whose names match a glob.

    Raises:
        UsageError: nothing matches; says what there is.
    """
    found, there = [], []
    for release in listed if isinstance(listed, list) else ():
        name, its_version = str(release.get("engine")), str(release.get("version"))
        if (engine or name) != name or (version or its_version) != its_version:
            continue
        there.append(f"{name} {its_version}")
        for asset in release.get("assets") or ():
            file, sha256 = str(asset.get("name")), asset.get("sha256")
            wanted = any(fnmatch.fnmatchcase(file, glob) for glob in globs) if globs else asset.get("kept")
            if wanted and isinstance(sha256, str):
                found.append(Chosen(name, its_version, file, sha256))
    for each in found:
        if not _MEMBER.fullmatch(each.member):
            raise UsageError(f"`{each.member[:200]}` cannot be the name of a file in a bundle")
    if not found:
        known = f"it knows {', '.join(there)}" if there else "it knows no release; `server` must be among its `sources`"
        hint = "name files with `--asset GLOB`" if there and not globs else "see `llmgw ctl engines`"
        raise UsageError("the server has no file to export", cause=known, hint=hint)
    return tuple(found)


def write(path: Path, chosen: Sequence[Chosen], client: Client, clock: Clock, say: Say) -> None:
    """Download the chosen files and write the bundle; `path` appears when it is whole.

    Raises:
        ApiError: the server cannot give one of them, in its words.
        UsageError: the bundle cannot be written, or what came is not what was announced.
    """
    part = path.with_name(f"{path.name}.partial")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as bundle:
            bundle.writestr(SUMS, "".join(f"{each.sha256}  {each.member}\n" for each in chosen))
            for each in chosen:
                with bundle.open(each.member, "w", force_zip64=True) as out:
                    size = _download(each, client, clock, out, say)
                say(f"{each.member} ({format_size(size)})")
        part.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write `{path}`", cause=error.strerror or str(error)) from error
    finally:
        part.unlink(missing_ok=True)


def _download(each: Chosen, client: Client, clock: Clock, out: Any, say: Say) -> int:
    address = f"/assets/{each.sha256}/{quote(each.name, safe='')}"
    digest, done, said, begun = hashlib.sha256(), 0, "", clock.monotonic()
    while True:
        answer = client.piece(address, done, done + _DOWNLOAD_PIECE - 1)
        if answer.status == 503 and clock.monotonic() - begun < _PATIENCE_S:
            words = str(client.failed(answer))
            if words != said:
                said = words
                say(words)
            clock.wait(threading.Event(), 0.5)
            continue
        if answer.status not in (200, 206):
            raise client.failed(answer)
        digest.update(answer.body)
        out.write(answer.body)
        done += len(answer.body)
        total = answer.headers.get("content-range", "").rpartition("/")[2]
        if answer.status == 200 or not answer.body or (total.isdigit() and done >= int(total)):
            break
    if digest.hexdigest() != each.sha256:
        raise UsageError(
            f"`{each.member}` came with other bytes than announced",
            cause=f"expected sha256 {each.sha256}, found {digest.hexdigest()}",
        )
    return done


def read(paths: Sequence[Path], engine: str | None, version: str | None) -> tuple[Release, ...]:
    """What the files hold, by engine and version.

    Raises:
        UsageError: one is neither a bundle, nor an archive whose engine and version are given.
    """
    found: dict[tuple[str, str], dict[str, File]] = {}
    for path in paths:
        if not path.is_file():
            raise UsageError(f"`{path}` is not there, or is no file")
        members = _bundle(path)
        if members is None:
            if engine is None or version is None:
                raise UsageError(
                    f"`{path}` is no bundle",
                    cause=f"it holds no `{SUMS}`",
                    hint="give a plain archive with `--engine NAME --version VERSION`",
                )
            members = [(f"{engine}/{version}/{path.name}", _plain(path))]
        for member, file in members:
            match = _MEMBER.fullmatch(member)
            if match is None:
                raise UsageError(f"`{path}` has a member of no good name", cause=f"{member[:200]!a}")
            files = found.setdefault((match[1], match[2]), {})
            if files.setdefault(match[3], file).sha256 != file.sha256:
                raise UsageError(f"`{member}` is given twice with different bytes")
    return tuple(Release(*key, tuple(files.values())) for key, files in sorted(found.items()))


def _plain(path: Path) -> File:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
            size += len(block)
    return File(path.name, size, digest.hexdigest(), lambda: path.open("rb"))


def _bundle(path: Path) -> list[tuple[str, File]] | None:
    """The members of a bundle; None when it is none (a release may be a zip file too)."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as bundle:
            if SUMS not in bundle.namelist():
                return None
            with bundle.open(SUMS) as handle:
                text = handle.read(_SUMS_LIMIT).decode("utf-8", "replace")
            sizes = {info.filename: info.file_size for info in bundle.infolist()}
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError, EOFError) as error:
        raise UsageError(f"`{path}` cannot be read", cause=str(error)) from error
    members = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise UsageError(f"`{path}` cannot be read", cause=f"line {number} of its `{SUMS}` is not one")
        if match[2] not in sizes:
            raise UsageError(f"`{path}` is not whole", cause=f"`{match[2][:200]}` is listed and not in it")
        name = match[2].rpartition("/")[2]
        members.append((match[2], File(name, sizes[match[2]], match[1], _opener(path, match[2]))))
    return members


def _opener(path: Path, member: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def opened() -> Iterator[Any]:
        with zipfile.ZipFile(path) as bundle, bundle.open(member) as handle:
            yield handle

    return opened


def upload(release: Release, client: Client, say: Say) -> bool:
    """Give one version's files to the server, piece by piece; those it has are not sent again.

    Returns:
        False when all of it was there already.

    Raises:
        ApiError: the server refuses it, in its words.
        UsageError: a file is shorter or longer than its bundle says.
    """
    for file in release.files:
        _upload_one(file, client)
        say(f"{file.name} ({format_size(file.size)}) is there")
    assets = [{"name": file.name, "size_bytes": file.size, "sha256": file.sha256} for file in release.files]
    body = {"engine": release.engine, "version": release.version, "assets": assets}
    return bool(client.post("releases", body=body).get("changed"))


def _upload_one(file: File, client: Client) -> None:
    have = _put(client, file, 0, b"")
    if have >= file.size:
        return
    try:
        with file.open() as handle:
            _skip(handle, have)
            while have < file.size:
                piece = handle.read(min(_UPLOAD_PIECE, file.size - have))
                if not piece:
                    raise UsageError(f"`{file.name}` ended after {have} of {file.size} bytes")
                now = _put(client, file, have, piece)
                if now != have + len(piece):
                    raise UsageError(
                        f"`{file.name}` is being uploaded by somebody else too", hint="wait for the other upload"
                    )
                have = now
    except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"cannot read `{file.name}`", cause=str(error)) from error


def _skip(handle: BinaryIO, count: int) -> None:
    while count > 0:
        block = handle.read(min(1 << 20, count))
        if not block:
            return
        count -= len(block)


def _put(client: Client, file: File, offset: int, piece: bytes) -> int:
    query = f"size={file.size}&offset={offset}"
    answer = client.put_bytes("uploads", file.sha256, file.name, query=query, body=piece)
    have = answer.get("have")
    return have if isinstance(have, int) else 0
