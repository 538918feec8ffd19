"""`llmgw ctl usage`: what clients used, by key, model and day."""

from __future__ import annotations

from typing import Any

import click

from llmgw.ctl.output import Look, listing, output_option, watch_option
from llmgw.ctl.session import Session, connection
from llmgw.ctl.tables import Cell, render

_BY = ("key", "model", "day")


@click.command()
@click.option("--by", multiple=True, type=click.Choice(_BY), help="Sum up by this; may be given several times.")
@click.option("--since", metavar="DAY", help="First day, such as `2026-01-31`; 30 days ago when left out.")
@click.option("--until", metavar="DAY", help="Last day; today when left out. Days are UTC.")
@output_option
@watch_option
@connection
@click.pass_obj
def usage(
    session: Session, by: tuple[str, ...], since: str | None, until: str | None, output: str, watch: bool
) -> None:
    """Show requests and tokens, as the engines counted them.

    BROKEN OFF: answers that a client or an engine ended early, and PARTIAL the tokens they had sent by then, which are
    not in COMPLETION. UNKNOWN: answers whose engine told no tokens.
    """
    asked = [f"by={','.join(dict.fromkeys(by)) or 'key,model'}"]
    asked += [f"{name}={value}" for name, value in (("since", since), ("until", until)) if value]
    listing(session, output, watch, lambda: session.client().get("usage", query="&".join(asked)), draw)


def draw(data: dict[str, Any], look: Look) -> list[str]:
    """The table."""
    by = [name for name in data.get("by") or () if name in _BY]
    columns = ("requests", "prompt", "completion", "partial_requests", "partial_completion", "unknown_requests")
    rows: list[list[Cell | str | None]] = [
        [*(str(row.get(name) or "(no key)") for name in by), *(str(row.get(name, "")) for name in columns)]
        for row in data.get("usage") or ()
        if isinstance(row, dict)
    ]
    if not rows:
        return [f"no usage from {data.get('since')} until {data.get('until')}"]
    heads = ["REQUESTS", "PROMPT", "COMPLETION", "BROKEN OFF", "PARTIAL", "UNKNOWN"]
    return render([*(name.upper() for name in by), *heads], rows, columns=look.columns, colour=look.colour)
