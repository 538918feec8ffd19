"""What is kept of each request: usage per key, model and day for the control process, a line of the access log.

Neither holds a word of a prompt or an answer, nor a key.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from llmgw.gateway.errors import Answer, code_of
from llmgw.gateway.usage import passed_on

if TYPE_CHECKING:
    from llmgw.gateway.asking import Asking

_LOG = logging.getLogger("llmgw.gateway")
_FLUSH_BYTES = 64 << 10
_RECENT = 256
_BATCH_ROWS = 500
_DAY = 86_400
# a pipe that nobody reads must not hold up the loop
_HOW = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


class AccessLog:
    """One JSON object per line, written in blocks by the sweep.

    Args:
        path: "" for none. Followed by its name: a log may be moved away, or removed, and a new one is begun.
        sample: part of the requests that is logged, 0 to 1; answers of 400 and above always are.
    """

    def __init__(self, path: str, sample: float = 1.0) -> None:
        self.on = bool(path)
        self._path = path
        self._sample = sample
        self._file: int | None = None
        self._lines: list[bytes] = []
        self._cut = b""  # the rest of a line whose beginning is in the file
        self.lost = 0

    def wants(self, status: int) -> bool:
        """Whether this request is to be logged."""
        return self.on and (self._sample >= 1 or status >= 400 or random.random() < self._sample)

    def add(self, line: bytes) -> None:
        """One line, without its end."""
        self._lines.append(line)

    def flush(self) -> None:
        """Write what there is; a log that cannot be written loses lines, never requests, and no line is half there."""
        if not self._lines:
            return
        if self._file is not None and self._moved():
            self._close()
        data = self._cut + b"\n".join((*self._lines, b""))
        self._lines = []
        try:
            if self._file is None:
                self._file = os.open(self._path, _HOW, 0o640)
            while data:
                # a disk that becomes full takes a part
                written = os.write(self._file, data)
                within = data[written - 1 : written] != b"\n"
                data = data[written:]
                self._cut = data[: data.find(b"\n") + 1] if within else b""
        except OSError as error:
            if self.lost == 0:
                _LOG.error("the access log `%s` cannot be written, its lines are lost: %s", self._path, error)
            self.lost += data.count(b"\n") - bool(self._cut)
        else:
            if self.lost:
                _LOG.warning("the access log `%s` can be written again; %d lines were lost", self._path, self.lost)
                self.lost = 0

    def reopen(self) -> None:
        """Begin a new file if the old one was moved away."""
        self.flush()
        self._close()

    def _moved(self) -> bool:
        assert self._file is not None
        try:
            return not os.path.samestat(os.fstat(self._file), os.stat(self._path))  # noqa: PTH116  (a hot path)
        except OSError:
            return True

    def _close(self) -> None:
        file, self._file, self._cut = self._file, None, b""
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


class Row(msgspec.Struct, gc=False):
    """Usage of one key for one model on one day (days since the epoch, UTC)."""

    key: str
    model: str
    day: int
    requests: int = 0
    prompt: int = 0
    completion: int = 0
    partial_requests: int = 0
    partial_completion: int = 0
    unknown_requests: int = 0


class Books:
    """Usage that the control process has not taken over yet, and the last requests.

    A batch is sent again until it is acknowledged; the control process counts each batch once, by its number.
    """

    def __init__(self, log: AccessLog) -> None:
        self.log = log
        self.recent: deque[bytes] = deque(maxlen=_RECENT)
        self.watched = False
        self.batch: tuple[int, list[Row]] | None = None
        self._rows: dict[tuple[str, str, int], Row] = {}
        self._number = 0
        self._run = os.urandom(8).hex()
        self._day = int(time.time()) // _DAY

    def turn(self) -> None:
        """Called by the sweep."""
        self._day = int(time.time()) // _DAY
        self.log.flush()

    def usage_message(self) -> dict[str, Any] | None:
        """The batch to send, None when there is nothing to tell."""
        if self.batch is None:
            if not self._rows:
                return None
            self._number += 1
            names = list(self._rows)[:_BATCH_ROWS]
            self.batch = (self._number, [self._rows.pop(name) for name in names])
        number, rows = self.batch
        return {"type": "usage", "run": self._run, "batch": number, "rows": [msgspec.to_builtins(row) for row in rows]}

    def acknowledged(self, number: int) -> None:
        """The control process has it on disk."""
        if self.batch is not None and self.batch[0] == number:
            self.batch = None

    def pending(self) -> int:
        """Requests whose usage the control process does not have."""
        held = self.batch[1] if self.batch is not None else []
        return sum(row.requests for row in (*held, *self._rows.values()))

    def row(self, key: str, model: str) -> Row:
        """Today's row."""
        name = (key, model, self._day)
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = Row(key, model, self._day)
        return row

    def note(self, ended: list[Asking], now: float) -> None:
        """Keep the lines of requests that have ended; `now`: on the clock of their `ended_at`."""
        log, watched = self.log, self.watched
        epoch = time.time() - now
        for serve in ended:
            wanted = log.wants(serve.status)
            if wanted or watched:
                line = _line(serve, epoch)
                if wanted:
                    log.add(line)
                if watched:
                    self.recent.append(line)

    def refused(self, path: str, request_id: bytes, key: str | None, peer: str, answer: Answer) -> None:
        """Keep the line of a request that the gateway answered before it had a model; `code` says why."""
        line = msgspec.json.encode(
            {
                "time": round(time.time(), 3),
                "id": request_id.decode("ascii"),
                "key": key,
                "model": None,
                "path": path[:256],
                "stream": None,
                "replica": None,
                "node": None,
                "why": "",
                "peer": peer,
                "status": answer.status,
                "retries": 0,
                "queue_ms": 0,
                "first_ms": None,
                "ms": 0,
                "prompt": None,
                "completion": None,
                "partial": False,
                "code": code_of(answer),
            }
        )
        if self.log.wants(answer.status):
            self.log.add(line)
        if self.watched:
            self.recent.append(line)

    def take_recent(self) -> list[Any]:
        """The lines since the last call, as objects, for whoever looks on."""
        lines = [msgspec.json.decode(line) for line in self.recent]
        self.recent.clear()
        return lines


