"""Reading /proc: who a process is, what it was told, what it listens on. Nothing here signals anything."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

MARKER = "LLMGW_REPLICA"
HANDLE = "LLMGW_HANDLE"
_PROC = Path("/proc")
_LISTEN = "0A"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@frozen
class Stat:
    """Part of /proc/PID/stat (proc(5)). `start_ticks` is field 22: clock ticks after boot; never two of one pid."""

    pid: int
    state: str
    group: int
    session: int
    start_ticks: int

    @property
    def ended(self) -> bool:
        """A zombie has ended; it only waits to be reaped."""
        return self.state in ("Z", "X", "x")


def boot_id() -> str:
    """The kernel's random id of this boot; "" when it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    # the name stands in parentheses and may hold spaces and parentheses itself
    fields = text[text.rfind(")") + 2 :].split()
    try:
        return Stat(pid, fields[0], int(fields[2]), int(fields[3]), int(fields[19]))
    except (IndexError, ValueError):
        return None


def read_parent(pid: int) -> int | None:
    """The parent's pid; None when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes().decode("utf-8", "replace")
        return int(text[text.rfind(")") + 2 :].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def read_cpu_ticks(pid: int) -> int | None:
    """Clock ticks its threads have spent on a CPU; None when it is gone (proc(5), stat fields 14 and 15)."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes().decode("utf-8", "replace")
        fields = text[text.rfind(")") + 2 :].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return None


def ticks_now() -> int:
    """The present on the clock of `Stat.start_ticks`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S)


def read_environ(pid: int) -> dict[str, str] | None:
    """The environment a process was started with; None when it is gone or not ours to read."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (item.decode("utf-8", "replace").partition("=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def read_exe(pid: int) -> str | None:
    """The program file; None when it cannot be read. A file replaced since is still the file it was started from."""
    try:
        return str((_PROC / str(pid) / "exe").readlink()).removesuffix(" (deleted)")
    except OSError:
        return None


def read_rss(pid: int) -> int | None:
    """Resident bytes, None when the process is gone."""
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def all_pids() -> Iterator[int]:
    """Every process there is."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def find_marked(marker: str) -> list[Stat]:
    """Living processes whose environment carries exactly this marker."""
    found = []
    for pid in all_pids():
        environ = read_environ(pid)
        if environ is not None and environ.get(MARKER) == marker:
            stat = read_stat(pid)
            if stat is not None and not stat.ended:
                found.append(stat)
    return found


def in_session(session: int) -> list[Stat]:
    """Living processes of one session."""
    found = []
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is not None and stat.session == session and not stat.ended:
            found.append(stat)
    return found


def listening_inodes(host: str, port: int) -> set[int] | None:
    """Inodes of the TCP sockets that take connections to `host:port` (bound to it, or to every address).

    Returns:
        Empty when nobody listens there; None when the kernel's tables cannot be read.
    """
    wanted = _spellings(host, port)
    found: set[int] = set()
    readable = False
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        readable = True
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN and fields[1] in wanted:
                found.add(int(fields[9]))
    return found if readable else None


def socket_inodes(pid: int) -> set[int]:
    """Inodes of the sockets a process holds open; empty when it is gone or not ours to look into."""
    found: set[int] = set()
    try:
        links = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return found
    for link in links:
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1].isdigit():
            found.add(int(target[8:-1]))
    return found


def _spellings(host: str, port: int) -> set[str]:
    """How /proc/net/tcp and tcp6 write `host:port` and the wildcard addresses: native words in hex."""
    tail = f":{port:04X}"
    zero4, zero6 = "0" * 8, "0" * 32
    found = {zero4 + tail, zero6 + tail}
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            packed = socket.inet_pton(family, host)
        except OSError:
            continue
        found.add("".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed)) + tail)
        if family == socket.AF_INET:
            mapped = b"\0" * 10 + b"\xff\xff" + packed
            found.add("".join(f"{word:08X}" for word in struct.unpack("=4I", mapped)) + tail)
    return found
