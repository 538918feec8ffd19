"""What clients used, kept per key, model and day; and what the gateways are doing right now, while somebody looks."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmgw.errors import LlmgwError, UsageError
from llmgw.server.state import State

log = logging.getLogger(__name__)

COUNTS = ("requests", "prompt", "completion", "partial_requests", "partial_completion", "unknown_requests")
_COLUMNS = ", ".join(COUNTS)
_BY = ("key", "model", "day")
_EPOCH = date(1970, 1, 1)
_KEPT_S = 7 * 86_400.0
_WATCHED_S = 10.0
_ENDED = 2000
_RUN = re.compile(r"[0-9a-f]{16}")


class Usage:
    """The table of usage. Any thread may call.

    A gateway sends a batch until it is acknowledged; `run` and the batch's number make sure that it counts once.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def keep(self, run: str, batch: int, rows: Sequence[Any]) -> bool:
        """Add a gateway's batch; True when it is on disk, now or since an earlier attempt."""
        if not _RUN.fullmatch(run) or batch < 1:
            return False
        read = [row for row in map(_row, rows) if row is not None]
        now = time.time()
        try:
            with self._state.writing("keep usage") as db:
                last = db.execute("SELECT batch FROM usage_batches WHERE run = ?", (run,)).fetchone()
                if last is not None and last[0] >= batch:
                    return True
                sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)
                db.executemany(
                    f"INSERT INTO usage (key, model, day, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "  # noqa: S608
                    f"ON CONFLICT (key, model, day) DO UPDATE SET {sums}",
                    read,
                )
                db.execute("INSERT OR REPLACE INTO usage_batches VALUES (?, ?, ?)", (run, batch, now))
                db.execute("DELETE FROM usage_batches WHERE at < ?", (now - _KEPT_S,))
        except LlmgwError as error:
            log.error("usage cannot be kept, the gateway will send it again: %s", error.words())
            return False
        return True

    def sums(self, by: Sequence[str], since: str, until: str) -> list[dict[str, Any]]:
        """Usage summed up by `key`, `model` and `day`, from one day to another (`YYYY-MM-DD`, both included)."""
        columns = ", ".join(by)
        added = ", ".join(f"sum({name})" for name in COUNTS)
        rows = self._state.reading(
            f"SELECT {columns}, {added} FROM usage WHERE day >= ? AND day <= ? "  # noqa: S608
            f"GROUP BY {columns} ORDER BY {columns}",
            (since, until),
        )
        names = (*by, *COUNTS)
        return [dict(zip(names, row, strict=True)) for row in rows]


class Looker(Protocol):
    """Tells the gateways whether somebody looks (`server.control.Control`)."""

    def watch(self, on: bool) -> None: ...


class Requests:
    """The requests of all gateways while somebody looks: those under way, and the last ones that ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, list[Any]] = {}
        self._ended: deque[tuple[int, Any]] = deque(maxlen=_ENDED)
        self._seq = 0
        self._until = 0.0

    def hear(self, pid: int, said: dict[str, Any]) -> bool:
        """A gateway's message; False when nobody looks any more."""
        running, ended = said.get("open"), said.get("ended")
        with self._lock:
            if time.monotonic() > self._until:
                self._open.clear()
                return False
            self._open[pid] = running if isinstance(running, list) else []
            for line in ended if isinstance(ended, list) else ():
                self._seq += 1
                self._ended.append((self._seq, line))
        return True

    def forget(self, pid: int) -> None:
        """The gateway is gone."""
        with self._lock:
            self._open.pop(pid, None)

    def look(self, after: int) -> dict[str, Any]:
        """What there is to see; `after` is the `seq` of the last look."""
        with self._lock:
            self._until = time.monotonic() + _WATCHED_S
            return {
                "seq": self._seq,
                "open": [item for items in self._open.values() for item in items],
                "ended": [item for seq, item in self._ended if seq > after],
            }


class UsageDoor:
    """`GET /api/v1/usage` and `GET /api/v1/requests`."""

    def __init__(self, usage: Usage, requests: Requests, looker: Looker) -> None:
        self._usage = usage
        self._requests = requests
        self._looker = looker

    def routes(self) -> list[Route]:
        """The paths."""
        return [
            Route("/api/v1/usage", self._sums, methods=["GET"]),
            Route("/api/v1/requests", self._live, methods=["GET"]),
        ]

    async def _sums(self, request: Request) -> Response:
        by = [name for name in request.query_params.get("by", "key,model").split(",") if name]
        if not by or len(set(by)) != len(by) or not set(by) <= set(_BY):
            raise UsageError("`by` must be one or more of `key`, `model` and `day`, separated by commas")
        today = time.strftime("%Y-%m-%d", time.gmtime())
        month = (date.fromisoformat(today) - timedelta(days=30)).isoformat()
        since, until = _day(request, "since", month), _day(request, "until", today)
        if since > until:
            raise UsageError(f"`since` ({since}) is after `until` ({until})")
        rows = await run_in_threadpool(self._usage.sums, by, since, until)
        return JSONResponse({"by": by, "since": since, "until": until, "usage": rows})

    async def _live(self, request: Request) -> Response:
        text = request.query_params.get("after", "0")
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise UsageError("`after` must be the `seq` of an earlier answer")
        self._looker.watch(True)
        return JSONResponse(self._requests.look(int(text)))


def _day(request: Request, name: str, default: str) -> str:
    text = request.query_params.get(name, default)
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise UsageError(f"`{name}` must be a day, such as `2026-01-31`") from error


def _row(said: Any) -> tuple[Any, ...] | None:
    if not isinstance(said, dict):
        return None
    key, model, day = said.get("key"), said.get("model"), said.get("day")
    counts = [said.get(name) for name in COUNTS]
    if not isinstance(key, str) or not isinstance(model, str) or type(day) is not int or not 0 <= day < 100_000:
        return None
    if not all(type(count) is int and 0 <= count < 1 << 62 for count in counts):
        return None
    return (key[:64], model[:253], (_EPOCH + timedelta(days=day)).isoformat(), *counts)
