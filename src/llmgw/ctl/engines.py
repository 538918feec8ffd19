"""`llmgw ctl engines`: which engines are wanted, and how they are on each node."""

from __future__ import annotations

from typing import Any

import click

from llmgw.ctl.output import Look, listing, output_option, watch_option
from llmgw.ctl.session import Session, connection
from llmgw.ctl.tables import Cell, render, shown, state_cell


@click.command()
@output_option
@watch_option
@connection
@click.pass_obj
def engines(session: Session, output: str, watch: bool) -> None:
    """List engines: the wanted version, and what each node says about its own."""
    listing(session, output, watch, lambda: session.client().get("engines"), draw)


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
