"""`llmgw ctl onboard USER@HOST…`: a bare machine becomes a node that serves, with one command that can be run again."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgw.ctl.session import Session
from llmgw.errors import LlmgwError, UsageError

if TYPE_CHECKING:
    from llmgw.ctl.onboarding.lines import Lines
    from llmgw.ctl.onboarding.record import Records
    from llmgw.ctl.onboarding.release import Releases
    from llmgw.ctl.onboarding.remote import SshOptions
    from llmgw.ctl.onboarding.stages import Plan

_AT_ONCE = 8


def ssh_options(command: Any) -> Any:
    """Give a command the options that go to ssh."""
    for flags, text, kind in (
        (("-i", "--identity"), "Private key for ssh.", str),
        (("-p", "--port"), "Port of sshd.", click.IntRange(1, 65535)),
        (("-F", "--ssh-config"), "Configuration file for ssh.", click.Path(exists=True, dir_okay=False)),
    ):
        command = click.option(*flags, default=None, type=kind, help=text)(command)
    return command


def release_options(command: Any) -> Any:
    """Give a command the options that say which release."""
    command = click.option("--version", default=None, help="Version of llmgw; that of this one by default.")(command)
    return click.option(
        "--from", "source", default="github", show_default=True, metavar="SOURCE",
        help="Where releases are: `github`, `github:OWNER/NAME`, `https://MIRROR/`, or a directory with SHA256SUMS.",
    )(command)  # fmt: skip


@click.command("onboard")
@click.argument("targets", metavar="USER@HOST...", nargs=-1, required=True)
@click.option("--agents-at", "server", multiple=True, required=True, metavar="URL",
              help="The address agents dial: `https://HOST:7443`. May be repeated.")  # fmt: skip
@click.option("--pki", type=click.Path(path_type=Path, file_okay=False), help="Directory of the CA (`ctl cert init`).")
@click.option("--days", type=click.IntRange(1, 36500), default=365, show_default=True, help="Validity of certificates.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label of the node. May be repeated.")
@click.option("--node-id", help="Name of the node; its host name by default. With one machine only.")
@click.option("--agent-yaml", type=click.Path(path_type=Path, dir_okay=False, exists=True),
              help="Further keys of agent.yaml, for all machines.")  # fmt: skip
@click.option("--replace-config", is_flag=True, help="Write over an agent.yaml that was edited on the node.")
@click.option("--wait", "wait_s", default="15m", show_default=True, metavar="TIME", help="For engines; `0s`: do not.")
@release_options
@ssh_options
@click.pass_obj
def onboard(session: Session, /, targets: tuple[str, ...], **given: Any) -> None:
    """Make machines into nodes, over ssh.

    Looks at each machine first and stops with words when it cannot become a node. Installs llmgw from a release,
    checked against its SHA256SUMS here and on the node; gets it a certificate for a key made on the node; starts the
    agent, and waits until the server sees its engines ready. Run it again after any failure: what is done is not done
    twice.
    """
    from llmgw.ctl.onboarding.lines import Lines
    from llmgw.ctl.onboarding.record import Records
    from llmgw.ctl.onboarding.release import Releases
    from llmgw.ctl.onboarding.remote import SshOptions, check_target
    from llmgw.system.http import Http
    from llmgw.units import parse_duration

    for target in targets:
        check_target(target)
    if given["node_id"] and len(targets) > 1:
        raise UsageError("`--node-id` names one machine", hint="onboard the machines one by one")
    plan, wait_s = _plan(given), parse_duration(given["wait_s"])
    options = SshOptions(given["ssh_config"], given["port"], given["identity"])
    lines = Lines(list(targets))
    with Http() as http, ThreadPoolExecutor(min(_AT_ONCE, len(targets)), "onboard") as pool:
        releases = Releases(given["source"], given["version"], cache_dir(os.environ), http)
        work = [
            pool.submit(_one, session, each, plan, options, releases, lines, Records(os.environ), wait_s)
            for each in dict.fromkeys(targets)
        ]
        failed = [error for error in (each.result() for each in work) if error is not None]
    if failed:
        raise failed[0] if len(targets) == 1 else LlmgwError(
            f"{len(failed)} of {len(work)} machines are not nodes yet",
            cause="; ".join(error.words() for error in failed), hint="the same command goes on where they stand",
        )  # fmt: skip


def _one(
    session: Session, target: str, plan: Plan, options: SshOptions, releases: Releases, lines: Lines,
    records: Records, wait_s: float,
) -> LlmgwError | None:  # fmt: skip
    from llmgw.ctl.onboarding.record import Entry
    from llmgw.ctl.onboarding.remote import Remote
    from llmgw.ctl.onboarding.stages import Onboarding
    from llmgw.system.commands import RealRunner

    tell, done = lines.teller(target), dict[str, float]()

    def note(stage: str, words: str, took_s: float | None) -> None:
        tell(stage, words, took_s)
        if took_s is None or not onboarding.node_id:
            return
        done[stage] = session.clock.now()
        records.save(
            Entry(onboarding.node_id, target, options.config, options.port, options.identity, releases.version, done)
        )

    remote = Remote(target, options, RealRunner(), os.environ)
    onboarding = Onboarding(remote, plan, releases, session.clock, note)
    try:
        node_id = onboarding.run()
        if wait_s > 0:
            await_node(session, node_id, note, wait_s)
    except LlmgwError as error:
        lines.say(target, f"failed at {error.words()}")
        return error
    return None


def await_node(session: Session, node_id: str, tell: Any, wait_s: float, **more: Any) -> None:
    """The stage `wait`, with its words."""
    from llmgw.ctl.onboarding.stages import StageFailed
    from llmgw.ctl.onboarding.waiting import wait_for_node

    began = session.clock.monotonic()
    tell("wait", "", None)
    try:
        words = wait_for_node(
            lambda: nodes_of(session), node_id, session.clock, lambda w: tell("wait", w, None), timeout_s=wait_s, **more
        )
    except LlmgwError as error:
        raise StageFailed("wait", error) from error
    tell("wait", words, session.clock.monotonic() - began)


def nodes_of(session: Session) -> list[dict[str, Any]]:
    """The server's nodes."""
    found = session.client().get("nodes").get("nodes")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def cache_dir(env: Any) -> Path:
    """Where files of releases are kept on this machine."""
    base = env.get("XDG_CACHE_HOME") or f"{env.get('HOME') or '/root'}/.cache"
    return Path(base, "llmgw", "releases")


def _plan(given: dict[str, Any]) -> Plan:
    from llmgw.ctl.onboarding.stages import Plan

    labels = {}
    for each in given["labels"]:
        key, mark, value = each.partition("=")
        if not mark or not key:
            raise UsageError(f"`{each}` is not a label", hint="write `--label rack=r12`")
        labels[key] = value
    extra: Any = {}
    if given["agent_yaml"] is not None:
        import yaml

        try:
            extra = yaml.safe_load(given["agent_yaml"].read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise UsageError(f"cannot read `{given['agent_yaml']}`", cause=str(error).split("\n")[0]) from error
        if not isinstance(extra, dict):
            raise UsageError(f"`{given['agent_yaml']}` holds no keys of agent.yaml")
    return Plan(given["server"], given["node_id"], labels, extra, given["pki"], given["days"], given["replace_config"])
