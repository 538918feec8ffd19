"""Engine logs: the tail for reports, following by offset, and the line that tells why an engine ended."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, frozen

from llmgw.agent import rotation

CURRENT = "engine.log"
PREVIOUS = "engine.log.1"
_TAIL_BYTES = 512 << 10
_FOLLOW_BYTES = 128 << 10
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


@frozen
class Piece:
    """Part of a log that is being followed.

    Args:
        lines: whole ones, oldest first, safe to print.
        cursor: what to ask with next; opaque to others.
        more: there is more right now.
        new_run: the lines are of another run of the engine than those before.
        missed_bytes: what was rotated away before it was asked for.
    """

    lines: tuple[str, ...]
    cursor: str
    more: bool = False
    new_run: bool = False
    missed_bytes: int = 0


def tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines of a run, the part of it that was rotated included, made safe to print.

    Args:
        path: the run's log; its rotated part lies beside it.

    Returns:
        Oldest first; empty when there is no such file.
    """
    with rotation.steady:
        return _tail(path, lines)[0]


def tail_with_cursor(path: Path, lines: int) -> Piece:
    """Like `tail`, without a last line that is still being written, and with the place to follow from."""
    with rotation.steady:
        found, inode, end, open_line = _tail(path, lines)
        whole = found[:-1] if open_line else found
        return Piece(tuple(whole), f"{inode}.{rotation.cut_bytes(path) + end - open_line}")


def _tail(path: Path, lines: int) -> tuple[list[str], int, int, int]:
    """Lines, the file's inode, where it ended, and how many bytes of a last line without an end it has."""
    try:
        with path.open("rb") as handle:
            inode = os.fstat(handle.fileno()).st_ino
            size = handle.seek(0, os.SEEK_END)
            start = max(0, size - _TAIL_BYTES)
            handle.seek(start)
            data = handle.read(size - start)
    except OSError:
        return [], 0, 0, 0
    end = start + len(data)
    if start == 0 and data.count(b"\n") < lines:
        data = rotation.rotated_end(path, _TAIL_BYTES) + data
        start = -1 if len(data) > end else 0
    found = data.decode("utf-8", "replace").split("\n")
    if start:  # the first one may have been cut in the middle
        found = found[1:]
    open_line = len(data) - (data.rfind(b"\n") + 1)
    if found and not found[-1]:
        found.pop()
    return [clean(line) for line in found[-lines:]] if lines > 0 else [], inode, end, open_line


def follow(where: Path, cursor: str) -> Piece:
    """What was written since `cursor`, the end of the run it is of first.

    Args:
        where: the replica's directory.
        cursor: of an earlier answer; one that is not understood begins with the run that is on now.
    """
    with rotation.steady:
        return _follow(where, cursor)


def _follow(where: Path, cursor: str) -> Piece:
    inode, offset = _parse(cursor)
    piece, current = _since(where / CURRENT, inode, offset, ended=False)
    if piece is not None:
        return piece
    piece, _ = _since(where / PREVIOUS, inode, offset, ended=True)
    if piece is not None and (piece.lines or piece.more):
        return evolve(piece, more=True)
    if not current:  # the new run has not begun to write
        return Piece((), cursor)
    piece, _ = _since(where / CURRENT, current, 0, ended=False)
    return evolve(piece, new_run=True) if piece is not None else Piece((), cursor)


def _parse(cursor: str) -> tuple[int, int]:
    inode, _, offset = cursor.partition(".")
    good = inode.isascii() and inode.isdigit() and offset.isascii() and offset.isdigit() and len(cursor) < 64
    return (int(inode), int(offset)) if good else (0, 0)


def _since(path: Path, inode: int, offset: int, *, ended: bool) -> tuple[Piece | None, int]:
    """What one run's log holds from `offset` (counted from the run's first byte) on, and the inode of that log."""
    cut = rotation.cut_bytes(path)
    try:
        with path.open("rb") as handle:
            own = os.fstat(handle.fileno()).st_ino
            if own != inode:
                return None, own
            size = os.fstat(handle.fileno()).st_size
            if offset > cut + size:  # a log that was truncated by somebody else
                offset = cut
            missed, early = 0, b""
            if offset < cut:
                early = rotation.rotated_end(path, cut - offset)
                missed = cut - offset - len(early)
            handle.seek(max(0, offset - cut))
            data = early + handle.read(max(0, min(size, _FOLLOW_BYTES - len(early))))
    except OSError:
        return None, 0
    begin = offset + missed
    whole = data.rfind(b"\n") + 1
    if (ended and cut + size <= begin + len(data)) or (not whole and len(data) >= _FOLLOW_BYTES):
        whole = len(data)
    data = data[:whole]
    lines = data.decode("utf-8", "replace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    more = whole > 0 and cut + size > begin + whole and len(data) > _FOLLOW_BYTES // 2
    return Piece(tuple(map(clean, lines)), f"{own}.{begin + whole}", more, missed_bytes=missed), own


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
