"""Heads of answers: read strictly, once; an engine's heads are nearly all alike, so the reading is remembered.

Nothing of an answer's head is ever copied to a client except the values of a few known headers.
"""

from __future__ import annotations

import re

from llmgw.errors import LlmgwError

HEAD_LIMIT = 64 << 10
TOO_LARGE = f"the head of its answer is larger than {HEAD_LIMIT} bytes"
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*+)?\r\n")
_FIELDS = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n){0,200}+")
_VALUE = re.compile(rb"[\t\x20-\x7e]{0,256}")
_PASSED = frozenset((b"content-type", b"content-encoding", b"cache-control", b"content-disposition", b"retry-after"))
_NO_BODY = (204, 304)
_REMEMBERED = 512
_SMALL = 4096


class AnswerBroken(LlmgwError):
    """What the other end sent is no answer this gateway is willing to read."""

    code = "answer-broken"


class Reply:
    """The head of an answer. Shared by all answers with the same head, so never changed.

    Attributes:
        length: the announced size of the body, None for a chunked one or one that ends with the connection.
        until_close: the body ends with the connection.
        fields: all headers, names in lower case. passed: the lines a client gets to see.
        events: an event stream with status 200.
    """

    __slots__ = ("chunked", "events", "fields", "keep", "length", "passed", "status", "until_close")

    def __init__(self, status: int, http11: bool, fields: list[tuple[bytes, bytes]], head_only: bool) -> None:
        self.status = status
        self.fields = fields
        self.length: int | None = None
        self.chunked = self.events = False
        self.keep = http11
        passed = []
        for name, value in fields:
            if name == b"content-length":
                self._set_length(value)
            elif name == b"transfer-encoding":
                if self.chunked or value.lower() != b"chunked":
                    raise AnswerBroken("it sent a transfer coding that is not `chunked`")
                self.chunked = True
            elif name == b"connection":
                self.keep = self.keep and b"close" not in value.lower() and b"upgrade" not in value.lower()
            elif name in _PASSED and _VALUE.fullmatch(value):
                passed.append(b"%b: %b\r\n" % (name, value))
                if name == b"content-type" and status == 200 and value.startswith(b"text/event-stream"):
                    self.events = True
        if self.chunked and (self.length is not None or not http11):
            raise AnswerBroken("it sent both `content-length` and `transfer-encoding`, or a chunked HTTP/1.0 answer")
        bodiless = head_only or status in _NO_BODY
        if bodiless:
            self.chunked = False
            if not head_only:
                self.length = 0
        self.until_close = not bodiless and self.length is None and not self.chunked
        if self.events and not any(line.startswith(b"cache-control:") for line in passed):
            passed.append(b"cache-control: no-cache\r\n")  # llama-server says nothing, and proxies then buffer
        self.passed = b"".join(passed)

    def _set_length(self, value: bytes) -> None:
        if not value.isdigit() or len(value) > 15 or self.length is not None:
            raise AnswerBroken("it sent a `content-length` that is no single number")
        self.length = int(value)


class Replies:
    """Reads heads, and remembers them with the length and the date cut out."""

    def __init__(self) -> None:
        self._known: dict[bytes, Reply] = {}

    def read(self, raw: bytes, head_only: bool = False) -> tuple[Reply, int | None]:
        """Read a head from its first byte up to and including the CRLF of its last line, without the empty line.

        Returns:
            The head, and the length of this answer's body (None: chunked or until the end of the connection).

        Raises:
            AnswerBroken: it cannot be read; says why.
        """
        if head_only:
            reply = _parse(raw, True)
            return reply, 0
        length = None
        rest = raw
        at = raw.find(b"\r\nContent-Length: ")
        if at < 0:
            at = raw.find(b"\r\ncontent-length: ")
        if at > 0:
            end = raw.find(b"\r\n", at + 18)
            digits = raw[at + 18 : end]
            if not digits.isdigit() or len(digits) > 15:
                # with no digits at all it looks like one whose digits were cut out
                reply = _parse(raw, False)
                return reply, reply.length
            length = int(digits)
            rest = raw[: at + 18] + raw[end:]
        at = rest.find(b"\r\ndate: ")
        if at < 0:
            at = rest.find(b"\r\nDate: ")
        if at > 0 and rest[at + 37 : at + 39] == b"\r\n":
            rest = rest[:at] + rest[at + 37 :]
        known = self._known.get(rest)
        if known is not None:
            return known, length
        reply = _parse(raw, False)
        if len(raw) <= _SMALL and reply.status >= 200 and reply.status not in _NO_BODY and reply.length == length:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[rest] = reply
        return reply, reply.length


def around_length(head: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and after the digits of Content-Length in a head that was read; None if it has none."""
    at = max(head.find(b"\r\nContent-Length: "), head.find(b"\r\ncontent-length: ")) + 18
    return (head[:at], head[head.find(b"\r\n", at) :]) if at > 18 else None


def _parse(raw: bytes, head_only: bool) -> Reply:
    match = _STATUS.match(raw)
    if match is None or not _FIELDS.fullmatch(raw, match.end()):
        raise AnswerBroken(f"it sent what is not HTTP ({raw[:60]!a})")
    fields = []
    for line in raw[match.end() :].split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        fields.append((name.lower(), value.strip(b" \t")))
    return Reply(int(match[2]), match[1] == b"1", fields, head_only)
