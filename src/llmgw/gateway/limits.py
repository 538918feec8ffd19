"""Limits per minute, of one process and over all gateway processes of one address.

A limit is the time at which its bucket will be full again (the "theoretical arrival time" of the generic cell rate
algorithm, ITU-T I.371): every request moves it on by 60 s / limit, and one that would move it further than a minute
ahead of now is refused. That is the same as a bucket that fills evenly, in one number.

Over several processes each writes that number into a row of its own in a file they all map, and goes by the latest of
all rows: no locks, and a dead process's row stops to matter as time passes. After writing it looks at the others once
more; who finds that another has gone on meanwhile puts its own request behind it. So what is let through too much, at
most one request per other process at one instant, is taken off what follows.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from llmgw.domain.routing import RouteKey

_LOG = logging.getLogger("llmgw.gateway")
_MINUTE_S = 60.0
_SLACK_S = 1e-6
_NEVER_S = 365 * 86_400.0
_ROWS = 64
_COLUMNS = 2048
_NAMES_BYTES = _COLUMNS * 16
_BYTES = _NAMES_BYTES + _COLUMNS * 2 * _ROWS * 8
_PART_S = 0.005
_PUT_TRIES = 4
_GATE = _ROWS
_GATE_TRIES = 20
_GATE_PAUSE_S = 0.005
START_TRIES = 600


class Budget:
    """What one key has left of its limits, a minute's worth each; counted by this process alone.

    Tokens are known only afterwards: a request may overdraw, and the next one waits until the debt is paid.

    Args:
        share: the part of the limits that is this process's.

    Attributes:
        requests_at, tokens_at: when either is whole again, in seconds on the clock of `take`.
    """

    __slots__ = ("_request_s", "_token_s", "_window_s", "requests_at", "rpm", "tokens_at", "tpm")

    def __init__(self, rpm: int | None, tpm: int | None, share: float = 1.0) -> None:
        self.rpm, self.tpm = rpm, tpm
        self.requests_at = self.tokens_at = 0.0
        self._request_s = _each_s(rpm, share)
        self._token_s = _each_s(tpm, share)
        # a share below one request a minute still lets one through, when it is due
        self._window_s = max(_MINUTE_S, self._request_s if rpm else 0.0) + _SLACK_S

    def take(self, now: float) -> tuple[str, float] | None:
        """Take one request; else which limit is reached and the seconds until it is not."""
        step = self._request_s
        if step:
            at = self.requests_at
            at = (at if at > now else now) + step
            if at > now + self._window_s:
                return "rpm", at - now - self._window_s
            if self._token_s and self.tokens_at >= now + _MINUTE_S:
                return "tpm", self.tokens_at - now - _MINUTE_S + self._token_s
            self.requests_at = at
        elif self.tokens_at >= now + _MINUTE_S:
            return "tpm", self.tokens_at - now - _MINUTE_S + self._token_s
        return None

    def spend(self, now: float, tokens: int) -> None:
        """An answer has used so many tokens."""
        if self._token_s:
            at = self.tokens_at
            self.tokens_at = (at if at > now else now) + tokens * self._token_s


class SharedBudget(Budget):
    """The same, counted together with the other processes. Made by `Limits.budget`.

    A limit of many requests a second is taken in parts of 5 ms, and tokens are given account of in such parts, so that
    the others are looked at 200 times a second and not with each request.
    """

    __slots__ = (
        "_at", "_cells", "_directory", "_free", "_limits", "_many", "_map", "_name", "_owed", "_requests", "_row",
        "_tokens", "_until",
    )  # fmt: skip

    def __init__(self, limits: Limits, rpm: int | None, tpm: int | None, name: int, column: int) -> None:
        super().__init__(rpm, tpm)
        self._limits, self._directory, self._cells, self._map = limits, limits.names, limits.cells, limits.map
        self._name, self._at = name, column * 2
        self._row = limits.row
        # the times of all rows stand side by side: those of requests, then those of tokens
        self._requests = _NAMES_BYTES + column * 2 * _ROWS * 8
        self._tokens = self._requests + _ROWS * 8
        self._many = int(_PART_S / self._request_s) if self._request_s else 0
        self._free, self._until, self._owed = 0, 0.0, 0.0

    def take(self, now: float) -> tuple[str, float] | None:
        """See `Budget.take`."""
        if self._free and now < self._until:
            self._free -= 1
            return None
        if self._directory[self._at] != self._name:
            return super().take(now)  # given to another key since this one left the snapshot
        step = self._request_s
        if step:
            rows = self._limits.read(self._map, self._requests)
            at = max(rows)
            at = (at if at > now else now) + step
            if at > now + self._window_s:
                return "rpm", at - now - self._window_s
        if self._token_s:
            until = max(self._limits.read(self._map, self._tokens))
            if until >= now + _MINUTE_S:
                return "tpm", until - now - _MINUTE_S + self._token_s
        if step:
            if self._many > 1 and at + self._many * step < now + self._window_s:
                self._free, self._until = self._many - 1, now + _PART_S
                step *= self._many
                at += step - self._request_s
            self._put(self._requests, rows, at, step)
        return None

    def spend(self, now: float, tokens: int) -> None:
        """See `Budget.spend`."""
        if self._directory[self._at] != self._name:
            super().spend(now, tokens)
        elif self._token_s:
            more = self._owed = self._owed + tokens * self._token_s
            if more < _PART_S:
                return
            self._owed = 0.0
            rows = self._limits.read(self._map, self._tokens)
            self._put(self._tokens, rows, max(now, *rows) + more, more)

    def _put(self, start: int, rows: tuple[float, ...], at: float, more: float) -> None:
        """Write `at` into this process's row; `rows` is what all rows said before, `more` what `at` puts on top."""
        cells, row = self._cells, self._row
        cell = (start - _NAMES_BYTES) // 8 + row
        for _ in range(_PUT_TRIES):
            cells[cell] = at
            again = self._limits.read(self._map, start)
            if again[:row] == rows[:row] and again[row + 1 :] == rows[row + 1 :]:
                return
            # another went on meanwhile, most likely without having seen ours: ours comes on top of it, and as it may
            # be doing the same at this moment, that is looked at again
            rows, at = again, max(again) + more
        cells[cell] = at


