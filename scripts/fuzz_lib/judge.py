"""What came back on a client's connection, as `h11` reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import h11

from fuzz_lib.engine import fields_of

_LIMIT = 1 << 20


class Answers:
    """Answers one after the other on one connection.

    Args:
        methods: of the requests, since the answer to HEAD has no body; POST where nothing is known.

    Attributes:
        whole: status and body of each complete answer. problem: why it is not HTTP, or what else is wrong.
        cut: the connection ended inside of an answer.
    """

    def __init__(self, methods: Sequence[str]) -> None:
        self.whole: list[tuple[int, bytes]] = []
        self.problem = ""
        self.cut = False
        self._methods = methods
        self._closing = False
        self._judge = self._next()
        self._status = 0
        self._body = bytearray()
        self._began = False

    def feed(self, data: bytes) -> None:
        """Bytes as they come; b"" is the end of the connection."""
        if self.problem:
            return
        if self._closing and data:
            self.problem = f"bytes after an answer that said `connection: close`: {data[:200]!r}"
            return
        self._began = self._began or bool(data)
        if not data and not self._began:
            return
        try:
            self._judge.receive_data(data)
            self._read()
        except h11.RemoteProtocolError as error:
            if data:
                self.problem = f"h11 says `{error}` of {data[:300]!r}"
            else:
                self.cut = True

    def _read(self) -> None:
        while True:
            event = self._judge.next_event()
            if isinstance(event, h11.Response):
                self._status, self._body = event.status_code, bytearray()
                self._closing_said = (b"connection", b"close") in [(k.lower(), v) for k, v in event.headers]
            elif isinstance(event, h11.Data):
                self._body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self.whole.append((self._status, bytes(self._body)))
                rest, ended = self._judge.trailing_data
                self._closing = self._closing_said
                self._began = False
                self._judge = self._next()
                if rest:
                    self.feed(rest)
                if ended:
                    self.feed(b"")
                return
            elif not isinstance(event, h11.InformationalResponse):
                return

    def _next(self) -> h11.Connection:
        judge = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LIMIT)
        at = len(self.whole)
        method = self._methods[at] if at < len(self._methods) else "POST"
        judge.send(h11.Request(method=method, target="/", headers=[("Host", "a"), ("Content-Length", "0")]))
        judge.send(h11.EndOfMessage())
        return judge


def marks_of(sent: bytes) -> set[str]:
    """The marks of the requests in a client's bytes, as h11 cuts them; it ends where h11 refuses."""
    found: set[str] = set()
    while sent:
        judge = h11.Connection(h11.SERVER, max_incomplete_event_size=_LIMIT)
        judge.receive_data(sent)
        body, content_type = b"", ""
        try:
            while not isinstance(event := judge.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    return found
                if isinstance(event, h11.Request):
                    content_type = next((v.decode("latin-1") for k, v in event.headers if k == b"content-type"), "")
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
        except h11.RemoteProtocolError:
            return found
        try:
            name = fields_of(content_type, body).get("user", "")
        except (ValueError, RecursionError, AttributeError, LookupError, json.JSONDecodeError):
            name = ""
        found.add(name)
        sent = judge.trailing_data[0]
    return found
