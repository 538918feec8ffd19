"""`llmgw ctl requests`: what the gateways are doing, live with `-f`."""

from __future__ import annotations

import threading
from typing import Any

import click

from llmgw.ctl.session import Session, connection
from llmgw.ctl.text import escape

_PAUSE_S = 1.0


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on: a line for every request that ends, until Ctrl-C.")
@connection
@click.pass_obj
def requests(session: Session, follow: bool) -> None:
    """Show the requests under way; with -f every request as it ends. Never prompts, answers or keys."""
    data = session.client().get("requests")
    if not follow:
        # the gateways tell only while somebody looks: the second look sees what the first one asked for
        session.clock.wait(threading.Event(), 1.5)
        data = session.client().get("requests")
        for item in _objects(data, "open"):
            click.echo(_open(item))
        if not data.get("open"):
            click.echo("no request is under way", err=True)
        return
    after = data.get("seq", 0)
    while True:
        session.clock.wait(threading.Event(), _PAUSE_S)
        data = session.client().get("requests", query=f"after={after}")
        after = data.get("seq", after)
        for item in _objects(data, "ended"):
            click.echo(_ended(item))


def _objects(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [item for item in data.get(name) or () if isinstance(item, dict)]


def _open(item: dict[str, Any]) -> str:
    where = f"{_said(item, 'replica')} on {_said(item, 'node')}" if item.get("replica") else "queued"
    return (
        f"{_said(item, 'id')}  {_said(item, 'key')}  {_said(item, 'model')}  {where}  {_said(item, 'ms')} ms  "
        f"{_said(item, 'events')} events"
    )


def _ended(item: dict[str, Any]) -> str:
    tokens = f"{_said(item, 'prompt')}+{_said(item, 'completion')} tokens"
    if item.get("partial"):
        tokens += " (broken off)"
    return (
        f"{_said(item, 'status')}  {_said(item, 'id')}  {_said(item, 'key')}  {_said(item, 'model')}  "
        f"{_said(item, 'replica')} on {_said(item, 'node')} ({_said(item, 'why') or '-'})  {_said(item, 'ms')} ms, "
        f"queued {_said(item, 'queue_ms')} ms  {tokens}"
    )


def _said(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    return "-" if value is None else escape(str(value))
