"""`llmgw ctl keys`: the API keys of clients."""

from __future__ import annotations

from typing import Any

import click

from llmgw.ctl.output import Look, listing, output_option, watch_option
from llmgw.ctl.session import Session, connection, for_each
from llmgw.ctl.tables import Cell, render
from llmgw.ctl.text import escape
from llmgw.errors import ApiError, UsageError
from llmgw.units import parse_duration

_LONGEST_S = 100 * 365 * 86400.0


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
        [
            key.get("name"),
            look.ago(key.get("created")),
            ", ".join(key.get("models") or ()) or "all",
            _limit(key.get("rpm")),
            _limit(key.get("tpm")),
            _end(key.get("expires"), look),
        ]
        for key in data.get("keys") or ()
    ]
    if not rows:
        return ["no key: make one with `llmgw ctl keys create NAME`"]
    return render(["KEY", "AGE", "MODELS", "RPM", "TPM", "EXPIRES"], rows, columns=look.columns, colour=look.colour)


def _end(expires: Any, look: Look) -> Cell:
    if isinstance(expires, int | float) and expires <= look.now:
        return Cell(f"expired {look.ago(expires)} ago", "red")
    return Cell(look.until(expires) or "never")


def _limit(value: Any) -> str:
    return str(value) if isinstance(value, int) else "none"


@keys.command()
@click.argument("name")
@click.option("-m", "--models", multiple=True, metavar="MODEL[,MODEL]", help="Models it may use; all when left out.")
@click.option("--rpm", type=click.IntRange(min=1), help="Requests a minute; no limit when left out.")
@click.option("--tpm", type=click.IntRange(min=1), help="Tokens a minute; no limit when left out.")
@click.option("--expires", metavar="DURATION", help="Refused after this time, such as `30d`; never when left out.")
@connection
@click.pass_obj
def create(
    session: Session, name: str, models: tuple[str, ...], rpm: int | None, tpm: int | None, expires: str | None
) -> None:
    """Make a key and print it: standard output gets the key and nothing else."""
    allowed = [model.strip() for given in models for model in given.split(",") if model.strip()]
    limits: dict[str, float | int] = {}
    if rpm is not None:
        limits["rpm"] = rpm
    if tpm is not None:
        limits["tpm"] = tpm
    if expires is not None:
        lasting = parse_duration(expires)
        if not 0 < lasting <= _LONGEST_S:
            raise UsageError(f"a key cannot expire after `{expires}`", hint="write `30d`, or leave it out for never")
        limits["expires"] = session.clock.now() + lasting
    warnings = _useless(session.client().get("profiles"), allowed) if allowed else []
    made = session.client().post("keys", body={"name": name, "models": allowed, **limits})
    key = made.get("key")
    if not isinstance(key, str) or not key:
        raise ApiError(f"the server made no key for `{name}`", hint="look with `llmgw ctl keys list`")
    click.echo(escape(key))
    click.echo(f"key `{escape(name)}` was made; it is not shown again", err=True)
    if made.get("warning"):
        warnings.append(str(made["warning"]))
    for words in warnings:
        click.echo(f"warning: {escape(words)}", err=True)


def _useless(data: dict[str, Any], allowed: list[str]) -> list[str]:
    """What is to be said about models this key is limited to and that nobody serves under that name."""
    profiles = [entry.get("profile") or {} for entry in data.get("profiles") or ()]
    names = {profile.get("name") for profile in profiles}
    aliases = {alias: profile.get("name") for profile in profiles for alias in profile.get("aliases") or ()}
    return [
        f"`{model}` is an alias of `{aliases[model]}`: a key is limited by the model's own name"
        if model in aliases
        else f"there is no profile `{model}`: the key opens nothing by it until there is one"
        for model in allowed
        if model not in names
    ]


@keys.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@connection
@click.pass_obj
def delete(session: Session, names: tuple[str, ...]) -> None:
    """Delete keys; requests with them are refused from then on."""

    def one(name: str) -> None:
        session.client().delete("keys", name)
        click.echo(f"{escape(name)}: deleted")

    for_each(names, one)
