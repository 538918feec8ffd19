"""`llmgw ctl offboard NODE…`: undoes what onboarding did."""

from __future__ import annotations

import os
from typing import Any

import click

from llmgw.ctl.onboard import ssh_options
from llmgw.ctl.session import Session


@click.command("offboard")
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True)
@click.option("--purge", is_flag=True, help="Remove engines and weights too.")
@ssh_options
@click.pass_obj
def offboard(session: Session, /, nodes: tuple[str, ...], purge: bool, **given: Any) -> None:
    """Stop the agent and its engines on nodes and remove llmgw from them.

    NODE is the id of a node that was onboarded from here, or `user@host`. Its certificate stays valid until it is
    revoked (`llmgw ctl cert revoke`).
    """
    from llmgw.ctl.onboarding import scripts
    from llmgw.ctl.onboarding.lines import Lines
    from llmgw.ctl.onboarding.look import look
    from llmgw.ctl.onboarding.record import Entry, Records
    from llmgw.ctl.onboarding.remote import Remote
    from llmgw.system.commands import RealRunner

    records, lines = Records(os.environ), Lines(list(nodes))
    for name in nodes:
        entry = (
            Entry("", name, given["ssh_config"], given["port"], given["identity"]) if "@" in name else records.get(name)
        )
        remote = Remote(entry.target, entry.options(), RealRunner(), os.environ)
        tell, began = lines.teller(name), session.clock.monotonic()
        tell("offboard", "", None)
        remote.sudo = look(remote).root == "sudo"
        remote.run(scripts.REMOVE, "purge" if purge else "keep", timeout_s=300)
        known = [each for each in records.all() if each.target == entry.target]
        for each in known:
            records.forget(each.node_id)
        tell("offboard", "the agent, its engines and llmgw are gone from it", session.clock.monotonic() - began)
