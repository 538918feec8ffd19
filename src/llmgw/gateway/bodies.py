"""Request bodies: chunked ones put together, and the two fields the gateway reads of one."""

from __future__ import annotations

import re

import msgspec

from llmgw.domain.routing import Caps
from llmgw.gateway.errors import Answer, RequestRefused, malformed, refuse

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,12})(?:;[\t\x20-\x7e]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*")
_LINE_LIMIT = 512
_TRAILERS_LIMIT = 32


def too_large(limit: int) -> RequestRefused:
    """413: the body is over the configured limit of `limit` bytes."""
    return RequestRefused(
        refuse(413, f"the request body is larger than {limit} bytes", code="request_too_large", close=True)
    )


class ChunkedBody:
    """Puts a chunked request body together, strictly and within a limit. Trailers are read and thrown away."""

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self._limit = limit
        self._rest = b""
        self._need = 0
        self._closing = False
        self._trailers = -1

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes as they come.

        Returns:
            The bytes after the body once it is complete, None while it is not.

        Raises:
            RequestRefused: 400 for anything but RFC 9112's grammar, 413 over the limit.
        """
        buf = self._rest + data if self._rest else data
        pos = 0
        while True:
            if self._need:
                piece = buf[pos : pos + self._need]
                self.body += piece
                pos += len(piece)
                self._need -= len(piece)
                if self._need:
                    self._rest = b""
                    return None
                self._closing = True
            end = buf.find(b"\r\n", pos, pos + _LINE_LIMIT)
            if end < 0:
                self._rest = buf[pos:]
                if (
                    len(self._rest) >= _LINE_LIMIT
                    or self._rest.find(b"\n") >= 0
                    or (self._closing and len(self._rest) > 1)
                ):
                    raise malformed("the chunked request body is malformed")
                return None
            if self._closing:
                if end != pos:
                    raise malformed("a chunk of the request body is longer than it says")
                self._closing = False
            elif self._trailers >= 0:
                if end == pos:
                    return buf[end + 2 :]
                self._trailer(buf[pos:end])
            else:
                self._begin(buf[pos:end])
            pos = end + 2

    def _begin(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None:
            raise malformed("a chunk of the request body has no valid size")
        self._need = int(match[1], 16)
        if self._need == 0:
            self._trailers = 0
        elif len(self.body) + self._need > self._limit:
            raise too_large(self._limit)

    def _trailer(self, line: bytes) -> None:
        self._trailers += 1
        if self._trailers > _TRAILERS_LIMIT or not _TRAILER.fullmatch(line):
            raise malformed("the trailers of the request body are malformed")


class Asked(msgspec.Struct, gc=False):
    """What the gateway reads of a request's JSON; the rest is the engine's business."""

    model: str | None = None
    stream: bool | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()

    def several(self) -> int:
        """Choices asked for each prompt where the answer has several, of one prompt or of many; else 0."""
        n = bytes(self.n)
        choices = int(n) if n.isdigit() and len(n) < 6 else 1
        return choices if choices > 1 or _PROMPTS.match(self.prompt) else 0


# several texts, or several lists of tokens; possessive: one that may go back keeps 120 bytes for each byte of text
_PROMPTS = re.compile(rb'\[\s*+(?:"(?:[^"\\]++|\\.)*+"|\[[^\]]*+\])\s*+,', re.DOTALL)
_DECODER = msgspec.json.Decoder(Asked)
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def read_asked(body: bytes | bytearray) -> Asked:
    """Read `model` and `stream`.

    Raises:
        RequestRefused: 400 (the body is not a JSON object, or `model` is missing or no string) or 415 (compressed).
    """
    try:
        asked = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        words = str(error)
        param = "model" if "$.model" in words else "stream" if "$.stream" in words else None
        raise RequestRefused(
            refuse(400, f"the request body is not what this endpoint takes: {words}", code="invalid_type", param=param)
        ) from error
    except _UNREADABLE as error:
        raise RequestRefused(_no_json(bytes(body[:4]), str(error))) from error
    if not asked.model:
        raise RequestRefused(refuse(400, "the request names no `model`", code="missing_model", param="model"))
    return asked


def _no_json(start: bytes, why: str) -> Answer:
    if start.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        words = "the request body is compressed; this gateway reads it only without a `content-encoding`"
        return refuse(415, words, code="unsupported_encoding")
    if not start:
        why = "it is empty"
    elif start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in start:
        why = "it is UTF-16 or UTF-32; send UTF-8"
    elif start.startswith(b"\xef\xbb\xbf"):
        why = "it begins with a byte order mark; leave that out"
    return refuse(400, f"the request body is not valid JSON: {why}", code="invalid_json")


_PREFIX = 512
_ROLE = b'"role"'


def prefix_of(asked: Asked) -> bytes:
    """What all requests of one conversation begin with: the first message, the first two after a system message.

    Cut at the next `"role"`, which cannot be inside of a text since quotes there are escaped; a client that writes the
    role after the content gets its affinity from the second turn on.
    """
    parts = bytes(asked.messages).split(_ROLE, 3)
    if len(parts) < 2:
        return parts[0] or bytes(asked.prompt)[:_PREFIX]
    prefix = parts[0] + parts[1]
    if len(parts) > 2 and b'"user"' not in parts[1][:14]:
        prefix += parts[2]
    return prefix.rstrip(b" \t\r\n,{}[]")


class _Limited(msgspec.Struct, gc=False):
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()
    n_predict: msgspec.Raw = msgspec.Raw()
    temperature: msgspec.Raw = msgspec.Raw()


_LIMITED = msgspec.json.Decoder(_Limited)
_TOKEN_FIELDS = {"/v1/responses": ("max_output_tokens",), "/v1/messages": ("max_tokens",)}
_CAPPED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def apply_caps(body: bytes | bytearray, path: str, caps: Caps) -> bytes | bytearray:
    """Bring `max_tokens` and `temperature` of a request within a profile's bounds, and set its defaults.

    Raises:
        RequestRefused: 400, the body or one of them cannot be read.
    """
    if path not in _CAPPED:
        return body
    said = _LIMITED.decode(body)
    changed: dict[str, float | int] = {}
    names = _TOKEN_FIELDS.get(path, ("n_predict", "max_completion_tokens", "max_tokens"))
    given = [(name, value) for name in names if (value := _number(name, getattr(said, name))) is not None]
    for name, value in given:
        if caps.max_tokens is not None and not 0 <= value <= caps.max_tokens:
            changed[name] = caps.max_tokens
    default = caps.default_max_tokens if caps.default_max_tokens is not None else caps.max_tokens
    if not given and default is not None:
        changed[names[-1]] = default if caps.max_tokens is None else min(default, caps.max_tokens)
    warmth = _number("temperature", said.temperature)
    wanted = caps.default_temperature if warmth is None else warmth
    if wanted is not None:
        if caps.min_temperature is not None:
            wanted = max(wanted, caps.min_temperature)
        if caps.max_temperature is not None:
            wanted = min(wanted, caps.max_temperature)
        if wanted != warmth:
            changed["temperature"] = wanted
    if not changed:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except _UNREADABLE as error:
        # names that nobody has asked for so far are read here for the first time
        raise RequestRefused(_no_json(bytes(body[:4]), str(error))) from error
    fields.update({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changed.items()})
    return msgspec.json.encode(fields)


def _number(name: str, raw: msgspec.Raw) -> float | int | None:
    data = bytes(raw)
    if not data:
        return None
    try:
        value = msgspec.json.decode(data)
    except _UNREADABLE as error:
        # such as 1e999, which is JSON and no number
        words = f"the request body is not what this endpoint takes: {error} - at `$.{name}`"
        raise RequestRefused(refuse(400, words, code="invalid_type", param=name)) from error
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
