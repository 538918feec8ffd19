"""Request heads: strict, because two programs that read the same bytes differently is how requests are smuggled.

The whole head must match RFC 9112's grammar to the letter: CRLF only, no space before a colon, no folded lines, no
control characters. A general parser is made to be lenient (and which leniency depends on its version), so this one
expression decides, and nothing of the client's head is ever copied towards an engine.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from llmgw.gateway.errors import malformed
from llmgw.gateway.reply import around_length

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_HEAD = re.compile(
    rb"([A-Z]{3,16}) (/[\x21-\x7e]*+) HTTP/1\.([01])\r\n((?:" + _TOKEN + rb":[^\x00-\x08\x0a-\x1f\x7f]*+\r\n){0,100}+)"
)
_KNOWN = re.compile(
    rb"(?:\A|\n)((?i:host|content-length|transfer-encoding|connection|expect|authorization|x-api-key|content-type"
    rb"|accept|x-request-id|origin)):([^\r]*+)"
)
_HOST = re.compile(rb"[A-Za-z0-9._~:\[\]%-]{0,255}")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/@+=-]{1,128}")
_FIELD = re.compile(rb"[\x20-\x7e]{1,256}")
_SMALL = 4096
_REMEMBERED = 1024
_ONCE = frozenset((b"host", b"content-length", b"transfer-encoding", b"authorization", b"x-api-key", b"content-type"))


class RequestHead:
    """What the gateway reads of a request head; `fields` is the raw header block, for the relay to the admin socket."""

    __slots__ = (
        "_engine_lines",
        "accept",
        "authorization",
        "boundary",
        "chunked",
        "content_type",
        "expects_continue",
        "fields",
        "host",
        "http11",
        "json_path",
        "keep_alive",
        "key",
        "length",
        "method",
        "origin",
        "path",
        "request_id",
        "target",
    )

    def __init__(self, method: str, target: bytes, http11: bool, fields: bytes) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0].decode("ascii")
        self.http11 = http11
        self.fields = fields
        self.host = b""
        self.length = 0
        self.chunked = False
        self.keep_alive = http11
        self.expects_continue = False
        self.authorization = b""
        self.key = b""
        self.content_type = b""
        self.boundary: bytes | None = None  # set where the body is a form, by `surface.aim`
        self.accept = b""
        self.request_id = b""
        self.origin = b""
        self.json_path = self.path.replace("\\", "\\\\").replace('"', '\\"').encode("ascii")
        self._engine_lines = b""

    def engine_lines(self) -> bytes:
        """The lines of a head towards an engine that come from this one: made anew, never copied."""
        if not self._engine_lines:
            self._engine_lines = b"POST %b HTTP/1.1\r\nContent-Type: %b\r\nAccept: %b\r\n" % (
                self.path.encode("ascii"),
                self.content_type or b"application/json",
                self.accept or b"*/*",
            )
        return self._engine_lines


def read_head(raw: bytes) -> RequestHead:
    """Read a head, given from its first byte up to and including the CRLF of its last line, without the empty line.

    Raises:
        RequestRefused: 400 (malformed or ambiguous), 417 or 501; the connection must be closed after the answer.
    """
    match = _HEAD.fullmatch(raw)
    if match is None:
        raise malformed(_why(raw))
    head = RequestHead(match[1].decode("ascii"), match[2], match[3] == b"1", match[4])
    found = _KNOWN.findall(match[4])
    seen = {name.lower(): value.strip(b" \t") for name, value in found}
    if len(seen) != len(found):
        _join(seen, found)
    _framing(head, seen)
    host = seen.get(b"host")
    if (host is None and head.http11) or (host is not None and not _HOST.fullmatch(host)):
        raise malformed("the request needs one valid `host` header")
    head.host = host or b""
    if b"connection" in seen:
        options = seen[b"connection"].lower().split(b",")
        if b"close" in [option.strip(b" \t") for option in options]:
            head.keep_alive = False
    if b"expect" in seen:
        if seen[b"expect"].lower() != b"100-continue":
            raise malformed("only `100-continue` can be expected", 417, "expectation_failed")
        head.expects_continue = head.http11
    head.authorization = seen.get(b"authorization", b"")
    head.key = seen.get(b"x-api-key", b"")
    if b"content-type" in seen:
        head.content_type = _plain(seen[b"content-type"])
    if b"accept" in seen:
        head.accept = _plain(seen[b"accept"])
    if b"origin" in seen:
        head.origin = _plain(seen[b"origin"])
    if b"x-request-id" in seen and _REQUEST_ID.fullmatch(seen[b"x-request-id"]):
        head.request_id = seen[b"x-request-id"]
    return head


def _join(seen: dict[bytes, bytes], found: list[tuple[bytes, bytes]]) -> None:
    """Put the values of repeated headers together; some may not be repeated."""
    seen.clear()
    for name, value in found:
        name = name.lower()
        if name not in seen:
            seen[name] = value.strip(b" \t")
        elif name in _ONCE:
            raise malformed(f"the request has two `{name.decode()}` headers")
        else:
            seen[name] += b"," + value.strip(b" \t")


def header_lines(fields: bytes) -> list[tuple[bytes, bytes]]:
    """All headers of a checked header block, names in lower case."""
    lines = []
    for line in fields.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        lines.append((name.lower(), value.strip(b" \t")))
    return lines


def incomplete_is_hopeless(raw: bytes) -> bool:
    """Whether a head that has not ended yet can never become a valid one (a line ended without CR)."""
    return raw.count(b"\n") != raw.count(b"\r\n")


def speaks_tls(raw: bytes) -> bool:
    """Whether this is the beginning of a TLS handshake: its client would wait for an answer that never comes."""
    return raw.startswith(b"\x16\x03")


def _framing(head: RequestHead, seen: dict[bytes, bytes]) -> None:
    coding = seen.get(b"transfer-encoding")
    length = seen.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise malformed("the request has both `content-length` and `transfer-encoding`")
        if not head.http11:
            raise malformed("HTTP/1.0 has no `transfer-encoding`")
        if coding.lower() != b"chunked":
            raise malformed("the only transfer coding this gateway reads is `chunked`", 501, "not_implemented")
        head.chunked = True
    elif length is not None:
        if not _LENGTH.fullmatch(length):
            raise malformed("`content-length` is not a plain number")
        head.length = int(length)


@lru_cache(256)
def _plain(value: bytes) -> bytes:
    return value if _FIELD.fullmatch(value) else b""


def _why(raw: bytes) -> str:
    line, _, rest = raw.partition(b"\r\n")
    if incomplete_is_hopeless(raw):
        return "a line of the request head does not end in CR LF"
    if not re.fullmatch(rb"[A-Z]{3,16} /[\x21-\x7e]* HTTP/1\.[01]", line):
        return "the request line is not `METHOD /path HTTP/1.1`"
    if rest.startswith((b" ", b"\t")) or b"\n " in rest or b"\n\t" in rest:
        return "a header is folded over two lines"
    if rest.count(b"\n") > 100:
        return "the request has more than 100 headers"
    return "a header line is malformed"


QUICK = 8 << 10
"""Messages whose body and digits of Content-Length together are shorter than this are looked for in `DIGITS`."""


def _digits(total: int) -> bytes:
    for count in (1, 2, 3, 4):
        text = b"%d" % (total - count)
        if total > count and len(text) == count:
            return text
    return b"\x00"


DIGITS = [_digits(total) for total in range(QUICK)]
"""The digits of Content-Length by how many bytes they and the body are together; no digits where nothing fits."""


class Known:
    """A head that was accepted.

    Attributes:
        before, after: its bytes around the digits of Content-Length, to the empty line; both empty if it has none.
        size: how many bytes these are together.
        goal, key, lanes: the caller's: where the request goes, whose key it carries, what a model's name leads to.
        epoch: it is good as long as this is the `Heads.epoch`.
    """

    __slots__ = ("after", "before", "epoch", "goal", "head", "key", "lanes", "size")

    def __init__(self, raw: bytes, head: RequestHead, goal: Any, key: Any, epoch: object) -> None:
        self.head, self.goal, self.key, self.epoch = head, goal, key, epoch
        self.lanes: dict[str | None, Any] = {}
        self.before, self.after = around_length(raw) or (b"", b"")
        self.size = len(self.before) + len(self.after)


class Heads:
    """Heads that were read before, with the length cut out: a client sends the same one again and again.

    What is kept with a head is the caller's (where the request goes, whose key it carries) and must be forgotten when
    that may change. Only good heads are kept, so there is nothing to learn from the time an unknown one takes.
    """

    def __init__(self) -> None:
        self.epoch = object()
        self._known: dict[bytes, Known] = {}

    def clear(self) -> None:
        """Forget all."""
        self.epoch = object()
        self._known.clear()

    def find(self, raw: bytes) -> tuple[Known | None, bytes, int]:
        """What was kept for a head like this one (or None), the key to keep it by, and its Content-Length."""
        length = 0
        at = raw.find(b"\r\nContent-Length: ")
        if at < 0:
            at = raw.find(b"\r\ncontent-length: ")
        if at > 0:
            end = raw.find(b"\r\n", at + 18)
            digits = raw[at + 18 : end]
            if not digits.isdigit() or len(digits) > 15:
                return None, b"", 0  # with no digits at all it looks like one whose digits were cut out
            length = int(digits)
            raw = raw[: at + 18] + raw[end:]
        return self._known.get(raw), raw, length

    def keep(self, name: bytes, value: Known) -> None:
        """Keep it for the name that `find` gave; b"" is not kept."""
        if name and len(name) <= _SMALL:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[name] = value