class Limits:
    """The file: which key has which column, and in each column a time of each process.

    A column is found by the hash of the key and its limits, so it is never mistaken for another key's, and a changed
    limit begins anew in all processes. The first process of all begins with an empty file, since its times are of this
    boot's clock.

    Args:
        path: the file; made when it is not there.
        row: this process's; whoever gives it out makes sure that it is nobody else's.
        rows: how many are in use.

    Raises:
        OSError: the file cannot be used.
    """

    def __init__(self, path: Path, row: int, rows: int) -> None:
        self.row = row
        self._width = 0
        self.widen(rows)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            pass_gate(self._file, START_TRIES)
            if all(is_free(self._file, other) for other in range(_ROWS)):
                os.ftruncate(self._file, 0)
                # without room on the disk this fails, where a write into the map would end the process
                os.posix_fallocate(self._file, 0, _BYTES)
            elif os.fstat(self._file).st_size != _BYTES:
                raise OSError("other processes use it in another form")
            # held for the life of the process
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            self.map = mmap.mmap(self._file, _BYTES)
            leave_gate(self._file)
        except OSError:
            os.close(self._file)
            raise
        view = memoryview(self.map)
        self.names = view[:_NAMES_BYTES].cast("q")
        self.cells = view[_NAMES_BYTES:].cast("d")

    def widen(self, rows: int) -> None:
        """So many rows are in use; never fewer than before, since what a dead process let through still counts."""
        if rows > self._width:
            self._width = rows
            # a struct reads each number with one instruction, as the view `cells` writes it
            self.read = struct.Struct(f"{rows}d").unpack_from

    def budgets(self, keys: Iterable[RouteKey], now: float) -> dict[str, SharedBudget]:
        """The budgets of all keys of a snapshot that have limits, by name; a key for which no column is left has none.

        Args:
            now: on the clock of `Budget.take`.
        """
        names = {_name_of(key): key for key in keys}
        columns = {name: self._find(name) for name in names}
        missing = [name for name, column in columns.items() if column is None]
        if missing:
            try:
                pass_gate(self._file)
            except OSError as error:
                _LOG.warning("%d keys' limits are counted by each process alone: %s", len(missing), error)
                missing.clear()
        if missing:
            used = {column for column in columns.values() if column is not None}
            for name in missing:
                column = columns[name] = self._claim(name, used, now)
                if column is not None:
                    used.add(column)
            leave_gate(self._file)
            if left := sum(column is None for column in columns.values()):
                _LOG.warning("%d keys' limits are counted by each process alone: %d is the most", left, _COLUMNS)
        return {
            key.name: SharedBudget(self, key.rpm, key.tpm, name[0], column)
            for name, key in names.items()
            if (column := columns[name]) is not None
        }

    def close(self) -> None:
        """Let the file go."""
        self.names.release()
        self.cells.release()
        self.map.close()
        os.close(self._file)

    def _find(self, name: tuple[int, int]) -> int | None:
        names, column = self.names, name[0] % _COLUMNS
        for _ in range(_COLUMNS):
            if names[column * 2] == name[0] and names[column * 2 + 1] == name[1]:
                return column
            if not names[column * 2]:
                return None
            column = (column + 1) % _COLUMNS
        return None

    def _claim(self, name: tuple[int, int], used: set[int], now: float) -> int | None:
        """Another process's doing, a free column, or one whose key has nothing to remember and is not in use here."""
        column = self._find(name)
        if column is None:
            start = name[0] % _COLUMNS
            order = [(start + step) % _COLUMNS for step in range(_COLUMNS)]
            column = next((each for each in order if not self.names[each * 2]), None)
            if column is None:
                column = next((each for each in order if each not in used and self._is_idle(each, now)), None)
            if column is not None:
                self.names[column * 2 + 1] = name[1]
                self.names[column * 2] = name[0]
        return column

    def _is_idle(self, column: int, now: float) -> bool:
        start = column * 2 * _ROWS
        return max(self.cells[start : start + 2 * _ROWS].tolist()) <= now


