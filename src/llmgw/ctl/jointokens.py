"""`llmgw ctl join-token`: let a node join that has no certificate yet."""

from __future__ import annotations

import click

from llmgw.ctl.session import Session, connection
from llmgw.ctl.text import escape
from llmgw.errors import ApiError, UnitError, UsageError
from llmgw.units import format_duration, parse_duration


@click.group("join-token")
@connection
def join_token() -> None:
    """Let a new node join without carrying a certificate to it."""


@join_token.command()
@click.option("--node", metavar="ID", help="Good for this node only; for any new one when left out.")
@click.option("--ttl", default="1h", show_default=True, help="Good for so long.")
@click.option("--address", metavar="HOST[:PORT]", help="What the agent dials; a name of the server's certificate.")
@connection
@click.pass_obj
def create(session: Session, node: str | None, ttl: str, address: str | None) -> None:
    """Print one line for `llmgw agent join`; it is good for one node, once."""
    try:
        ttl_s = parse_duration(ttl)
    except UnitError as error:
        raise UsageError(error.message, hint=error.hint) from error
    body = {"ttl_s": ttl_s, "node_id": node, "address": address}
    made = session.client().post("join-tokens", body={key: value for key, value in body.items() if value is not None})
    line = made.get("line")
    if not isinstance(line, str) or not line:
        raise ApiError("the server made no join token")
    click.echo(escape(line))
    whom = f"node `{escape(node)}`" if node else "any new node"
    click.echo(f"good for {whom}, once, for {format_duration(ttl_s)}; it is not shown again", err=True)
    click.echo("on the node: `llmgw agent join`, then paste it (on a command line others could read it)", err=True)
