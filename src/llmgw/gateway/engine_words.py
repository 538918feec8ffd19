"""What an engine said when it answered with an error."""

from __future__ import annotations

import msgspec


class _EngineError(msgspec.Struct):
    message: str = ""


class _EngineAnswer(msgspec.Struct):
    error: _EngineError | str | None = None


def engine_words(body: bytes) -> str:
    """The sentence in an engine's error answer, else the beginning of whatever it sent."""
    try:
        error = msgspec.json.decode(body, type=_EngineAnswer).error
    except (msgspec.DecodeError, RecursionError):
        return ascii(body[:200].decode("utf-8", "replace"))
    words = (error.message if isinstance(error, _EngineError) else error) or "no words"
    return "".join(each if each.isprintable() else " " for each in words[:500])
