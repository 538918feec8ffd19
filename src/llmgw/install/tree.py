"""An unpacked engine's directory: archives laid side by side, execute bits, copies of libraries turned into links."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmgw.errors import ArchiveRefused


def merge(source: Path, target: Path) -> None:
    """Move everything in `source` into `target` (created when missing); directories of both are joined.

    Raises:
        ArchiveRefused: both have a file of the same name.
    """
    target.mkdir(mode=0o755, exist_ok=True)
    for entry in sorted(source.iterdir()):
        goal = target / entry.name
        if entry.is_dir() and not entry.is_symlink() and goal.is_dir() and not goal.is_symlink():
            merge(entry, goal)
        elif goal.is_symlink() or goal.exists():
            raise ArchiveRefused(f"two archives of this build both hold {entry.name!a}")
        else:
            entry.rename(goal)
    source.rmdir()


def walk(root: Path) -> Iterator[Path]:
    """Every file and link below `root`, sorted; links are not followed."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted((*names, *links)):
            yield Path(folder, name)


def matching(root: Path, pattern: str) -> tuple[Path, ...]:
    """Regular files (or links to such) below `root` whose relative path matches the glob, sorted."""
    return tuple(
        path
        for path in walk(root)
        if fnmatch.fnmatchcase(path.relative_to(root).as_posix(), pattern) and path.is_file()
    )


def mark_executable(root: Path, patterns: Sequence[str]) -> None:
    """Give mode 0755 to the files the globs name, for archives that carry no modes."""
    for pattern in patterns:
        for path in matching(root, pattern):
            if not path.is_symlink():
                path.chmod(0o755)


def relink(root: Path) -> int:
    """Turn `libX.so`, `libX.so.0` that are copies of `libX.so.0.20.0` into links again, as a linker lays them out.

    Returns:
        How many copies were replaced.
    """
    replaced = 0
    for folder in sorted({path.parent for path in walk(root)}):
        libraries = [
            path for path in folder.iterdir() if ".so" in path.name and path.is_file() and not path.is_symlink()
        ]
        by_length = sorted(libraries, key=lambda path: len(path.name), reverse=True)
        digests: dict[Path, str] = {}
        for index, path in enumerate(by_length):
            longer = [other for other in by_length[:index] if other.name.startswith(f"{path.name}.")]
            same = [
                other
                for other in longer
                if other.stat().st_size == path.stat().st_size and _digest(other, digests) == _digest(path, digests)
            ]
            if same:
                temporary = path.with_name(f".tmp-{path.name}")
                # the nearest longer name: libX.so -> libX.so.0 -> libX.so.0.20.0
                temporary.symlink_to(same[-1].name)
                temporary.replace(path)
                replaced += 1
    return replaced


def _digest(path: Path, known: dict[Path, str]) -> str:
    if path not in known:
        with path.open("rb") as handle:
            known[path] = hashlib.file_digest(handle, "sha256").hexdigest()
    return known[path]