def pass_gate(file: int, tries: int = _GATE_TRIES) -> None:
    """One process at a time gives out columns; held for a moment, never on the way of a request.

    Raises:
        OSError: another one holds it for long.
    """
    for _ in range(tries):
        if take_row(file, _GATE):
            return
        time.sleep(_GATE_PAUSE_S)
    raise OSError(f"other processes have held the file for {tries * _GATE_PAUSE_S:g} s")


def leave_gate(file: int) -> None:
    """Let others pass."""
    leave_row(file, _GATE)


def is_free(file: int, row: int) -> bool:
    """Whether no living process has this row of the file: who has one holds a lock on that byte."""
    if not take_row(file, row):
        return False
    leave_row(file, row)
    return True


def take_row(file: int, row: int) -> bool:
    """Lock a row for this process, which must not have it already; False when another one has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
    except OSError:
        return False
    return True


def leave_row(file: int, row: int) -> None:
    """Give it back."""
    fcntl.lockf(file, fcntl.LOCK_UN, 1, row)


def _name_of(key: RouteKey) -> tuple[int, int]:
    """What stands in the directory for a key with these limits; the first number is never 0."""
    digest = hashlib.sha256(f"{key.sha256.lower()}/{key.rpm}/{key.tpm}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) or 1, int.from_bytes(digest[8:16], "little", signed=True)


def _each_s(limit: int | None, share: float) -> float:
    """What one request or token moves a limit's time on by; 0 without a limit."""
    if limit is None:
        return 0.0
    return _MINUTE_S / (limit * share) if limit > 0 else _NEVER_S
