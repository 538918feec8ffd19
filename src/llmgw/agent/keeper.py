"""The tiny parent of an engine: a shell that waits for it and writes down how it ended, also while no agent runs.

It holds about 0.3 MB, has a session of its own, and starts the engine in another one: a signal to the engine's group
reaches the engine once and the keeper never, and the engine lives on when only its keeper is killed. The keeper carries
no marker, so it is never swept; it leaves by itself when the engine has ended.
"""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from llmgw.agent import procs
from llmgw.system.files import read_text

EXIT_FILE = "engine.exit"
_NAME = "llmgw-keeper"
_SIGNALS = range(129, 193)

# stderr of the shell itself goes nowhere: it would write `Killed` into the engine's log. The engine runs in the
# foreground: background jobs of a shell ignore SIGINT, and a foreground one is waited for whatever the shell is sent.
_SCRIPT = """\
exec 3>&2 2>/dev/null
file=$1 marker=$2 handle=$3
shift 3
unset PWD OLDPWD SHLVL
trap : HUP INT TERM
(
    exec 2>&3 3>&-
    LLMGW_REPLICA=$marker LLMGW_HANDLE=$handle
    export LLMGW_REPLICA LLMGW_HANDLE
    exec setsid "$@"
)
code=$?
exec 3>&-
printf '%s %s\\n' "$marker" "$code" >"$file.tmp" && mv -f "$file.tmp" "$file"
exit "$code"
"""


@frozen
class KeeperId:
    """The keeper's process, and the file it writes when the engine has ended."""

    pid: int
    start_ticks: int
    exit_file: Path


def available() -> bool:
    """Whether this machine has what a keeper is made of."""
    return Path("/bin/sh").exists() and shutil.which("setsid") is not None


def argv(engine: Sequence[str], exit_file: Path, marker: str, handle: str) -> list[str]:
    """The command line that keeps `engine`: nothing in it is secret, the key stays in its file."""
    return ["/bin/sh", "-c", _SCRIPT, _NAME, str(exit_file), marker, handle, *engine]


def read_exit(exit_file: Path, marker: str) -> int | None:
    """The exit code (a signal when negative) the keeper wrote for this very engine; None when it wrote none.

    A shell tells an exit code of 128 + n and a death by signal n alike (POSIX, 2.8.2): it is read as the signal.
    """
    text = read_text(exit_file, 4096)
    if text is None or not text.endswith("\n"):
        return None
    wrote, _, code = text.rstrip("\n").rpartition(" ")
    return decode(int(code)) if wrote == marker and code.isdigit() else None


def decode(status: int) -> int:
    """A shell's `$?` as an exit code, or as a signal when negative."""
    return 128 - status if status in _SIGNALS else status


def engine_of(pid: int) -> int | None:
    """The process a keeper has started; None while there is none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        children = [str(each) for each in procs.all_pids() if procs.read_parent(each) == pid]
    return int(children[0]) if children else None


def keeper_of(pid: int, marker: str, exit_file: Path) -> KeeperId | None:
    """The keeper of a running engine, found as its parent; None when that is another process."""
    parent = procs.read_parent(pid)
    stat = procs.read_stat(parent) if parent else None
    if stat is None:
        return None
    try:
        words = Path(f"/proc/{stat.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if _NAME.encode() not in words or marker.encode() not in words:
        return None
    return KeeperId(stat.pid, stat.start_ticks, exit_file)


def is_alive(keeper: KeeperId) -> bool:
    """Whether that process is still the keeper, and running."""
    stat = procs.read_stat(keeper.pid)
    return stat is not None and not stat.ended and stat.start_ticks == keeper.start_ticks


def await_exit(keeper: KeeperId, marker: str, timeout_s: float) -> int | None:
    """Like `read_exit`; a keeper whose engine has just ended is given a moment to write."""
    pidfd = open_pidfd(keeper)
    if pidfd >= 0:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        os.close(pidfd)
    return read_exit(keeper.exit_file, marker)


def open_pidfd(keeper: KeeperId) -> int:
    """A pidfd of the keeper, -1 when it is gone."""
    try:
        pidfd = os.pidfd_open(keeper.pid)
    except OSError:
        return -1
    if is_alive(keeper):
        return pidfd
    os.close(pidfd)
    return -1
