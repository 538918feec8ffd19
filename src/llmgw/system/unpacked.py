"""The directories the one-file executable unpacks into: kept while somebody runs from them, removed afterwards.

A running process goes on importing from its directory, so it holds a shared lock on a file in it; what cleans up takes
the lock exclusively and leaves a directory alone where it cannot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import llmgw
from llmgw.errors import CommandError
from llmgw.system.commands import Runner
from llmgw.system.layout import CURRENT, LIB, PREVIOUS, UNPACKED
from llmgw.system.selfexec import own_argv

_LOCK = ".in-use"
_held: list[int] = []


def own_tree() -> Path | None:
    """The directory this process was unpacked into; None when it was not."""
    site = Path(llmgw.__file__).resolve().parent.parent
    return site.parent if site.name == "site-packages" and site.parent.parent == _root() else None


def _root() -> Path | None:
    root = os.environ.get("SHIV_ROOT")
    return Path(root).resolve() if root else None


def hold() -> None:
    """Keep this process's directory from being cleaned up until it ends. Does nothing where there is none."""
    tree = own_tree()
    if tree is None:
        return
    with contextlib.suppress(OSError):
        try:
            fd = os.open(tree / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except PermissionError:  # unpacked by root for everybody: the file is there already
            fd = os.open(tree / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _held.append(fd)


def prepare(runner: Runner, root: Path = UNPACKED) -> None:
    """Unpack this executable where services run it from, and make its lock file: a service's user may not write there.

    Raises:
        CommandError: it cannot be unpacked there.
    """
    tree = own_tree()
    if tree is None:
        return
    if tree.parent != root.resolve():
        with contextlib.suppress(OSError):  # said by the program that finds no directory there
            root.mkdir(parents=True, exist_ok=True)
        done = runner.run([*own_argv(), "--version"], timeout_s=120, env={**os.environ, "SHIV_ROOT": str(root)})
        if done.code != 0:
            raise CommandError(f"cannot unpack llmgw into `{root}`", cause=done.last_line() or done.words())
        tree = root / tree.name
    with contextlib.suppress(OSError):
        (tree / _LOCK).touch(0o644)


def clean(root: Path = UNPACKED, lib: Path = LIB) -> list[str]:
    """Remove what older releases left: their directories when nobody runs from them, their files, broken transfers.

    The current release and the one before it are kept.

    Returns:
        One sentence for each thing removed.
    """
    keep = {link.resolve().name for link in (lib / CURRENT.name, lib / PREVIOUS.name) if link.exists()}
    said: list[str] = []
    own = own_tree()
    for tree in sorted(root.glob("llmgw-*")) if root.is_dir() else []:
        name = tree.name.rpartition("_")[0] or tree.name
        if name in keep or tree == own or not tree.is_dir():
            continue
        if _remove(tree):
            (root / f".{tree.name}_lock").unlink(missing_ok=True)
            said.append(f"removed `{tree}`: nobody runs from it")
    for file in sorted(lib.glob("llmgw-*.pyz")) if keep else []:
        if file.name not in keep:
            file.unlink()
            said.append(f"removed `{file}`")
    for part in lib.glob(".llmgw-*.part"):
        part.unlink()
        said.append(f"removed `{part}`: a transfer that broke off")
    return said


def _remove(tree: Path) -> bool:
    try:
        fd = os.open(tree / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside = tree.with_name(f".{tree.name}.gone")
        tree.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
