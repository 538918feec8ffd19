"""`llmgw ctl events`: what happened lately, and what happens."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

import click

from llmgw.ctl.output import Look, as_text, look, output_option, stop_unless_read
from llmgw.ctl.session import Session, connection
from llmgw.ctl.tables import Cell, render, shown
from llmgw.ctl.text import escape
from llmgw.errors import LlmgwError

_WAIT_S = 10
_PAUSE_S = 2.0


@click.command()
@click.option("-n", "--number", type=click.IntRange(1, 5000), default=50, show_default=True, help="How many at most.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new ones as they happen, until Ctrl-C.")
@output_option
@connection
@click.pass_obj
def events(session: Session, number: int, follow: bool, output: str) -> None:
    """Show what happened: nodes that came and went, replicas that moved, profiles that changed.

    The server keeps the last 5000, over its restarts too.
    """
    data = session.client().get("events", query=f"limit={number}")
    now = session.clock.now()
    if not follow:
        click.echo(as_text(data, output, draw, look(output, now)))
        return
    try:
        _follow(session, data, output)
    except KeyboardInterrupt:
        return


def draw(data: dict[str, Any], how: Look) -> list[str]:
    """The table: a row per event, oldest first."""
    found = data.get("events") or ()
    if not found:
        return ["nothing has happened yet"]
    rows: list[list[Cell | str | None]] = [
        [how.ago(item.get("at")), item.get("kind"), item.get("subject") or "", item.get("words")] for item in found
    ]
    return render(["AGE", "KIND", "ABOUT", "WORDS"], rows, columns=how.columns, colour=how.colour)


def _follow(session: Session, data: dict[str, Any], output: str) -> None:
    """Print one line per event; a server that is away is waited for."""
    last, said, never = 0, "", threading.Event()
    while True:
        stop_unless_read()
        for item in data.get("events") or ():
            last = max(last, int(item.get("seq") or 0))
            click.echo(_line(item) if output in ("table", "wide") else as_text(item, output, draw, look(output, 0.0)))
        try:
            data, said = session.client().get("events", query=f"after={last}&wait={_WAIT_S}"), ""
        except LlmgwError as error:
            data = {}
            if error.words() != said:
                said = error.words()
                click.echo(f"error: {escape(said)}", err=True)
            session.clock.wait(never, _PAUSE_S)


def _line(item: dict[str, Any]) -> str:
    at = item.get("at")
    when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if isinstance(at, int | float) else "?"
    about = " ".join(part for part in (shown(item.get("kind")), str(item.get("subject") or "")) if part)
    return f"{when} {escape(about)}: {escape(shown(item.get('words')))}"
