"""Requests in flight and waiting in all gateway processes of one address, in a file they map into memory.

Each process writes its own row only, and reads the others': no locks. A row belongs to a process as long as that lives;
what a dead one left behind is not counted.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from functools import lru_cache
from pathlib import Path
from zlib import crc32

from llmgw.domain.routing import RouteModel
from llmgw.gateway.limits import Limits, is_free, leave_row, take_row

_LOG = logging.getLogger("llmgw.gateway")

_ROWS = 64
_COLUMNS = 4096
_COUNTS_BYTES = _ROWS * _COLUMNS * 8
_WAITS = 512
_BYTES = _COUNTS_BYTES + _ROWS * _WAITS * 8


class Shared:
    """The counts. A replica's column is a hash of its id: a rare collision makes two replicas look busier, never idler.

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
            # a lock for the life of the process says that the row is alive
            self._index = next((row for row in range(_ROWS) if take_row(self._file, row)), -1)
            if self._index < 0:
                raise OSError("all rows are taken by other gateway processes")
            self._map = mmap.mmap(self._file, _BYTES)
        except OSError:
            os.close(self._file)
            raise
        view = memoryview(self._map)
        self._cells = view[:_COUNTS_BYTES].cast("q")
        self._waits = view[_COUNTS_BYTES:].cast("d")
        self._zero(self._index)
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
            cell = self._mine[replica_id] = _column(replica_id) * _ROWS + self._index
        self._cells[cell] += count

    def counts(self, model: RouteModel) -> dict[str, int]:
        """In flight over all processes, for the replicas of one model."""
        places = self._places.get(model.name)
        if places is None:
            places = self._places[model.name] = [
                (replica.replica_id, _column(replica.replica_id) * _ROWS * 8) for replica in model.replicas
            ]
        read, file = self._read, self._map
        return {replica_id: sum(read(file, start)) for replica_id, start in places}

    def wait(self, model_name: str, deadline: float) -> None:
        """Until when the request that has waited longest for a model waits in this process; 0.0: none does."""
        self._waits[_wait_column(model_name) * _ROWS + self._index] = deadline

    def longest_wait(self, model_name: str) -> float:
        """The same of all other processes; a model whose column is the same may be taken for it."""
        rows = self._read_waits(self._map, _COUNTS_BYTES + _wait_column(model_name) * _ROWS * 8)
        if not any(rows):
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
            if self.limits is not None:
                self.limits.widen(width)

    def close(self) -> None:
        """Let the file go."""
        if self.limits is not None:
            self.limits.close()
        self._cells.release()
        self._waits.release()
        self._map.close()
        os.close(self._file)

    def _zero(self, row: int) -> None:
        for at in range(row, _COLUMNS * _ROWS, _ROWS):
            self._cells[at] = 0
        for at in range(row, _WAITS * _ROWS, _ROWS):
            self._waits[at] = 0.0


@lru_cache(4096)
def _column(replica_id: str) -> int:
    return crc32(replica_id.encode()) % _COLUMNS


@lru_cache(4096)
def _wait_column(model_name: str) -> int:
    return crc32(model_name.encode()) % _WAITS
