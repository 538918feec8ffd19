"""`llmgw ctl status`: the server itself."""

from __future__ import annotations

from typing import Any

import click

from llmgw.ctl.output import Look, listing, output_option, watch_option
from llmgw.ctl.session import Session, connection
from llmgw.ctl.tables import Cell, pairs, render, shown


@click.command()
@output_option
@watch_option
@connection
@click.pass_obj
def status(session: Session, output: str, watch: bool) -> None:
    """Show the server, its gateways and what they are doing."""
    listing(session, output, watch, lambda: session.client().get("status"), draw)


def draw(data: dict[str, Any], look: Look) -> list[str]:
    """The server's own values, then its gateways."""
    started = look.ago(data.get("started"))
    items: list[tuple[str, Cell | str | None]] = [
        ("Server", data.get("server_id")),
        ("llmgw", data.get("version")),
        ("Started", None if started is None else f"{started} ago"),
        ("Epoch", _plain(data.get("epoch"))),
        ("Nodes", _plain(data.get("nodes"))),
        ("Models", _plain(data.get("models"))),
    ]
    items += [
        (str(item.get("key")), Cell(str(item.get("words")), "red" if item.get("worry") else ""))
        for item in data.get("certificates") or ()
    ]
    lines = pairs(items, columns=look.columns, colour=look.colour)
    gateways = data.get("gateways")
    if not gateways:
        return [*lines, "", "no gateway is connected: clients get no answer" if gateways is not None else "gateways: ?"]
    rows: list[list[Cell | str | None]] = [
        [*(_plain(gateway.get(name)) for name in ("pid", "listen", "version", "requests", "in_flight"))]
        for gateway in gateways
    ]
    return [
        *lines,
        "",
        *render(
            ["GATEWAY", "LISTEN", "VERSION", "REQUESTS", "IN FLIGHT"], rows, columns=look.columns, colour=look.colour
        ),
    ]


def _plain(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(count)}" for name, count in value.items()) or "0"
    return str(len(value)) if isinstance(value, list) else shown(value)
