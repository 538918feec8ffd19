"""Showing what a start is doing: a bar that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
from typing import Any, TextIO

_WIDTH = 24


class Watch:
    """Prints each new sentence once; a running download as a bar.

    Args:
        out: where people look, usually stderr.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._tty = self._out.isatty()
        self._said: dict[str, str] = {}
        self._open_bar = False

    def line(self, text: str) -> None:
        """Print a line of its own."""
        self._end_bar()
        self._out.write(f"{clean(text)}\n")
        self._out.flush()

    def show(self, subject: str, words: str, progress: dict[str, Any] | None) -> None:
        """Show the state of `subject`. `progress` is `{"done_bytes": n, "total_bytes": n or None}` or None."""
        if progress and self._tty:
            self._bar(subject, words, progress)
            return
        said = self._step(words, progress)
        if self._said.get(subject) == said:
            return
        self._said[subject] = said
        self.line(f"{subject}: {words}")

    def _step(self, words: str, progress: dict[str, Any] | None) -> str:
        """What counts as news where nothing can be redrawn: another sentence, or another tenth of a download."""
        if not progress:
            return words
        total = progress.get("total_bytes")
        tenth = progress["done_bytes"] * 10 // total if total else progress["done_bytes"] // (10 << 20)
        return f"{words.split('(')[0]}{tenth}"

    def _bar(self, subject: str, words: str, progress: dict[str, Any]) -> None:
        total = progress.get("total_bytes")
        share = min(1.0, progress["done_bytes"] / total) if total else 0.0
        full = round(share * _WIDTH)
        bar = "#" * full + "-" * (_WIDTH - full)
        text = f"{subject}: [{bar}] {clean(words)}"
        self._out.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
        self._out.flush()
        self._open_bar = True
        self._said[subject] = ""

    def _end_bar(self) -> None:
        if self._open_bar:
            self._out.write("\n")
            self._open_bar = False


def clean(text: str) -> str:
    """Text from elsewhere without characters that steer a terminal."""
    return "".join(c if c.isprintable() or c == " " else "?" for c in text)
