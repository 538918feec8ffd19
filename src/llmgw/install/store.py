"""Installed engines on disk: trees, and records outside them that say a tree is whole and was seen to run.

    <engines_dir>/<name>/<version>-<build>/             the tree
    <engines_dir>/.records/<name>/<version>-<build>.json the record, written last
    <engines_dir>/.staging-<random>/                     work in progress, swept at the next start
    <engines_dir>/.downloads/                            verified archives and resumable parts

A tree without a record is not installed; a record without its tree is removed. So a kill at any moment leaves
installed or absent, nothing between.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import cattrs
from attrs import field, frozen

from llmgw.domain.engines import InstalledEngine, Recipe
from llmgw.errors import FileError, InstallError
from llmgw.install.prove import Proof
from llmgw.install.tree import walk
from llmgw.system.clock import Clock
from llmgw.system.files import lock, make_dir, sync_dir, write_atomic

_FORMAT = 1
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_STAGING = ".staging-"


@frozen
class FileEntry:
    """One file of a tree: what it was when it was proven. `link` is the target of a symbolic link, else ""."""

    size: int
    mtime_ns: int
    mode: int
    sha256: str = ""
    link: str = ""


@frozen
class Record:
    """An installed engine: which build, from which assets, what was seen, and every file of it."""

    recipe: Recipe
    files: Mapping[str, FileEntry]
    proofs: tuple[Proof, ...]
    installed_at: float
    format: int = field(default=_FORMAT)


class Store:
    """The engines below one directory.

    Args:
        root: `engines_dir`; created when missing.
        clock: dates the records.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root = root
        self._clock = clock
        self._records = root / ".records"
        self.downloads = root / ".downloads"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock: only one agent changes it at a time.

        Raises:
            LockHeld: another process has it.
            FileError: the directory cannot be created or written.
        """
        make_dir(self.root)
        make_dir(self._records)
        make_dir(self.downloads, 0o700)
        with lock(self.root / ".lock", "llmgw agent"):
            yield

    def tree(self, name: str, version: str, build: str) -> Path:
        """Where that build's tree is or would be.

        Raises:
            InstallError: a part is not usable as a file name.
        """
        for part in (name, version, build):
            if not _SAFE.fullmatch(part) or ".." in part:
                raise InstallError(f"{part[:80]!a} cannot be part of an engine's directory name")
        return self.root / name / f"{version}-{build}"

    def _record_path(self, tree: Path) -> Path:
        return self._records / tree.parent.name / f"{tree.name}.json"

    def sweep(self) -> tuple[str, ...]:
        """Remove what a kill left behind; the lock must be held.

        Returns:
            What was removed, relative to the root.
        """
        removed = []
        for path in sorted(self.root.glob(f"{_STAGING}*")):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
        for tree in sorted(self.root.glob("[!.]*/*")):
            if not self._record_path(tree).is_file():
                self._discard(tree)
                removed.append(tree.relative_to(self.root).as_posix())
        for path in sorted(self._records.glob("*/*")):
            if path.suffix != ".json" or not (self.root / path.parent.name / path.stem).is_dir():
                path.unlink(missing_ok=True)
                removed.append(path.relative_to(self.root).as_posix())
        return tuple(removed)

    def _discard(self, tree: Path) -> None:
        # out of sight in one step first: a half-removed tree must never carry its own name
        gone = self.root / f"{_STAGING}{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            tree.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A private directory on the same file system, removed at the end whatever happens."""
        path = self.root / f"{_STAGING}{secrets.token_hex(8)}"
        make_dir(path, 0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, staged: Path, recipe: Recipe, proofs: tuple[Proof, ...]) -> Record:
        """Put a proven tree in its place and write its record; replaces what was there. The lock must be held.

        Raises:
            InstallError, FileError: the tree is not installed.
        """
        tree = self.tree(recipe.name, recipe.version, recipe.build)
        record_path = self._record_path(tree)
        record = Record(recipe, _manifest(staged), proofs, self._clock.now())
        make_dir(tree.parent)
        make_dir(record_path.parent)
        if record_path.exists():
            record_path.unlink()
            sync_dir(record_path.parent)
        try:
            if tree.exists():
                self._discard(tree)
            _sync_tree(staged)
            staged.rename(tree)
            sync_dir(tree.parent)
        except OSError as error:
            raise InstallError(f"cannot put the engine into `{tree}`", cause=error.strerror or str(error)) from error
        write_atomic(record_path, json.dumps(attrs.asdict(record), sort_keys=True).encode())
        return record

    def installed(self) -> tuple[Record, ...]:
        """Every engine with a readable record and a tree; an unreadable record counts as absent."""
        found = []
        for path in sorted(self._records.glob("*/*.json")):
            with contextlib.suppress(
                OSError, ValueError, FileError, InstallError, cattrs.BaseValidationError, TypeError
            ):
                record = cattrs.Converter().structure(json.loads(path.read_bytes()), Record)
                recipe = record.recipe
                tree = self.tree(recipe.name, recipe.version, recipe.build)
                if record.format == _FORMAT and self._record_path(tree) == path and tree.is_dir():
                    found.append(record)
        return tuple(found)

    def engine(self, record: Record) -> InstalledEngine:
        """What a launch needs to know about a record's engine."""
        recipe = record.recipe
        tree = self.tree(recipe.name, recipe.version, recipe.build)
        return InstalledEngine(
            recipe.name,
            recipe.version,
            recipe.build,
            str(tree),
            str(tree / recipe.binary),
            passed_over=recipe.passed_over,
        )

    def find(self, name: str, version: str, build: str | None = None) -> Record | None:
        """The record of that engine, the newest one when several builds are there; None when it is not installed."""
        same = [
            each
            for each in self.installed()
            if (each.recipe.name, each.recipe.version) == (name, version) and build in (None, each.recipe.build)
        ]
        return max(same, key=lambda each: each.installed_at, default=None)

    def verify(self, record: Record, *, full: bool = False) -> str | None:
        """Compare the tree with its record, by size, time and mode, or by content with `full`.

        Returns:
            None when all is as it was, else a sentence that names the first difference.
        """
        recipe = record.recipe
        tree = self.tree(recipe.name, recipe.version, recipe.build)
        try:
            present = {path.relative_to(tree).as_posix(): path for path in walk(tree)}
            for name, wanted in record.files.items():
                path = present.get(name)
                if path is None:
                    return f"`{name}` is gone from `{tree}`"
                changed = _difference(wanted, _entry(path, with_digest=full), full)
                if changed:
                    return f"`{name}` in `{tree}` has changed since it was proven: {changed}"
        except OSError as error:
            return f"`{tree}` cannot be read: {error.strerror}"
        extra = sorted(set(present) - set(record.files))
        # a backend that was dropped in would be loaded: it was never proven
        return f"`{extra[0]}` was added to `{tree}` since it was proven" if extra else None

    def remove(self, record: Record) -> None:
        """Take an engine away: record first, then the tree. The lock must be held."""
        recipe = record.recipe
        tree = self.tree(recipe.name, recipe.version, recipe.build)
        self._record_path(tree).unlink(missing_ok=True)
        self._discard(tree)

    def forget_downloads(self) -> None:
        """Remove fetched archives; partial ones too."""
        shutil.rmtree(self.downloads, ignore_errors=True)


