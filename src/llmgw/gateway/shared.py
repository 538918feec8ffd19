"""Requests in flight and waiting in all gateway processes of one address, in a file they map into memory.

Each process writes its own row only, and reads the others': no locks. A row belongs to a process as long as that lives;
what a dead one left behind is not counted.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
from pathlib import Path

from llmgw.domain.routing import RouteModel
from llmgw.gateway.limits import START_TRIES, Limits, is_free, leave_gate, leave_row, pass_gate, take_row

_LOG = logging.getLogger("llmgw.gateway")

_ROWS = 64
_COLUMNS = 4096
_NAMES_BYTES = _COLUMNS * 8
_PART_BYTES = _ROWS * _COLUMNS * 8
_WAITS_AT = _NAMES_BYTES + _PART_BYTES
_BYTES = _WAITS_AT + _PART_BYTES


class Shared:
    """The counts. Each replica and each model has a column, found by a hash of its name that stands in a directory.

    Processes come and go, and an earlier server may have had more of them or fewer: each takes the first row that is
    free, and reads as many as are in use.

    Args:
        path: the file; made when it is not there. Limits per minute are in another one beside it.
        workers: how many processes there are to be.

    Attributes:
        limits: what keys may still ask for over all processes; None: their file cannot be used.

    Raises:
        OSError: the file cannot be used.
    """

    def __init__(self, path: Path, workers: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # without room on the disk this fails, where a write into the map would end the process
            os.posix_fallocate(self._file, 0, _BYTES)
            pass_gate(self._file, START_TRIES)
            # a lock for the life of the process says that the row is alive
            self._index = next((row for row in range(_ROWS) if take_row(self._file, row)), -1)
            if self._index < 0:
                raise OSError("all rows are taken by other gateway processes")
            self._map = mmap.mmap(self._file, _BYTES)
        except OSError:
            os.close(self._file)
            raise
        view = memoryview(self._map)
        self._names = view[:_NAMES_BYTES].cast("q")
        self._cells = view[_NAMES_BYTES:_WAITS_AT].cast("q")
        self._waits = view[_WAITS_AT:].cast("d")
        self._zero(self._index)
        if all(is_free(self._file, row) for row in range(_ROWS) if row != self._index):
            # the first of all: names of replicas that are no more need no column
            view[:_NAMES_BYTES] = bytes(_NAMES_BYTES)
        leave_gate(self._file)
        self._columns: dict[str, int] = {}
        self._models: dict[str, int] = {}
        self._workers = min(workers, _ROWS)
        self._mine: dict[str, int] = {}
        self._places: dict[str, list[tuple[str, int]]] = {}
        self.limits: Limits | None = None
        self._width = 0
        self.look_at_rows()
        try:
            self.limits = Limits(path.with_suffix(".limits"), self._index, self._width)
        except OSError as error:
            _LOG.warning("limits per minute are divided evenly: `%s` cannot be used: %s", path, error)

    def add(self, replica_id: str, count: int) -> None:
        """This process has begun or ended a request."""
        cell = self._mine.get(replica_id)
        if cell is None:
            cell = self._mine[replica_id] = self._column(replica_id) * _ROWS + self._index
        self._cells[cell] += count

    def counts(self, model: RouteModel) -> dict[str, int]:
        """In flight over all processes, for the replicas of one model."""
        places = self._places.get(model.name)
        if places is None:
            places = self._places[model.name] = [
                (replica.replica_id, _NAMES_BYTES + self._column(replica.replica_id) * _ROWS * 8)
                for replica in model.replicas
            ]
        read, file = self._read, self._map
        return {replica_id: sum(read(file, start)) for replica_id, start in places}

    def wait(self, model_name: str, deadline: float) -> None:
        """Until when the request that has waited longest for a model waits in this process; 0.0: none does."""
        self._waits[self._column("/" + model_name) * _ROWS + self._index] = deadline

    def longest_wait(self, model_name: str) -> float:
        """The same of all other processes."""
        start = self._models.get(model_name)
        if start is None:
            start = self._models[model_name] = _WAITS_AT + self._column("/" + model_name) * _ROWS * 8
        rows = self._read_waits(self._map, start)
        if rows == self._nobody:
            return 0.0
        return min((deadline for row, deadline in enumerate(rows) if deadline and row != self._index), default=0.0)

    def clear(self) -> None:
        """A new snapshot: models may have other replicas."""
        self._places.clear()

    def look_at_rows(self) -> None:
        """Read the rows that are in use, and clear those of processes that ended; called by the sweep."""
        dead = [row for row in range(_ROWS) if row != self._index and is_free(self._file, row)]
        width = max(self._workers, 1 + max(row for row in range(_ROWS) if row not in dead))
        for row in dead:
            # locked, so that no new process has it before it is cleared
            dirty = row < width and (any(self._cells[row::_ROWS]) or any(self._waits[row::_ROWS]))
            if dirty and take_row(self._file, row):
                self._zero(row)
                leave_row(self._file, row)
        if width != self._width:
            self._width = width
            self._read = struct.Struct(f"{width}q").unpack_from
            self._read_waits = struct.Struct(f"{width}d").unpack_from
            self._nobody = (0.0,) * width
            if self.limits is not None:
                self.limits.widen(width)

    def close(self) -> None:
        """Let the file go."""
        if self.limits is not None:
            self.limits.close()
        self._names.release()
        self._cells.release()
        self._waits.release()
        self._map.close()
        os.close(self._file)

    def _zero(self, row: int) -> None:
        for at in range(row, _COLUMNS * _ROWS, _ROWS):
            self._cells[at] = 0
            self._waits[at] = 0.0

    def _column(self, name: str) -> int:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = self._give_column(name)
        return column

    def _give_column(self, name: str) -> int:
        mark = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True) or 1
        names = self._names
        try:
            pass_gate(self._file)
        except OSError as error:
            _LOG.warning("`%s` may share its count with another name: %s", name, error)
            return mark % _COLUMNS
        order = ((mark + step) % _COLUMNS for step in range(_COLUMNS))
        column = next((each for each in order if names[each] in (mark, 0)), None)
        if column is None:
            # thousands of names since the first process started
            column = mark % _COLUMNS
        else:
            names[column] = mark
        leave_gate(self._file)
        return column
