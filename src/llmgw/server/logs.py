"""The server's log: one line an event on stderr, `time level room message`."""

from __future__ import annotations

import logging
import sys


class _Lines(logging.Formatter):
    """One event, one line: what nodes say cannot forge another line or steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        head, *rest = text.split("\n") if record.exc_info else (text,)
        return "\n".join([_clean(head), *(f"    {_clean(line)}" for line in rest)])


def _clean(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def log_to_stderr() -> None:
    """Log from `info` up to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
