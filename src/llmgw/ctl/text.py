"""Text from elsewhere, made safe and measured: nodes, clients and files decide what stands in it."""

from __future__ import annotations

import unicodedata
from typing import Any


def escape(text: str) -> str:
    """`text` with everything a terminal could obey written out as `\\x1b`, `\\u202e`, …

    Control characters, direction marks, zero-width and private characters and line breaks are escaped; all else is
    letter for letter what it was.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _written(c) for c in text)


def _written(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def escape_json(text: str) -> str:
    """JSON text (its own line breaks kept) with the same characters as JSON escapes: it still reads back the same."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(c if c == "\n" or c.isprintable() else _json_written(c) for c in text)


def _json_written(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def has_unprintable(value: Any) -> bool:
    """Whether any string in plain data holds a character that `escape` would write out, line breaks apart."""
    if isinstance(value, str):
        return not value.replace("\n", "").isprintable()
    if isinstance(value, dict):
        return any(has_unprintable(k) or has_unprintable(v) for k, v in value.items())
    return isinstance(value, list) and any(has_unprintable(item) for item in value)


def width(text: str) -> int:
    """Columns `text` takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def wrap(text: str, columns: int) -> list[str]:
    """Lines of at most `columns`, broken at single spaces only: joined by spaces they are `text` again.

    A word longer than `columns` stands on a line of its own, whole.
    """
    lines: list[str] = []
    current: str | None = None
    for word in text.split(" "):
        if current is None:
            current = word
        elif width(current) + 1 + width(word) <= columns:
            current += " " + word
        else:
            lines.append(current)
            current = word
    return [*lines, current or ""]
