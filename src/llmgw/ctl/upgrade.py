"""`llmgw ctl upgrade [NODE…]`: another release on nodes, one by one, engines undisturbed, rolled back by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from llmgw.ctl.onboard import await_node, cache_dir, nodes_of, release_options
from llmgw.ctl.session import Session
from llmgw.errors import LlmgwError, UsageError

if TYPE_CHECKING:
    from llmgw.ctl.onboarding.record import Entry
    from llmgw.ctl.onboarding.release import Releases


class UpgradeFailed(LlmgwError):
    """A node does not work with the new release; it is back on the old one, or the words say why not."""

    code = "upgrade-failed"


@click.command("upgrade")
@click.argument("nodes", metavar="[NODE...]", nargs=-1)
@click.option("--wait", "wait_s", default="60s", show_default=True, metavar="TIME",
              help="How long a new agent may take to report; then the old release comes back.")  # fmt: skip
@release_options
@click.pass_obj
def upgrade(session: Session, nodes: tuple[str, ...], source: str, version: str | None, wait_s: str) -> None:
    """Bring nodes to another release of llmgw, one after another; without NODE all that were onboarded from here.

    Engines go on while the agent is exchanged. A node whose new agent does not report to the server in time gets its
    old release back, and the upgrade stops there.
    """
    from llmgw.ctl.onboarding.lines import Lines
    from llmgw.ctl.onboarding.record import Records
    from llmgw.ctl.onboarding.release import Releases
    from llmgw.system.http import Http
    from llmgw.units import parse_duration

    records, patience_s = Records(os.environ), parse_duration(wait_s)
    entries = [records.get(name) for name in dict.fromkeys(nodes)] if nodes else records.all()
    if not entries:
        raise UsageError("no node was onboarded from here", hint="`llmgw ctl onboard user@host` brings any version")
    # one terminal line at a time: they are worked on one after another
    with Http() as http:
        releases = Releases(source, version, cache_dir(os.environ), http)
        for index, entry in enumerate(entries):
            tell = Lines([entry.node_id]).teller(entry.node_id)
            try:
                _one(session, entry, releases, tell, patience_s, records)
            except LlmgwError as error:
                left = ", ".join(each.node_id for each in entries[index + 1 :])
                raise UpgradeFailed(
                    f"`{entry.node_id}` is not upgraded: {error.message}", cause=error.cause,
                    hint="; ".join(filter(None, (error.hint, left and f"untouched: {left}"))),
                    code=error.code if isinstance(error, UsageError) else "",
                ) from error  # fmt: skip


def _one(session: Session, entry: Entry, releases: Releases, tell: Any, patience_s: float, records: Any) -> None:
    import attrs

    from llmgw.ctl.onboarding import scripts
    from llmgw.ctl.onboarding.remote import Remote
    from llmgw.ctl.onboarding.stages import Onboarding, Plan
    from llmgw.system.commands import RealRunner

    remote = Remote(entry.target, entry.options(), RealRunner(), os.environ)
    engines = _engines(session, entry.node_id)
    before = remote.run(scripts.STANDING, timeout_s=30).stdout.split("\n")[0].strip()
    if not before:
        raise UsageError("no llmgw is installed there", hint="`llmgw ctl onboard` installs it")
    work = Onboarding(remote, Plan((), entry.node_id), releases, session.clock, tell)
    try:
        work.run(("install", "service"))
        await_node(session, entry.node_id, tell, patience_s, version=releases.version, engines=False)
    except LlmgwError as error:
        _roll_back(session, remote, entry, before, tell, patience_s, error)
    remote.run(scripts.TIDY, timeout_s=120)
    records.save(attrs.evolve(entry, version=releases.version))
    after = _engines(session, entry.node_id)
    lost = sorted(name for name, pid in engines.items() if after.get(name) != pid)
    words = f"{len(engines)} engines went on" if not lost else f"engines that did not go on: {', '.join(lost)}"
    tell("engines", words, 0.0)


def _roll_back(
    session: Session, remote: Any, entry: Entry, before: str, tell: Any, patience_s: float, why: LlmgwError
) -> None:
    """Put the old release back when the new one became current.

    Raises:
        UpgradeFailed: always; says how the node stands now.
    """
    from llmgw.ctl.onboarding import scripts

    now = remote.run(scripts.STANDING, timeout_s=30).stdout.split("\n")[0].strip()
    if now == before:
        raise UpgradeFailed(why.message, cause=f"{why.cause}; it is still on `{before}`", hint=why.hint) from why
    tell("roll back", f"to `{before}`: {why.words()}", None)
    old = before.removeprefix("llmgw-").rpartition("-linux-")[0]
    try:
        remote.run(scripts.ROLL_BACK, before, timeout_s=180)
        await_node(session, entry.node_id, tell, patience_s, version=old, engines=False)
    except LlmgwError as error:
        raise UpgradeFailed(
            f"{why.message}, and the old release does not come back", cause=f"{why.cause}; {error.words()}",
            hint=f"log in to `{entry.target}` and look at the agent's log",
        ) from error  # fmt: skip
    raise UpgradeFailed(f"{why.message}; it is back on `{before}`", cause=why.cause, hint=why.hint) from why


def _engines(session: Session, node_id: str) -> dict[str, int]:
    """Replica -> pid of its engine on a node."""
    node = next((each for each in nodes_of(session) if each.get("node_id") == node_id), {})
    found = [each for each in node.get("replicas") or [] if isinstance(each, dict)]
    return {str(each.get("replica_id")): each["pid"] for each in found if isinstance(each.get("pid"), int)}
