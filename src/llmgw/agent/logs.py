"""Engine logs: the tail for reports, the line that tells why an engine ended, rotation without its help."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from llmgw.errors import FileError

CURRENT = "engine.log"
PREVIOUS = "engine.log.1"
_TAIL_BYTES = 512 << 10
_LINE_LIMIT = 2000
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# llama.cpp: `0.00.010.930 E gguf_init_from_file: …`; only such logs name a level on each line
_LEVELLED = re.compile(r"^[\d.]+ ([DIWEF]) +(.*)$")
_STAMP = re.compile(r"^(?:\[?\d{4}-\d\d-\d\d[ T][\d:.,]+Z?\]?|\[[\d:. /-]+\])\s*")
_PYTHON_ERROR = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b.*")
_TROUBLE = re.compile(
    r"error|fail|cannot|can't|could ?n[o']t|unable|invalid|illegal|corrupt|no such|not found|missing|insufficient"
    r"|out of memory|bad_alloc|terminate|abort|crash|refused|denied|unsupported|address already in use",
    re.IGNORECASE,
)
# said after the cause, because of it
_CONSEQUENCE = re.compile(
    r"exiting due to|cleaning up|failed to load model\b|failed to create[ _]context|trying to fit params"
    r"|terminate called|core dumped|engine core initialization failed|see root cause above",
    re.IGNORECASE,
)


def tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines of a log, made safe to print: no escape sequences, no control characters.

    Returns:
        Oldest first; empty when there is no such file.
    """
    if lines <= 0:
        return []
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            start = max(0, size - _TAIL_BYTES)
            handle.seek(start)
            data = handle.read(_TAIL_BYTES)
    except OSError:
        return []
    found = data.decode("utf-8", "replace").split("\n")
    if start:  # the first one was cut in the middle
        found = found[1:]
    if found and not found[-1]:
        found.pop()
    return [clean(line) for line in found[-lines:]]


def clean(line: str) -> str:
    """One log line without anything that could steer a terminal; a progress bar's last state is kept."""
    line = line.rstrip("\r").rpartition("\r")[2]
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ANSI.sub("", line))[:_LINE_LIMIT]


def telling(lines: Sequence[str], was_ready: bool = False) -> str:
    """The line that says why the engine ended.

    An engine that could not start says the cause first and then its consequences, often all of it twice; one that
    fails in the middle of its work says the cause last.

    Args:
        lines: the log, oldest first.
        was_ready: the engine had started.

    Returns:
        The line without time stamp and level; "" when there is none (an engine that was at work and complained of
        nothing has not told why it ended).
    """
    said = [line.strip() for line in lines if line.strip()]
    python = [line for line in said if _PYTHON_ERROR.match(line)]
    if python:
        return python[-1]
    levelled = [match for match in map(_LEVELLED.match, said) if match]
    if levelled:
        troubles = [match[2] for match in levelled if match[1] in "EF"]
        # an abort or a failed assertion is printed without a level
        troubles += [line for line in said if not _LEVELLED.match(line) and _TROUBLE.search(line)]
    else:
        troubles = [_STAMP.sub("", line) for line in said if _TROUBLE.search(line)]
    causes = [line for line in troubles if not _CONSEQUENCE.search(line)] or troubles
    if causes:
        return causes[-1] if was_ready else causes[0]
    if was_ready:
        return ""
    return (levelled[-1][2] if levelled else said[-1]) if said else ""


def size(path: Path) -> int:
    """Bytes written so far, 0 when there is no log yet."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def start_new(where: Path) -> Path:
    """Make room for a new run's log; the last run's is kept as the previous one. Returns the new log's path.

    Raises:
        FileError: the old log could not be put aside.
    """
    current = where / CURRENT
    try:
        current.replace(where / PREVIOUS)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise FileError(f"cannot put the log `{current}` aside", cause=error.strerror or str(error)) from error
    return current


def rotate(where: Path, limit_bytes: int) -> bool:
    """Copy a log that has grown past `limit_bytes` to the previous one and truncate it.

    The engine appends (O_APPEND), so it goes on at the new end. Lines written between copy and truncation are lost.

    Returns:
        Whether it was rotated.
    """
    current = where / CURRENT
    if size(current) <= limit_bytes:
        return False
    temp = where / f".{PREVIOUS}.tmp"
    try:
        with current.open("rb") as source, temp.open("wb") as copy:
            os.fchmod(copy.fileno(), 0o600)
            left = limit_bytes
            source.seek(-min(limit_bytes, size(current)), os.SEEK_END)
            while left > 0 and (piece := source.read(min(left, 1 << 20))):
                copy.write(piece)
                left -= len(piece)
        temp.replace(where / PREVIOUS)
        os.truncate(current, 0)
    except OSError:  # a full disk must not stop the supervisor; the log stays as it is
        with contextlib.suppress(OSError):
            temp.unlink()
        return False
    return True
