"""`llmgw ctl weights`: model files on the nodes."""

from __future__ import annotations

from typing import Any

import click

from llmgw.ctl.output import Look, listing, output_option, size, watch_option
from llmgw.ctl.session import Session, connection, for_each
from llmgw.ctl.tables import Cell, render, shown, state_cell
from llmgw.ctl.text import escape
from llmgw.units import format_size


@click.group(invoke_without_command=True)
@output_option
@watch_option
@connection
@click.pass_context
def weights(context: click.Context, output: str, watch: bool) -> None:
    """List the models on each node, and what is being fetched."""
    if context.invoked_subcommand is None:
        session: Session = context.obj
        listing(session, output, watch, lambda: session.client().get("weights"), draw)


def draw(data: dict[str, Any], look: Look) -> list[str]:
    """The table."""
    rows: list[list[Cell | str | None]] = []
    for item in sorted(data.get("weights") or (), key=lambda i: (str(i.get("node_id")), str(i.get("path")))):
        complete = item.get("complete") or {}
        row: list[Cell | str | None] = [item.get("node_id"), item.get("path"), item.get("format")]
        row += [size(item.get("size_bytes") or None), state_cell(shown(complete.get("value")))]
        if look.wide:
            row += [item.get("fingerprint"), item.get("presence")]
        rows.append([*row, complete.get("words")])
    if not rows:
        return ["no node has reported a model"]
    headers = ["NODE", "MODEL", "FORMAT", "SIZE", "COMPLETE"]
    headers += ["FINGERPRINT", "PRESENCE"] if look.wide else []
    return render([*headers, "WORDS"], rows, columns=look.columns, colour=look.colour)


@weights.command("fetch")
@click.argument("source")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@connection
@click.pass_obj
def fetch(session: Session, source: str, nodes: tuple[str, ...]) -> None:
    """Let nodes fetch SOURCE (as in a profile's `model`) before a replica needs it. Returns at once."""

    def one(node: str) -> None:
        answer = session.client().post("nodes", node, "weights", body={"source": source})
        click.echo(f"{escape(node)}: {escape(str(answer.get('words') or 'asked for it'))}")

    for_each(nodes, one)


@weights.command("collect")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@connection
@click.pass_obj
def collect(session: Session, nodes: tuple[str, ...], yes: bool) -> None:
    """Remove fetched weights that no replica of NODE uses, after showing them."""
    client = session.client()
    for node in nodes:
        found = client.post("nodes", node, "weights", "collect", body={"dry": True}).get("files") or []
        if not found:
            click.echo(f"{escape(node)}: nothing is unused")
            continue
        for item in found:
            click.echo(f"{escape(node)}: {_line(item)}", err=not yes)
        total = format_size(sum(int(item.get("size_bytes") or 0) for item in found))
        if not yes:
            click.confirm(f"Remove {len(found)} of them ({total}) from {escape(node)}?", abort=True, err=True)
        gone = client.post("nodes", node, "weights", "collect", body={"dry": False}).get("files") or []
        freed = format_size(sum(int(item.get("size_bytes") or 0) for item in gone))
        click.echo(f"{escape(node)}: {len(gone)} removed, {freed} freed")


def _line(item: dict[str, Any]) -> str:
    return escape(f"{item.get('path')} ({size(item.get('size_bytes')) or '?'}): {item.get('what')}")
