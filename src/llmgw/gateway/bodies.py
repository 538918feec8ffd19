"""Request bodies: chunked ones put together, and the two fields the gateway reads of one."""

from __future__ import annotations

import re

import msgspec

from llmgw.gateway.errors import RequestRefused, malformed, refuse

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[\t\x20-\x7e]*)?")
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


_DECODER = msgspec.json.Decoder(Asked)


def read_asked(body: bytes | bytearray) -> Asked:
    """Read `model` and `stream`.

    Raises:
        RequestRefused: 400, the body is not a JSON object or `model` is missing or no string.
    """
    try:
        asked = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        words = str(error)
        param = "model" if "$.model" in words else "stream" if "$.stream" in words else None
        raise RequestRefused(
            refuse(400, f"the request body is not what this endpoint takes: {words}", code="invalid_type", param=param)
        ) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestRefused(
            refuse(400, f"the request body is not valid JSON: {error}", code="invalid_json")
        ) from error
    if not asked.model:
        raise RequestRefused(refuse(400, "the request names no `model`", code="missing_model", param="model"))
    return asked
