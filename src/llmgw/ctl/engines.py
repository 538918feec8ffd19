"""`llmgw ctl engines`: which engines are wanted, and how they are on each node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmgw.ctl.output import Look, listing, output_option, watch_option
from llmgw.ctl.session import Session, connection, for_each
from llmgw.ctl.tables import Cell, render, shown, state_cell
from llmgw.ctl.text import escape


@click.group(invoke_without_command=True)
@output_option
@watch_option
@connection
@click.pass_context
def engines(context: click.Context, output: str, watch: bool) -> None:
    """List engines: the wanted version, and what each node says about its own."""
    if context.invoked_subcommand is None:
        session: Session = context.obj
        listing(session, output, watch, lambda: session.client().get("engines"), draw)


@engines.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--engine", metavar="NAME", help="Only this engine's files.")
@click.option("--version", metavar="VERSION", help="Only this version's files.")
@click.option("--asset", "globs", multiple=True, metavar="GLOB", help="These files, fetched first when need be.")
@connection
@click.pass_obj
def export(session: Session, file: Path, engine: str | None, version: str | None, globs: tuple[str, ...]) -> None:
    """Write the archives the server keeps into one bundle FILE with its SHA256SUMS, for a closed network."""
    from llmgw.ctl import bundle

    client = session.client()
    listed = client.get("releases").get("releases") or []
    chosen = bundle.choose(listed, engine, version, globs)
    bundle.write(file, chosen, client, session.clock, lambda words: click.echo(escape(words), err=True))
    click.echo(f"{escape(str(file))}: {len(chosen)} files")


@engines.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE...")
@click.option("--engine", metavar="NAME", help="For archives that are no bundle: the engine they belong to.")
@click.option("--version", metavar="VERSION", help="For archives that are no bundle: their version.")
@connection
@click.pass_obj
def import_(session: Session, files: tuple[Path, ...], engine: str | None, version: str | None) -> None:
    """Give the server bundles made by `export`, or plain archives; agents get them with the source `server`."""
    from llmgw.ctl import bundle

    client = session.client()
    for release in bundle.read(files, engine, version):
        changed = bundle.upload(release, client, lambda words: click.echo(escape(words), err=True))
        state = "imported" if changed else "was there already"
        click.echo(f"{escape(release.engine)} {escape(release.version)}: {len(release.files)} files, {state}")


@engines.command("recheck")
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@connection
@click.pass_obj
def recheck(session: Session, names: tuple[str, ...]) -> None:
    """Let nodes look at every engine again now, every byte of it, and try again what failed."""

    def one(name: str) -> None:
        answer = session.client().post("nodes", name, "recheck", body={})
        click.echo(f"{escape(name)}: {escape(shown(answer.get('words')))}")

    for_each(names, one)


def draw(data: dict[str, Any], look: Look) -> list[str]:
    """The table: a row per engine and node, and one for an engine that is wanted but reported by none."""
    wanted = {spec.get("name"): spec for spec in data.get("wanted") or ()}
    found = data.get("engines") or []
    rows: list[list[Cell | str | None]] = []
    for engine in sorted(found, key=lambda e: (str(e.get("name")), str(e.get("node_id")))):
        spec = wanted.get(engine.get("name"))
        row = [engine.get("name"), "" if spec is None else spec.get("version"), engine.get("node_id")]
        row += [engine.get("version"), state_cell(shown(engine.get("state")))]
        if look.wide:
            row += [engine.get("build"), look.ago(engine.get("since")), look.until(engine.get("next_try"))]
            row += [engine.get("presence")]
        rows.append([*row, engine.get("words")])
    reported = {engine.get("name") for engine in found}
    for name, spec in wanted.items():
        if name not in reported:
            selector = ", ".join(f"{k}={v}" for k, v in (spec.get("node_selector") or {}).items())
            words = f"wanted on nodes with {selector}, reported by none" if selector else "wanted, reported by no node"
            rows.append([name, spec.get("version"), *[""] * (7 if look.wide else 3), words])
    if not rows:
        return ["no engine is wanted, and no node has one"]
    headers = ["ENGINE", "WANTED", "NODE", "VERSION", "STATE"]
    headers += ["BUILD", "SINCE", "NEXT TRY", "PRESENCE"] if look.wide else []
    return render([*headers, "WORDS"], rows, columns=look.columns, colour=look.colour)
