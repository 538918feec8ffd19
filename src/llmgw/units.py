"""Bytes and durations, to words and back."""

from __future__ import annotations

import re

from llmgw.errors import UnitError

_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?)?B?")
_SIZE_UNITS = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "ki": 2**10, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def parse_duration(text: str) -> float:
    """Read `5s`, `1m30s`, `2h`, `250ms` into seconds.

    Raises:
        UnitError: anything else, bare numbers included (a number without a unit is a guess).
    """
    pos, total, seen = 0, 0.0, False
    stripped = text.strip()
    while pos < len(stripped):
        match = _DURATION_PART.match(stripped, pos)
        if match is None:
            seen = False
            break
        total += float(match[1]) * _DURATION_UNITS[match[2]]
        pos, seen = match.end(), True
    if not seen:
        raise UnitError(f"`{text}` is not a duration", hint="write a number with a unit, such as `5s`, `1m30s` or `2h`")
    return total


def format_duration(seconds: float) -> str:
    """Seconds as words, two units at most: `4s`, `1m30s`, `2h5m`, `3d4h`; `250ms` below one second."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 1:
        return f"{round(seconds * 1000)}ms" if seconds else "0s"
    whole = round(seconds)
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, whole = divmod(whole, size)
        if count:
            parts.append(f"{count}{name}")
        elif parts:
            break
        if len(parts) == 2:
            break
    return "".join(parts)


def parse_size(text: str) -> int:
    """Read `16MB`, `2GiB`, `512 KiB`, `100B` into bytes.

    Raises:
        UnitError: anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not re.search(r"[A-Za-z]", text):
        raise UnitError(f"`{text}` is not a size", hint="write a number with a unit, such as `16MB` or `2GiB`")
    return round(float(match[1]) * _SIZE_UNITS[match[2] or ""])


def format_size(count: int) -> str:
    """Bytes as words in decimal units: `512 B`, `16 MB`, `1.5 GB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
