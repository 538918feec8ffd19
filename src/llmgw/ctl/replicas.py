"""`llmgw ctl replicas` and `llmgw ctl logs`."""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import quote

import click

from llmgw.ctl.output import Look, listing, output_option, stop_unless_read, watch_option
from llmgw.ctl.session import Session, connection
from llmgw.ctl.tables import Cell, render, shown, state_cell
from llmgw.ctl.text import escape
from llmgw.errors import ApiError, Unreachable, UsageError

_FOLLOW_S = 0.5
# who is asked may come back: following goes on
_AWAY = ("control-away", "node-away")


@click.command()
@output_option
@watch_option
@connection
@click.pass_obj
def replicas(session: Session, output: str, watch: bool) -> None:
    """List replicas: where they run and what their nodes say about them."""
    listing(session, output, watch, lambda: session.client().get("replicas"), draw)


def draw(data: dict[str, Any], look: Look) -> list[str]:
    """The table: a row per replica, and one for how its last process ended."""
    rows: list[list[Cell | str | None]] = []
    for replica in data.get("replicas") or ():
        state = shown(replica.get("state"))
        # a replica without a place has no node, which is known
        row = [
            replica.get("replica_id"),
            replica.get("node_id") or "",
            state_cell(state),
            look.ago(replica.get("since")),
        ]
        if look.wide:
            row += _wide(replica, look)
        words = replica.get("words") or ""
        rows.append([*row, words])
        ended = replica.get("exit_words")
        if ended and ended not in words:
            rows.append([*row, ended])
    if not rows:
        return ["no replica: apply a profile with `llmgw ctl apply -f FILE`"]
    headers = ["REPLICA", "NODE", "STATE", "SINCE"]
    if look.wide:
        headers += ["PROFILE", "ENGINE", "ADDRESS", "PID", "SLOTS", "CONTEXT", "RESTARTS", "EPOCH", "NEXT TRY"]
    return render([*headers, "WORDS"], rows, columns=look.columns, colour=look.colour)


def _wide(replica: dict[str, Any], look: Look) -> list[Cell | str | None]:
    host, port = replica.get("host"), replica.get("port")
    numbers = [replica.get(name) for name in ("pid", "slots", "context", "restarts", "epoch")]
    return [
        replica.get("profile"),
        f"{replica.get('engine') or '?'} {replica.get('engine_version') or '?'}",
        "" if host is None or port is None else f"{host}:{port}",
        *(None if number is None else str(number) for number in numbers),
        look.until(replica.get("next_try")),
    ]


@click.command()
@click.argument("replica")
@click.option("-n", "--lines", type=click.IntRange(1, 100_000), default=100, show_default=True, help="How many lines.")
@click.option("-f", "--follow", is_flag=True, help="Go on with each line as it is written, until interrupted.")
@click.option("--previous", is_flag=True, help="Of the run before this one, such as one that crashed.")
@connection
@click.pass_obj
def logs(session: Session, replica: str, lines: int, follow: bool, previous: bool) -> None:
    """Show the last lines the engine of REPLICA (such as `qwen3-8b#0`) wrote."""
    if follow and previous:
        raise UsageError("`--follow` and `--previous` do not go together", hint="the previous run writes no more")
    client = session.client()
    query = f"lines={lines}" + ("&previous=true" if previous else "")
    data = client.get("replicas", replica, "logs", query=query)
    _show(data)
    said = ""
    while follow:
        cursor = data.get("cursor")
        if not isinstance(cursor, str) or not cursor:
            raise UsageError("the node's agent cannot be followed", cause="it is of an older version")
        if not data.get("more"):
            session.clock.wait(threading.Event(), _FOLLOW_S)
        stop_unless_read()
        try:
            data = client.get("replicas", replica, "logs", query=f"lines={lines}&cursor={quote(cursor, safe='')}")
            said = ""
        except ApiError as error:
            if not isinstance(error, Unreachable) and error.code not in _AWAY:
                raise
            if error.words() != said:  # once
                said = error.words()
                click.echo(f"error: {escape(said)}", err=True)
            data = {"cursor": cursor}
            continue
        if data.get("missed_bytes"):
            click.echo(f"({data['missed_bytes']} bytes were rotated away before they could be read)", err=True)
        if data.get("new_run"):
            click.echo("(the engine was started anew)", err=True)
        _show(data)


def _show(data: dict[str, Any]) -> None:
    for line in data.get("lines") or ():
        click.echo(escape(str(line).rstrip("\r\n")))
