"""Bytes to messages, without I/O: feed it whatever arrived, get the complete messages back.

Everything a peer sends is hostile until proven otherwise, so what JSON parsers let through is refused here: deep
nesting, duplicate keys, NaN and infinities, integers beyond 64 bits, lone surrogates, anything but UTF-8. Lines end
at the byte `\\n` only (`splitlines` would also split at U+2028).
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from llmgw.errors import WireError
from llmgw.wire.messages import LINE_LIMIT, OPENING_LIMIT, Message, Unknown, Welcome, decode

MAX_NESTING = 32

# Matches an unterminated string up to the end as well: each byte is looked at once, whatever a peer sends.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ONLY_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class Codec:
    """One direction of one connection.

    Args:
        limit_before_welcome: longest line in bytes until `raise_limit`.
        limit: longest line in bytes after it.
        peer_welcomes: raise the limit by itself when the peer says welcome (the agent's end): what follows in the same
            bytes already has the full length.
    """

    def __init__(
        self, limit_before_welcome: int = OPENING_LIMIT, limit: int = LINE_LIMIT, *, peer_welcomes: bool = False
    ) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._limit = limit_before_welcome
        self._full_limit = limit
        self._peer_welcomes = peer_welcomes
        self.fault: WireError | None = None
        self.bytes = 0
        self.messages = 0
        self.unknown = 0

    @property
    def lines(self) -> int:
        """Lines read so far, known or not."""
        return self.messages + self.unknown

    def raise_limit(self) -> None:
        """Allow lines of full length: the peer was welcomed."""
        self._limit = self._full_limit

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes in and return the messages they complete.

        After bad bytes the connection is of no use: nothing behind them is read. Messages that came before them in
        the same call are returned first, with `fault` set; the next call raises it.

        Raises:
            WireError: the peer does not speak the protocol; says how.
        """
        if self.fault is not None:
            raise self.fault
        self.bytes += len(data)
        self._buffer += data
        messages: list[Message] = []
        try:
            self._collect(messages)
        except WireError as error:
            self.fault = error
            self._buffer.clear()
            if not messages:
                raise
        return messages

    def _collect(self, messages: list[Message]) -> None:
        start = 0
        try:
            while True:
                end = self._buffer.find(b"\n", max(start, self._scanned))
                length = (len(self._buffer) if end < 0 else end) - start
                if length > self._limit:
                    raise WireError("the peer sent a line that is too long", cause=f"{self._limit} bytes are allowed")
                if end < 0:
                    return
                message = decode(parse(bytes(self._buffer[start:end])))
                start = end + 1
                if isinstance(message, Unknown):
                    self.unknown += 1
                    continue
                self.messages += 1
                if self._peer_welcomes and isinstance(message, Welcome):
                    self.raise_limit()
                messages.append(message)
        finally:
            del self._buffer[:start]
            self._scanned = len(self._buffer)


def parse(line: bytes) -> Any:
    """One line of JSON, strictly.

    Raises:
        WireError: it is not JSON, or JSON that two parsers would read differently.
    """
    _check_nesting(line)
    try:
        text = line.decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        raise WireError("the peer sent a line that is not UTF-8", cause=f"at byte {error.start}") from error
    try:
        data = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer, parse_float=_float
        )
    except (ValueError, RecursionError) as error:
        raise WireError("the peer sent a line that is not JSON", cause=str(error)[:200]) from error
    if _SURROGATE.search(line):
        try:
            json.dumps(data, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise WireError("the peer sent a lone surrogate") from error
    return data


def _check_nesting(line: bytes) -> None:
    if line.count(b"[") + line.count(b"{") <= MAX_NESTING:
        return
    brackets = _STRING.sub(b"", line).translate(_ONLY_BRACKETS, _NOT_BRACKETS)
    for _ in range(MAX_NESTING):
        shallower = brackets.replace(b"[]", b"")
        if len(shallower) == len(brackets):
            break
        brackets = shallower
    if brackets:
        raise WireError(
            "the peer sent JSON that is nested too deep or unbalanced", cause=f"{MAX_NESTING} levels allowed"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise WireError("the peer sent an object with a duplicate key")
    return made


def _constant(name: str) -> NoReturn:
    raise WireError(f"the peer sent `{name}`, which is not JSON")


def _integer(digits: str) -> int:
    if len(digits) <= 20:
        value = int(digits)
        if -(1 << 63) <= value < (1 << 64):
            return value
    raise WireError("the peer sent an integer beyond 64 bits")


def _float(digits: str) -> float:
    value = float(digits)
    if value - value != 0:
        raise WireError("the peer sent a number that is out of range")
    return value
