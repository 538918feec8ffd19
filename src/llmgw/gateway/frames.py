"""The bodies of answers, taken apart strictly and put together again at the boundaries of chunks.

A read that holds nothing but whole plain chunks (nearly every one) passes as it is, without a copy. Anything else is
framed anew, so what leaves always ends between two chunks: there an error event can be added, and chunk extensions,
trailers and bytes after the end never reach a client.
"""

from __future__ import annotations

import re

from llmgw.gateway.reply import AnswerBroken

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[\t\x20-\x7e]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*")
_PLAIN = re.compile(rb"[1-9A-Fa-f][0-9A-Fa-f]{0,11}")
_LINE_LIMIT = 512
_TRAILERS_LIMIT = 32
_sizes: dict[bytes, int] = {}


def frame(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Frames:
    """Reads one chunked body.

    Attributes:
        ended: the last chunk and the trailers are read. surplus: bytes came after them.
    """

    __slots__ = ("_closing", "_need", "_rest", "_trailers", "ended", "surplus")

    def __init__(self) -> None:
        self.ended = self.surplus = False
        self._rest = b""
        self._need = 0
        self._closing = False
        self._trailers = -1

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they come.

        Returns:
            Whole chunks, without the last one of size 0; b"" when there is none yet.

        Raises:
            AnswerBroken: it is not RFC 9112's grammar.
        """
        if not self._need and not self._rest and not self._closing and self._trailers < 0:
            # the common case: one whole chunk
            end = data.find(b"\r\n", 0, 8)
            if end > 0:
                line = data[:end]
                size = _sizes.get(line)
                if size is None:
                    size = _plain_size(line)
                if size and end + 4 + size == len(data) and data.endswith(b"\r\n"):
                    return data
        return self._walk(self._rest + data if self._rest else data)

    def idle(self) -> bool:
        """Whether the next byte begins a chunk."""
        return not (self._need or self._rest or self._closing) and self._trailers < 0

    def _walk(self, buf: bytes) -> bytes:
        out: list[bytes] = []
        pos, total = 0, len(buf)
        self._rest = b""
        while pos < total and not self.ended:
            if self._need:
                piece = buf[pos : pos + self._need]
                out.append(frame(piece))
                pos += len(piece)
                self._need -= len(piece)
                self._closing = not self._need
                continue
            end = buf.find(b"\r\n", pos, pos + _LINE_LIMIT)
            if end < 0:
                self._rest = buf[pos:]
                if len(self._rest) >= _LINE_LIMIT or b"\n" in self._rest or (self._closing and len(self._rest) > 1):
                    raise AnswerBroken("it sent a chunked body that is malformed")
                break
            line = buf[pos:end]
            pos = end + 2
            if self._closing:
                if line:
                    raise AnswerBroken("it sent a chunk that is longer than it says")
                self._closing = False
            elif self._trailers >= 0:
                self.ended = self._trailer(line)
            else:
                match = _SIZE.fullmatch(line)
                if match is None:
                    raise AnswerBroken("it sent a chunk without a valid size")
                self._need = int(match[1], 16)
                if not self._need:
                    self._trailers = 0
                elif pos + self._need + 2 <= total and buf.startswith(b"\r\n", pos + self._need):
                    out.append(frame(buf[pos : pos + self._need]))
                    pos += self._need + 2
                    self._need = 0
        self.surplus = self.surplus or (self.ended and pos < total)
        return out[0] if len(out) == 1 else b"".join(out)

    def _trailer(self, line: bytes) -> bool:
        if not line:
            return True
        self._trailers += 1
        if self._trailers > _TRAILERS_LIMIT or not _TRAILER.fullmatch(line):
            raise AnswerBroken("it sent malformed trailers")
        return False


def deframe(framed: bytes) -> bytes:
    """The body in whole chunks of `Frames.feed`."""
    out = []
    pos = 0
    while pos < len(framed):
        end = framed.index(b"\r\n", pos)
        size = int(framed[pos:end], 16)
        out.append(framed[end + 2 : end + 2 + size])
        pos = end + size + 4
    return out[0] if len(out) == 1 else b"".join(out)


def _plain_size(line: bytes) -> int:
    if not _PLAIN.fullmatch(line):
        return 0
    if len(_sizes) > 4096:
        _sizes.clear()
    size = _sizes[line] = int(line, 16)
    return size
