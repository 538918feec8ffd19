"""`llmgw ctl nodes`: what is there, and what each node says."""

from __future__ import annotations

import threading
from typing import Any

import click

from llmgw.ctl.output import Look, listing, output_option, size, watch_option
from llmgw.ctl.session import Session, connection, for_each
from llmgw.ctl.tables import Cell, render, shown, state_cell
from llmgw.ctl.text import escape
from llmgw.errors import UsageError

_WAIT_LOOK_S = 1.0


@click.command()
@click.argument("node", required=False)
@output_option
@watch_option
@connection
@click.pass_obj
def nodes(session: Session, node: str | None, output: str, watch: bool) -> None:
    """List nodes with their engines and words, or describe NODE in full."""
    if node is None:
        listing(session, output, watch, lambda: session.client().get("nodes"), draw)
    else:
        from llmgw.ctl import describe  # long, and not needed to list nodes

        listing(session, output, watch, lambda: one(session.client().get("nodes", node)), describe.draw)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@click.option("--wait", is_flag=True, help="Return when nothing of llmgw serves there any more.")
@connection
@click.pass_obj
def drain(session: Session, names: tuple[str, ...], wait: bool) -> None:
    """Empty nodes: each replica is replaced elsewhere first, then it leaves. No new one comes until `undrain`."""
    _say_each(session, names, "drain")
    never = threading.Event()
    for name in names if wait else ():
        said = ""
        while not (words := str(one(session.client().get("nodes", name)).get("drain_words") or "")).startswith(
            "drained"
        ):
            if not words:
                raise UsageError(f"node `{name}` is not being drained any more", hint="somebody said `undrain`")
            if words != said:
                click.echo(f"{escape(name)}: {escape(words)}", err=True)
                said = words
            session.clock.wait(never, _WAIT_LOOK_S)
        click.echo(f"{escape(name)}: {escape(words)}")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@connection
@click.pass_obj
def undrain(session: Session, names: tuple[str, ...]) -> None:
    """Let drained nodes take replicas again. What left them stays where it is."""
    _say_each(session, names, "undrain")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@connection
@click.pass_obj
def forget(session: Session, names: tuple[str, ...]) -> None:
    """Take nodes that are gone for good out of every listing. One that connects again is a new node."""

    def one(name: str) -> None:
        answer = session.client().delete("nodes", name)
        click.echo(f"{escape(name)}: {escape(shown(answer.get('words')))}")

    for_each(names, one)


def _say_each(session: Session, names: tuple[str, ...], what: str) -> None:
    def one(name: str) -> None:
        answer = session.client().post("nodes", name, what, body={})
        click.echo(f"{escape(name)}: {escape(shown(answer.get('words')))}")

    for_each(names, one)


def one(data: dict[str, Any]) -> dict[str, Any]:
    """The node of an answer about one node."""
    found = data.get("nodes")
    return found[0] if isinstance(found, list) and found else data


def draw(data: dict[str, Any], look: Look) -> list[str]:
    """The table: a row per engine of each node, and a row for whatever else the node has to say."""
    found = data.get("nodes") or []
    if not found:
        return ["no node has ever reported: start `llmgw agent` on one"]
    headers = ["NODE", "STATE", "ENGINES"]
    if look.wide:
        headers += ["BUILD", "SINCE", "NEXT TRY", "SEEN", "VERSION", "CERT", "OS", "CPU", "MEMORY", "GPUS"]
    rows = [[shown(node.get("node_id")), _state(node), *row] for node in found for row in _rows(node, look)]
    return render([*headers, "WORDS"], rows, columns=look.columns, colour=look.colour)


def _state(node: dict[str, Any]) -> Cell:
    presence = shown(node.get("presence"))
    return state_cell(f"{presence}, draining" if node.get("draining") else presence, presence)


def _rows(node: dict[str, Any], look: Look) -> list[list[Cell | str | None]]:
    said: list[tuple[Cell | str | None, dict[str, Any], str]] = []
    if node.get("presence") != "connected":
        said.append(("", {}, node.get("words") or ""))
    engines = node.get("engines")
    if engines:
        said += [(engine_cell(engine), engine, engine.get("words") or "") for engine in engines]
    elif node.get("probed_at") is None:
        said.append((None, {}, "has not looked at its engines yet"))
    elif not said:
        said.append(("", {}, "has no engine, and none is wanted here"))
    if node.get("drain_words"):
        said.append(("", {}, node["drain_words"]))
    said += [("", {}, f"warning: {warning.get('words')}") for warning in node.get("warnings") or ()]
    return [[cell, *(_wide(node, engine, look) if look.wide else ()), words] for cell, engine, words in said]


def engine_cell(engine: dict[str, Any]) -> Cell:
    """`llama.cpp b10991 ready`; an unknown version is `?`."""
    state = shown(engine.get("state"))
    return state_cell(f"{shown(engine.get('name'))} {shown(engine.get('version'))} {state}", state)


def _wide(node: dict[str, Any], engine: dict[str, Any], look: Look) -> list[str | None]:
    facts = node.get("facts") or {}
    cpu, memory, gpus = facts.get("cpu") or {}, facts.get("memory") or {}, facts.get("gpus")
    system = facts.get("os") or {}
    return [
        engine.get("build") if engine else "",
        look.ago(engine.get("since")) if engine else "",
        look.until(engine.get("next_try")),
        look.ago(node.get("last_seen")),
        node.get("version"),
        look.until((node.get("certificate") or {}).get("not_after")),
        f"{system.get('id')} {shown(system.get('version'))}" if system else None,
        f"{cpu.get('arch')}, {shown(cpu.get('cores'))} cores" if cpu else None,
        size(memory.get("total_bytes")),
        None if gpus is None else str(len(gpus)),
    ]