def _line(serve: Asking, epoch: float) -> bytes:
    tokens, model, now, began = serve.tokens, serve.ended_model, serve.ended_at, serve.began
    at_ms = int((epoch + now) * 1000)
    prompt, completion = (tokens.prompt, tokens.completion) if tokens is not None else (None, None)
    who = (serve.key_name, model, serve.head.json_path, serve.stream, serve.last_replica, serve.last_node, serve.why)
    middle = _middles.get(who)
    if middle is None:
        if len(_middles) > 4096:
            _middles.clear()
        middle = _middles[who] = (
            b'"key":%b,"model":%b,"path":"%b","stream":%b,"replica":%b,"node":%b,"why":"%b","peer":"'
            % (
                _text(serve.key_name or None),
                _text(model or None),
                serve.head.json_path,
                b"true" if serve.stream else b"false",
                _text(serve.last_replica),
                _text(serve.last_node),
                serve.why,
            )
        )
    if serve.partial:
        # nothing passed on is not known to be nothing made
        completion = passed_on(serve.head.path, serve.events, tokens) or None
    first = serve.first_at
    if first is None and not serve.partial and prompt is not None and completion is not None:
        return _USUAL % (
            at_ms // 1000,
            at_ms % 1000,
            serve.request_id,
            middle,
            serve.client.peer_text,
            serve.status,
            len(serve.tried) - 1,
            serve.queue_ms,
            (now - began) * 1000,
            prompt,
            completion,
        )
    return (
        b'{"time":%d.%03d,"id":"%b",%b%b","status":%d,"retries":%d,"queue_ms":%d,"first_ms":%b,"ms":%d,"prompt":%b,'
        b'"completion":%b,"partial":%b}'
        % (
            at_ms // 1000,
            at_ms % 1000,
            serve.request_id,
            middle,
            serve.client.peer_text,
            serve.status,
            len(serve.tried) - 1 if serve.tried else 0,
            serve.queue_ms,
            b"null" if first is None else b"%d" % ((first - began) * 1000),
            (now - began) * 1000,
            b"null" if prompt is None else b"%d" % prompt,
            b"null" if completion is None else b"%d" % completion,
            b"true" if serve.partial else b"false",
        )
    )


_USUAL = (
    b'{"time":%d.%03d,"id":"%b",%b%b","status":%d,"retries":%d,"queue_ms":%d,"first_ms":null,"ms":%d,"prompt":%d,'
    b'"completion":%d,"partial":false}'
)
_middles: dict[tuple[object, ...], bytes] = {}
_texts: dict[str | None, bytes] = {None: b"null"}


def _text(value: str | None) -> bytes:
    """A JSON string; names repeat, so they are remembered."""
    found = _texts.get(value)
    if found is None:
        if len(_texts) > 4096:
            _texts.clear()
            _texts[None] = b"null"
        found = _texts[value] = msgspec.json.encode(value)
    return found
