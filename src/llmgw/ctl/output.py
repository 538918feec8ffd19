"""How a listing is shown: table, wide, JSON or YAML, once or again whenever it changes."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import click
from attrs import frozen

from llmgw.ctl.session import Session
from llmgw.ctl.text import escape, escape_json, has_unprintable
from llmgw.errors import LlmgwError, Unreachable
from llmgw.units import format_duration, format_size

F = TypeVar("F", bound=Callable[..., Any])

WATCH_EVERY_S = 2.0


@frozen
class Look:
    """How to draw.

    Args:
        wide: more columns, nothing wrapped.
        columns: width of the terminal, None when it is none.
        colour: ANSI colours are wanted.
        now: seconds since the epoch, for ages.
    """

    wide: bool
    columns: int | None
    colour: bool
    now: float

    def ago(self, at: Any) -> str | None:
        """How long ago a time was; None when it is unknown."""
        return format_duration(max(0, int(self.now - at))) if isinstance(at, int | float) else None

    def until(self, at: Any) -> str:
        """How long until a time; "" when there is none."""
        return f"in {format_duration(max(0, int(at - self.now)))}" if isinstance(at, int | float) else ""


def size(count: Any) -> str | None:
    """Bytes in words; None when unknown."""
    return format_size(count) if isinstance(count, int) else None


def output_option(command: F) -> F:
    """Give a command `-o table|wide|json|yaml`."""
    kinds = click.Choice(["table", "wide", "json", "yaml"])
    return click.option("-o", "--output", type=kinds, default="table", help="How to print it.")(command)


def watch_option(command: F) -> F:
    """Give a command `-w/--watch`."""
    return click.option("-w", "--watch", is_flag=True, help="Print it again whenever it changes, until Ctrl-C.")(
        command
    )


def listing(
    session: Session,
    output: str,
    watch: bool,
    fetch: Callable[[], Any],
    draw: Callable[[Any, Look], list[str]],
) -> None:
    """Fetch, draw and print; with `watch` again and again until interrupted.

    Args:
        fetch: gets the data of the admin API.
        draw: makes the lines of `table` and `wide`; text in them is already escaped.
    """
    if not watch:
        click.echo(as_text(fetch(), output, draw, look(output, session.clock.now())))
        return
    last = ""
    never = threading.Event()
    terminal = sys.stdout.isatty()
    try:
        while True:
            try:
                shown = as_text(fetch(), output, draw, look(output, session.clock.now()))
            except LlmgwError as error:  # it may come back: watching goes on
                if not last and not isinstance(error, Unreachable):
                    raise
                shown = f"error: {escape(error.words())}"
            if shown != last:
                click.echo(("\x1b[H\x1b[2J" if terminal else "") + shown)
                last = shown
            session.clock.wait(never, WATCH_EVERY_S)
            stop_unless_read()
    except KeyboardInterrupt:
        return


def stop_unless_read() -> None:
    """End what goes on for ever once nobody reads it any more, as in `… | head -1`.

    Raises:
        BrokenPipeError: standard output is a pipe whose reader has left.
    """
    try:
        poll, number = select.poll(), sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return  # not a file: somebody collects it in this process
    poll.register(number, 0)
    if any(what & select.POLLERR for _, what in poll.poll(0)):
        raise BrokenPipeError


def as_text(data: Any, output: str, draw: Callable[[Any, Look], list[str]], how: Look) -> str:
    """The data in one of the four forms."""
    if output == "json":
        import json

        return escape_json(json.dumps(data, indent=2, ensure_ascii=False))
    if output == "yaml":
        import yaml

        # PyYAML writes direction marks raw unless everything beyond ASCII is escaped
        text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=not has_unprintable(data), width=1 << 30)
        return text.rstrip("\n")
    return "\n".join(draw(data, how))


def look(output: str, now: float) -> Look:
    """How this terminal, or file, is to be drawn on."""
    terminal = sys.stdout.isatty()
    columns: int | None = None
    if output != "wide":
        written = os.environ.get("COLUMNS", "")
        if written.isdecimal() and int(written) > 0:
            columns = int(written)
        elif terminal:
            columns = os.get_terminal_size(sys.stdout.fileno()).columns or 80
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Look(output == "wide", columns, colour, now)
