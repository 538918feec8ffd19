"""One progress line for each machine: redrawn in place on a terminal, a line per change elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import click

from llmgw.ctl.text import escape


class Lines:
    """Thread-safe; `say` may be called for any of `names` at any time."""

    def __init__(self, names: list[str], *, terminal: bool | None = None) -> None:
        self._names = names
        self._words = dict.fromkeys(names, "waiting")
        self._width = max(map(len, names), default=0)
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._lock = threading.Lock()
        self._drawn = False

    def say(self, name: str, words: str, *, lasting: bool = True) -> None:
        """Show words.

        Args:
            lasting: False for words that only a terminal shows, until the next ones.
        """
        with self._lock:
            self._words[name] = words
            if self._terminal and len(self._names) > 1:
                self._draw()
            elif self._terminal and not lasting:
                click.echo(f"\r\x1b[K{name:{self._width}}  {self._fit(words)}", err=True, nl=False)
            elif lasting:
                click.echo(("\r\x1b[K" if self._terminal else "") + f"{name:{self._width}}  {escape(words)}", err=True)

    def teller(self, name: str) -> Callable[[str, str, float | None], None]:
        """What a stage tells for one machine."""

        def tell(stage: str, words: str, took_s: float | None) -> None:
            if took_s is None:
                self.say(name, f"{stage} …" if not words else f"{stage}: {words}", lasting=bool(words))
            else:
                self.say(name, f"{stage}: {words} ({took_s:.1f} s)")

        return tell

    def _fit(self, words: str) -> str:
        import shutil

        return escape(words)[: max(20, shutil.get_terminal_size().columns - self._width - 3)]

    def _draw(self) -> None:
        up = f"\x1b[{len(self._names)}A" if self._drawn else ""
        self._drawn = True
        rows = "".join(f"\x1b[K{name:{self._width}}  {self._fit(self._words[name])}\n" for name in self._names)
        click.echo(up + rows, err=True, nl=False)
