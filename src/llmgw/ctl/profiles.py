"""`llmgw ctl profiles`, `apply`, `delete` and `explain`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgw.ctl.output import Look, listing, output_option, watch_option
from llmgw.ctl.session import Session, connection, for_each
from llmgw.ctl.tables import Cell, render, shown, state_cell
from llmgw.ctl.text import escape, wrap
from llmgw.errors import ConfigError, LlmgwError, Unreachable, UsageError

if TYPE_CHECKING:
    from llmgw.domain.profiles import Profile

_NODES = 10


@click.command()
@output_option
@watch_option
@connection
@click.pass_obj
def profiles(session: Session, output: str, watch: bool) -> None:
    """List profiles: how many replicas are ready, and why others are not."""
    listing(session, output, watch, lambda: session.client().get("profiles"), draw)


def draw(data: dict[str, Any], look: Look) -> list[str]:
    """The table: a row per profile, and one for each node that refused it, of very many the first ones."""
    rows: list[list[Cell | str | None]] = []
    for entry in data.get("profiles") or ():
        profile = entry.get("profile") or {}
        ready = f"{shown(entry.get('replicas_ready'))}/{shown(entry.get('replicas_wanted'))}"
        row: list[Cell | str | None] = [profile.get("name"), profile.get("engine"), ready]
        row.append(state_cell(shown(entry.get("state"))))
        if look.wide:
            numbers = (profile.get("context"), profile.get("slots"))
            row += [*(None if n is None else str(n) for n in numbers), ", ".join(profile.get("aliases") or ())]
            row.append(profile.get("model"))
        refusal = entry.get("refusal") or {}
        words = entry.get("words") or ""
        said = [words, *([refusal["words"]] if refusal.get("words") and refusal["words"] not in words else ())]
        said += [entry["note"]] if entry.get("note") else []
        nodes = refusal.get("nodes") or ()
        said += [f"{node.get('node_id')}: {node.get('words')}" for node in nodes[:_NODES]]
        if len(nodes) > _NODES:
            said.append(f"… and {len(nodes) - _NODES} more nodes: `llmgw ctl explain {profile.get('name')}`")
        rows += [[*row, line] for line in said]
    if not rows:
        return ["no profile: apply one with `llmgw ctl apply -f FILE`"]
    headers = ["PROFILE", "ENGINE", "READY", "STATE"]
    headers += ["CONTEXT", "SLOTS", "ALIASES", "MODEL"] if look.wide else []
    return render([*headers, "WORDS"], rows, columns=look.columns, colour=look.colour)


@click.command()
@click.argument("profile")
@output_option
@watch_option
@connection
@click.pass_obj
def explain(session: Session, profile: str, output: str, watch: bool) -> None:
    """Say why PROFILE runs where it does, or why it runs nowhere: one line per node, in its own words."""
    listing(session, output, watch, lambda: session.client().get("explain", profile), draw_explain)


def draw_explain(data: dict[str, Any], look: Look) -> list[str]:
    """State and words, then a line for each node."""
    refusal = data.get("refusal") or {}
    said = [str(line) for line in data.get("lines") or ()]
    more = [] if said else [f"{at.get('node_id')}: {at.get('words')}" for at in data.get("placements") or ()]
    more += [f"{at.get('node_id')}: {at.get('words')}" for at in refusal.get("nodes") or ()]
    said += [line for line in more if line not in said]
    head = f"{shown(data.get('profile'))}: {shown(data.get('state'))}"
    words = data.get("words") or ""
    lines = [head if not words or words in said else f"{head}: {words}", *(f"  {line}" for line in said)]
    lines = [escape(line) for line in lines]
    if look.columns is None:
        return lines
    return [("    " if at else "") + part for line in lines for at, part in enumerate(wrap(line, look.columns - 4))]


@click.command()
@click.option("-f", "--file", "files", multiple=True, required=True, metavar="FILE",
              help="YAML file, a directory of them, or `-` for standard input; may be repeated.")  # fmt: skip
@connection
@click.pass_obj
def apply(session: Session, files: tuple[str, ...]) -> None:
    """Create or change profiles. Nothing is sent while any file has a problem."""
    wanted = read_all(files)
    failures: list[tuple[str, LlmgwError]] = []
    for profile in wanted:
        try:
            click.echo(f"{profile.name}: {_put(session, profile)}")
        except Unreachable:
            raise
        except LlmgwError as error:
            failures.append((profile.name, error))
    if failures:
        problems = []
        for name, failure in failures:
            said = failure.problems if isinstance(failure, ConfigError) and failure.problems else (failure.words(),)
            problems += [f"{name}: {line}" for line in said]
        raise ConfigError(
            f"{len(failures)} of {len(wanted)} profiles were not applied", problems, hint=failures[0][1].hint
        )


def _put(session: Session, profile: Profile) -> str:
    from llmgw.config import profile_to_json

    answer = session.client().put("profiles", profile.name, body=profile_to_json(profile))
    return {True: "changed", False: "unchanged"}.get(answer.get("changed"), "applied")  # type: ignore[arg-type]


def read_all(files: tuple[str, ...]) -> list[Profile]:
    """The profiles of all files, directories and standard input.

    Raises:
        ConfigError: with the problems of all of them.
        UsageError: a directory holds no YAML file.
    """
    from llmgw.config import load_profiles, profiles_from_text

    made: list[Profile] = []
    owners: dict[str, str] = {}
    problems: list[str] = []
    hints: list[str] = []
    for name, path in _expand(files):
        try:
            found = profiles_from_text(sys.stdin.read(), "stdin") if path is None else load_profiles(path)
        except ConfigError as error:
            problems += error.problems or (error.message,)
            absent = path is not None and not path.exists()
            hints += ["name an existing file with `-f FILE`"] if absent else [error.hint] if error.hint else []
            continue
        for profile in found:
            if profile.name in owners:
                problems.append(f"{name}: profile `{profile.name}` is in `{owners[profile.name]}` too")
            owners.setdefault(profile.name, name)
        made += found
    if problems:
        raise ConfigError("nothing was applied", problems, hint=hints[0] if hints else "")
    return made


def _expand(files: tuple[str, ...]) -> list[tuple[str, Path | None]]:
    out: list[tuple[str, Path | None]] = []
    for name in files:
        path = Path(name)
        if name == "-":
            out.append(("stdin", None))
        elif path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix in (".yaml", ".yml") and p.is_file())
            if not inside:
                raise UsageError(f"`{name}` holds no `.yaml` file", hint="name a profile file, or another directory")
            out += [(str(p), p) for p in inside]
        else:
            out.append((name, path))
    return out


@click.command()
@click.argument("name")
@click.argument("replicas", type=click.IntRange(0, 10_000))
@connection
@click.pass_obj
def scale(session: Session, name: str, replicas: int) -> None:
    """Change how many REPLICAS of the profile NAME run; 0 keeps the profile and runs nothing.

    A file in the server's `profiles_dir` is applied again at its next start and then says how many.
    """
    entry = session.client().post("profiles", name, "scale", body={"replicas": replicas})
    counts = f"{shown(entry.get('replicas_ready'))} of {shown(entry.get('replicas_wanted'))} ready"
    click.echo(f"{escape(name)}: {counts}; {escape(shown(entry.get('words')))}")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@connection
@click.pass_obj
def delete(session: Session, names: tuple[str, ...]) -> None:
    """Delete profiles; their replicas finish what they are doing and stop."""

    def one(name: str) -> None:
        session.client().delete("profiles", name)
        click.echo(f"{escape(name)}: deleted")

    for_each(names, one)
