"""The link to the control process: routing snapshots in, statistics out. It may be away for as long as it likes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any

import msgspec

from llmgw.domain.routing import RouteTable
from llmgw.errors import WireError
from llmgw.wire.shapes import from_json

_LOG = logging.getLogger("llmgw.gateway")
_LINE_LIMIT = 64 << 20
_BACKLOG_LIMIT = 64 << 10
_RETRY_MAX_S = 2.0


class ControlLink:
    """Connects to the control socket for ever.

    Args:
        path: the unix socket.
        hello: the first message on every connection.
        report: makes the messages sent every `interval_s` seconds.
        on_routes, on_drain, on_link: called on the loop's thread; `on_link` gets whether the control process is there.
        on_other: gets the kind and the rest of every other message.
    """

    def __init__(
        self,
        path: str,
        hello: dict[str, Any],
        report: Callable[[], list[dict[str, Any]]],
        on_routes: Callable[[RouteTable], None],
        on_drain: Callable[[], None],
        on_link: Callable[[bool], None],
        on_other: Callable[[str, dict[str, Any]], None] = lambda _kind, _message: None,
        interval_s: float = 1.0,
    ) -> None:
        self._path = path
        self._hello = hello
        self._report = report
        self._on_routes = on_routes
        self._on_drain = on_drain
        self._on_link = on_link
        self._on_other = on_other
        self._interval_s = interval_s
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Connect, listen, and when the other end goes, connect again after a random pause that grows to 2 s."""
        failures = 0
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path, limit=_LINE_LIMIT)
            except OSError as error:
                if failures == 0:
                    _LOG.warning("control socket `%s` cannot be reached: %s; trying on", self._path, error)
                failures += 1
            else:
                began = asyncio.get_running_loop().time()
                _LOG.info("connected to the control process")
                await self._talk(reader, writer)
                failures = 0 if asyncio.get_running_loop().time() - began > _RETRY_MAX_S else failures + 1
                _LOG.warning("the control process is away; going on with the last routing snapshot")
            await asyncio.sleep(random.uniform(0.05, min(_RETRY_MAX_S, 0.2 * 2.0 ** min(failures, 10))))

    def tell(self) -> None:
        """Send the reports now, if the control process is there and reads."""
        writer = self._writer
        if writer is None or writer.transport.get_write_buffer_size() >= _BACKLOG_LIMIT:
            return
        try:
            writer.writelines([_line(message) for message in self._report()])
        except Exception:
            _LOG.exception("a report to the control process could not be made")

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._on_link(True)
        writer.write(_line(self._hello))
        self._writer = writer
        sender = asyncio.get_running_loop().create_task(self._send_reports(writer))
        try:
            while line := await reader.readline():
                self._hear(line)
        except (OSError, ValueError) as error:
            _LOG.warning("the link to the control process broke: %s", error)
        except Exception:
            _LOG.exception("a message of the control process could not be obeyed")
        finally:
            sender.cancel()
            self._writer = None
            self._on_link(False)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _send_reports(self, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            self.tell()
            await asyncio.sleep(self._interval_s)

    def _hear(self, line: bytes) -> None:
        try:
            message = msgspec.json.decode(line)
            kind = message.pop("type", "") if isinstance(message, dict) else ""
            if kind == "routes":
                table = from_json(message, RouteTable)
                self._on_routes(table)
                _LOG.info("routing snapshot %d: %d models", table.seq, len(table.models))
            elif kind == "drain":
                self._on_drain()
            elif isinstance(kind, str):
                self._on_other(kind, message)
        except (WireError, msgspec.DecodeError, RecursionError) as error:
            _LOG.error("a message of the control process cannot be read and is ignored: %s", error)


def _line(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message) + b"\n"
