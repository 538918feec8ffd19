"""`llmgw ctl keys`: the API keys of clients."""

from __future__ import annotations

from typing import Any

import click

from llmgw.ctl.output import Look, listing, output_option, watch_option
from llmgw.ctl.session import Session, connection
from llmgw.ctl.tables import Cell, render
from llmgw.ctl.text import escape
from llmgw.errors import ApiError


@click.group()
@connection
def keys() -> None:
    """Create, list and delete the API keys clients send."""


@keys.command("list")
@output_option
@watch_option
@connection
@click.pass_obj
def list_keys(session: Session, output: str, watch: bool) -> None:
    """List keys by name; a key itself is shown only once, when it is made."""
    listing(session, output, watch, lambda: session.client().get("keys"), draw)


def draw(data: dict[str, Any], look: Look) -> list[str]:
    """The table."""
    rows: list[list[Cell | str | None]] = [
        [key.get("name"), look.ago(key.get("created")), ", ".join(key.get("models") or ()) or "all"]
        for key in data.get("keys") or ()
    ]
    if not rows:
        return ["no key: make one with `llmgw ctl keys create NAME`"]
    return render(["KEY", "AGE", "MODELS"], rows, columns=look.columns, colour=look.colour)


@keys.command()
@click.argument("name")
@click.option("-m", "--models", multiple=True, metavar="MODEL[,MODEL]", help="Models it may use; all when left out.")
@connection
@click.pass_obj
def create(session: Session, name: str, models: tuple[str, ...]) -> None:
    """Make a key and print it: standard output gets the key and nothing else."""
    allowed = [model.strip() for given in models for model in given.split(",") if model.strip()]
    made = session.client().post("keys", body={"name": name, "models": allowed})
    key = made.get("key")
    if not isinstance(key, str) or not key:
        raise ApiError(f"the server made no key for `{name}`", hint="look with `llmgw ctl keys list`")
    click.echo(escape(key))
    click.echo(f"key `{escape(name)}` was made; it is not shown again", err=True)


@keys.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@connection
@click.pass_obj
def delete(session: Session, names: tuple[str, ...]) -> None:
    """Delete keys; requests with them are refused from then on."""
    for name in names:
        session.client().delete("keys", name)
        click.echo(f"{escape(name)}: deleted")
