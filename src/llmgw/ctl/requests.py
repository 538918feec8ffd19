"""`llmgw ctl requests`: what the gateways are doing, live with `-f`."""

from __future__ import annotations

import threading
from typing import Any

import click

from llmgw.ctl.output import Look, as_text, look, output_option, stop_unless_read
from llmgw.ctl.session import Session, connection
from llmgw.ctl.tables import Cell, render, shown
from llmgw.ctl.text import escape
from llmgw.errors import LlmgwError

_PAUSE_S = 1.0
_FIRST_S = 1.5


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C: a line when a request is seen, and at its end.")
@output_option
@connection
@click.pass_obj
def requests(session: Session, follow: bool, output: str) -> None:
    """Show the requests under way; with -f also every request as it ends. Never prompts, answers or keys."""
    data = session.client().get("requests")
    if follow:
        try:
            _follow(session, data.get("seq", 0), output)
        except KeyboardInterrupt:
            return
    # the gateways tell only while somebody looks: the second look sees what the first one asked for
    session.clock.wait(threading.Event(), _FIRST_S)
    data = {"open": _objects(session.client().get("requests"), "open")}
    click.echo(as_text(data, output, draw, look(output, session.clock.now())))


def draw(data: dict[str, Any], how: Look) -> list[str]:
    """The table: a row per request under way."""
    rows: list[list[Cell | str | None]] = [
        [
            _raw(item, "id"),
            _raw(item, "key"),
            _raw(item, "model"),
            _where(item),
            f"{_raw(item, 'ms')} ms",
            _raw(item, "events"),
        ]
        for item in _objects(data, "open")
    ]
    if not rows:
        return ["no request is under way"]
    heads = ["REQUEST", "KEY", "MODEL", "WHERE", "FOR", "EVENTS"]
    return render(heads, rows, columns=how.columns, colour=how.colour)


def _follow(session: Session, after: int, output: str) -> None:
    """Print a line per request that is seen under way, goes from the queue to a replica, or has ended."""
    seen: dict[str, str] = {}
    said, never = "", threading.Event()
    while True:
        session.clock.wait(never, _PAUSE_S)
        stop_unless_read()
        try:
            data = session.client().get("requests", query=f"after={after}")
            if data.get("seq", after) < after:  # another server process: it counts from the beginning
                data = session.client().get("requests")
            said = ""
        except LlmgwError as error:
            if error.words() != said:
                said = error.words()
                click.echo(f"error: {escape(said)}", err=True)
            continue
        after = data.get("seq", after)
        under_way = {}
        for item in _objects(data, "open"):
            name = _raw(item, "id")
            under_way[name] = _where(item)
            if seen.get(name) != under_way[name]:
                click.echo(_line(item, output, "open", _open(item)))
        seen = under_way
        for item in _objects(data, "ended"):
            click.echo(_line(item, output, "ended", _ended(item)))


def _line(item: dict[str, Any], output: str, kind: str, words: str) -> str:
    if output in ("table", "wide"):
        return words
    return as_text({"kind": kind, **item}, output, draw, look(output, 0.0))


def _objects(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [item for item in data.get(name) or () if isinstance(item, dict)]


def _where(item: dict[str, Any]) -> str:
    return f"{_raw(item, 'replica')} on {_raw(item, 'node')}" if item.get("replica") else "queued"


def _open(item: dict[str, Any]) -> str:
    return escape(
        f"open  {_raw(item, 'id')}  {_raw(item, 'key')}  {_raw(item, 'model')}  {_where(item)}  "
        f"{_raw(item, 'ms')} ms, {_raw(item, 'events')} events so far"
    )


def _ended(item: dict[str, Any]) -> str:
    if item.get("code"):
        what = f"{_raw(item, 'path')}  refused: {_raw(item, 'code')}"
        return escape(f"{_raw(item, 'status')}   {_raw(item, 'id')}  {_raw(item, 'key')}  {what}")
    counts = [item.get("prompt"), item.get("completion")]
    tokens = "+".join(map(shown, counts)) + " tokens" if counts != [None, None] else "tokens not told"
    if item.get("partial"):
        tokens += " (broken off)"
    where = f"{_raw(item, 'replica')} on {_raw(item, 'node')} ({_raw(item, 'why') or '-'})"
    return escape(
        f"{_raw(item, 'status')}   {_raw(item, 'id')}  {_raw(item, 'key')}  {_raw(item, 'model')}  "
        f"{where if item.get('replica') else 'no replica was asked'}  {_raw(item, 'ms')} ms, "
        f"queued {_raw(item, 'queue_ms')} ms  {tokens}"
    )


def _raw(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    return "-" if value is None else str(value)
