"""Requests in flight of all gateway processes of one address, in a file they map into memory.

Each process writes its own row only, and reads the others': no locks. A row belongs to a process as long as that lives;
what a dead one left behind is not counted.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from pathlib import Path
from zlib import crc32

from llmgw.domain.routing import RouteModel
from llmgw.gateway.limits import Limits

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
        free = (row for row in rows if self._is_free(row))
        self._index = next(free, -1)
        if self._index < 0:
            os.close(self._file)
            raise OSError("all rows are taken by other gateway processes")
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._index)
        self._map = mmap.mmap(self._file, _BYTES)
        self._cells = memoryview(self._map).cast("q")
        start = self._index * _COLUMNS
        for at in range(start, start + _COLUMNS):
            self._cells[at] = 0
        self._others = [row for row in rows if row != self._index]
        self._columns: dict[str, int] = {}
        self.limits: Limits | None = None
        try:
            self.limits = Limits(path.with_suffix(".limits"), self._index, len(rows))
        except OSError as error:
            _LOG.warning("limits per minute are divided evenly: `%s` cannot be used: %s", path, error)

    def add(self, replica_id: str, count: int) -> None:
        """This process has begun or ended a request."""
        self._cells[self._index * _COLUMNS + self._column(replica_id)] += count

    def counts(self, model: RouteModel, own: dict[str, int]) -> dict[str, int]:
        """In flight over all processes, for the replicas of one model."""
        cells = self._cells
        found = {}
        for replica in model.replicas:
            column = self._column(replica.replica_id)
            found[replica.replica_id] = own.get(replica.replica_id, 0) + sum(
                [cells[row * _COLUMNS + column] for row in self._others]
            )
        return found

    def forget_the_dead(self) -> None:
        """Clear the rows of processes that ended without giving their slots back; called by the sweep."""
        for row in self._others:
            start = row * _COLUMNS
            if any(self._cells[start : start + _COLUMNS]) and self._is_free(row):
                for at in range(start, start + _COLUMNS):
                    self._cells[at] = 0

    def close(self) -> None:
        """Let the file go."""
        if self.limits is not None:
            self.limits.close()
        self._cells.release()
        self._map.close()
        os.close(self._file)

    def _is_free(self, row: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, row)
        return True

    def _column(self, replica_id: str) -> int:
        column = self._columns.get(replica_id)
        if column is None:
            column = self._columns[replica_id] = crc32(replica_id.encode()) % _COLUMNS
        return column
