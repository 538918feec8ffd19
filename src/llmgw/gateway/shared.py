"""Requests in flight of all gateway processes of one address, in a file they map into memory.

Each process writes its own row only, and reads the others': no locks. A row belongs to a process as long as that lives;
what a dead one left behind is not counted.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from functools import lru_cache
from pathlib import Path
from zlib import crc32

from llmgw.domain.routing import RouteModel
from llmgw.gateway.limits import Limits, is_free

_LOG = logging.getLogger("llmgw.gateway")

_ROWS = 64
_COLUMNS = 4096
_BYTES = _ROWS * _COLUMNS * 8


class Shared:
    """The counts. A replica's column is a hash of its id: a rare collision makes two replicas look busier, never idler.

    Args:
        path: the file; made when it is not there. Limits per minute are in another one beside it.
        workers: how many processes there are; a restart may have as many again for a while.

    Attributes:
        limits: what keys may still ask for over all processes; None: their file cannot be used.

    Raises:
        OSError: the file cannot be used.
    """

    def __init__(self, path: Path, workers: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, _BYTES)
        rows = range(min(_ROWS, 2 * workers))
        # a lock for the life of the process says that the row is alive
        free = (row for row in rows if is_free(self._file, row))
        self._index = next(free, -1)
        if self._index < 0:
            os.close(self._file)
            raise OSError("all rows are taken by other gateway processes")
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._index)
        self._map = mmap.mmap(self._file, _BYTES)
        self._cells = memoryview(self._map).cast("q")
        self._zero(self._index)
        self._others = [row for row in rows if row != self._index]
        self._read = struct.Struct(f"{len(rows)}q").unpack_from
        self._mine: dict[str, int] = {}
        self._places: dict[str, list[tuple[str, int]]] = {}
        self.limits: Limits | None = None
        try:
            self.limits = Limits(path.with_suffix(".limits"), self._index, len(rows))
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

    def clear(self) -> None:
        """A new snapshot: models may have other replicas."""
        self._places.clear()

    def forget_the_dead(self) -> None:
        """Clear the rows of processes that ended without giving their slots back; called by the sweep."""
        for row in self._others:
            if any(self._cells[row::_ROWS]) and is_free(self._file, row):
                self._zero(row)

    def close(self) -> None:
        """Let the file go."""
        if self.limits is not None:
            self.limits.close()
        self._cells.release()
        self._map.close()
        os.close(self._file)

    def _zero(self, row: int) -> None:
        for at in range(row, _COLUMNS * _ROWS, _ROWS):
            self._cells[at] = 0


@lru_cache(4096)
def _column(replica_id: str) -> int:
    return crc32(replica_id.encode()) % _COLUMNS