def _entry(path: Path, *, with_digest: bool) -> FileEntry:
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        return FileEntry(0, 0, 0, "", str(path.readlink()))
    digest = ""
    if with_digest:
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return FileEntry(info.st_size, info.st_mtime_ns, stat.S_IMODE(info.st_mode), digest)


def _difference(wanted: FileEntry, found: FileEntry, full: bool) -> str:
    """What is different, for the end of a sentence; "" when nothing is."""
    if wanted.link != found.link:
        if not found.link:
            return f"it was a link to `{wanted.link}`"
        return f"it leads to {found.link!a}" + (f", not to `{wanted.link}`" if wanted.link else ", it was a file")
    if wanted.size != found.size:
        return f"it has {found.size} bytes, not {wanted.size}"
    if wanted.mode != found.mode:
        lost = " (its execute bit is lost)" if wanted.mode & 0o111 and not found.mode & 0o111 else ""
        return f"its mode is {found.mode:04o}, not {wanted.mode:04o}{lost}"
    if full and wanted.sha256 != found.sha256:
        return "its content is another"
    return "" if wanted.mtime_ns == found.mtime_ns else "it was written again"


def _manifest(tree: Path) -> dict[str, FileEntry]:
    return {path.relative_to(tree).as_posix(): _entry(path, with_digest=True) for path in walk(tree)}


def _sync_tree(tree: Path) -> None:
    for folder, _, names in os.walk(tree):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        sync_dir(Path(folder))
