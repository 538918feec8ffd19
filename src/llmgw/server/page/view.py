"""The page as data: cards of cells. The template renders every cell, the event stream sends those that changed."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen

from llmgw import __version__
from llmgw.domain.engines import EngineState, EngineStatus, Progress
from llmgw.domain.facts import NodeFacts
from llmgw.domain.report import NodeView, Presence
from llmgw.domain.standing import ReplicaStanding, Standing
from llmgw.server.answers import presences
from llmgw.server.control import GatewayInfo
from llmgw.server.deploy import Outlook
from llmgw.units import format_size

Tree = dict[str, Any]

_BAD = (EngineState.FAILED, EngineState.BROKEN)
_LINES = 20
_SOURCE = 64
_LONG_HEX = re.compile(r"[0-9a-f]{24,}")


@frozen
class Cell:
    """One text on the page.

    Args:
        key: finds the element again; the set of all keys is the page's shape.
        text: what a person reads; escaped by the template, `textContent` in the script.
        state: colours it: a presence, an engine, replica or profile state.
        value: 0 to 1 for a bar, -1 for a bar that is not shown, None for plain text.
    """

    key: str
    text: str
    state: str = ""
    value: float | None = None


def build(outlook: Outlook, gateways: Sequence[GatewayInfo], warnings: Sequence[str] = ()) -> Tree:
    """The whole page; `warnings` are the server's own."""
    counts = presences(outlook.nodes)
    nodes = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none yet"
    return {
        "version": Cell("version", f"llmgw {__version__}"),
        "summary": Cell("summary", f"nodes: {nodes}; {_requests(gateways)}"),
        "warnings": [Cell(f"warning/{number}", words) for number, words in enumerate(warnings)],
        "models": [_model(standing) for standing in outlook.standings],
        "nodes": [_node(view) for view in sorted(outlook.nodes, key=_worst_first)],
    }


def cells(tree: Any) -> Iterator[Cell]:
    """Every cell of the page, in order."""
    if isinstance(tree, Cell):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from cells(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from cells(value)


def shape(tree: Tree) -> str:
    """Changes when cells come or go, so that the page has to be loaded anew."""
    return hashlib.sha256("\n".join(cell.key for cell in cells(tree)).encode()).hexdigest()[:16]


def _requests(gateways: Sequence[GatewayInfo]) -> str:
    if not gateways:
        return "no gateway is connected"
    running = sum(sum(item.in_flight.values()) for item in gateways)
    return f"gateway on {gateways[0].listen}, {running} request{'' if running == 1 else 's'} in flight"


def _model(standing: Standing) -> Tree:
    key = f"model/{standing.profile.name}"
    profile = standing.profile
    return {
        "name": Cell(f"{key}/name", profile.name),
        "state": Cell(f"{key}/state", standing.state, standing.state),
        # what one replica says stands with that replica
        "words": Cell(f"{key}/words", "" if _is_a_replicas(standing) else standing.words),
        "what": Cell(
            f"{key}/what",
            f"{profile.engine} · {standing.ready} of {profile.replicas} ready · {profile.context} tokens × "
            f"{profile.slots} slots · {short_source(profile.model)}",
        ),
        "replicas": [_replica(f"{key}/replica/{number}", item) for number, item in enumerate(standing.replicas)],
        "lines": [Cell(f"{key}/line/{number}", line) for number, line in enumerate(_lines(standing))],
    }


def _is_a_replicas(standing: Standing) -> bool:
    return any(item.words == standing.words for item in standing.replicas)


def _lines(standing: Standing) -> list[str]:
    """What is to be said beyond the first sentence; of very many refusals the first ones."""
    said = list(standing.refusal.lines()) if standing.refusal is not None else []
    lines = [line for line in said if line != standing.words]
    if len(lines) > _LINES:
        more = len(lines) - _LINES
        lines[_LINES:] = [f"… and {more} more: `llmgw ctl explain {standing.profile.name}`"]
    return [*lines, standing.note] if standing.note else lines


def short_source(model: str) -> str:
    """A model's source as it fits on a card: without its digest, long hashes and middles cut."""
    text = _LONG_HEX.sub(lambda found: f"{found[0][:8]}…", model.partition("#")[0])
    if len(text) <= _SOURCE:
        return text
    name = re.split(r"[/:]", text)[-1]
    left = _SOURCE - 1 - len(name)
    return f"{text[:left]}…{name}" if left >= _SOURCE // 4 else f"{text[: _SOURCE // 2]}…{text[1 - _SOURCE // 2 :]}"


def _replica(key: str, item: ReplicaStanding) -> Tree:
    state = item.status.state.value if item.status is not None else "pending"
    progress = item.status.progress if item.status is not None else None
    log = item.status.last_log if item.status is not None and state == "failed" else ()
    return {
        "name": Cell(f"{key}/name", f"{item.assignment.spec.replica_id} on {item.assignment.node_id}"),
        "state": Cell(f"{key}/state", state, state),
        "words": Cell(f"{key}/words", item.own_words),
        "bar": _bar(key, progress),
        "log": [Cell(f"{key}/log", "\n".join(log[-8:]))] if log else [],
    }


def _worst_first(view: NodeView) -> tuple[int, str]:
    """Among hundreds of nodes those that need somebody come first."""
    report = view.report
    if view.presence in (Presence.LOST, Presence.NEVER):
        return 0, view.node_id
    if report is not None and any(engine.state in _BAD for engine in report.engines):
        return 1, view.node_id
    return (2 if report is not None and report.warnings else 3), view.node_id


def _node(view: NodeView) -> Tree:
    key = f"node/{view.node_id}"
    report = view.report
    engines = report.engines if report is not None else ()
    warnings = report.warnings if report is not None else ()
    return {
        "name": Cell(f"{key}/name", view.node_id),
        "presence": Cell(f"{key}/presence", view.presence.value, view.presence.value),
        "words": Cell(f"{key}/words", _node_words(view)),
        "certificate": [Cell(f"{key}/certificate", f"certificate valid until {_day(view.certificate.not_after)}")]
        if view.certificate is not None
        else [],
        "hardware": Cell(f"{key}/hardware", _hardware(view.facts)),
        "memory": [_memory(key, view)] if view.facts is not None and view.facts.memory.total_bytes else [],
        "gpus": _gpus(key, view),
        "engines": [_engine(f"{key}/engine/{number}", item) for number, item in enumerate(engines)],
        "warnings": [Cell(f"{key}/warning/{number}", item.words) for number, item in enumerate(warnings)],
    }


def _node_words(view: NodeView) -> str:
    if view.report is not None and view.report.probed_at is None:
        return f"{view.presence_words}, has not finished probing"
    return view.presence_words


def _day(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _engine(key: str, status: EngineStatus) -> Tree:
    name = " ".join(part for part in (status.name, status.version, status.build) if part)
    return {
        "name": Cell(f"{key}/name", name),
        "state": Cell(f"{key}/state", status.state.value, status.state.value),
        "words": Cell(f"{key}/words", status.words),
        "bar": _bar(key, status.progress),
        "passed": [Cell(f"{key}/passed", status.passed_over)] if status.passed_over else [],
    }


def _bar(key: str, progress: Progress | None) -> Cell:
    if progress is None or not progress.total_bytes:
        return Cell(f"{key}/bar", "", value=-1.0)
    return Cell(f"{key}/bar", "", value=min(1.0, max(0.0, progress.done_bytes / progress.total_bytes)))


def _hardware(facts: NodeFacts | None) -> str:
    if facts is None:
        return "hardware not known yet"
    parts = [facts.cpu.name or facts.cpu.arch]
    if facts.cpu.cores is not None:
        parts.append(f"{facts.cpu.cores} cores")
    parts.append(facts.os.name or facts.os.id)
    if facts.gpus is None:
        parts.append(f"GPUs not known: {facts.nvidia.driver.words}")
    else:
        names = [gpu.name or gpu.vendor for gpu in facts.gpus]
        parts.append(", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU")
    parts.extend(f"{name}={value}" for name, value in sorted(facts.labels.items()))
    return " · ".join(parts)


def _memory(key: str, view: NodeView) -> Tree:
    total = view.facts.memory.total_bytes if view.facts is not None else None
    reading = view.report.readings if view.report is not None else None
    free = reading.memory_available_bytes if reading is not None else None
    return _level(f"{key}/memory", "memory", free, total)


def _gpus(key: str, view: NodeView) -> list[Tree]:
    reading = view.report.readings if view.report is not None else None
    free = {item.uuid: item.memory_free_bytes for item in (reading.gpus if reading is not None else ())}
    gpus = view.facts.gpus if view.facts is not None else None
    return [
        _level(f"{key}/gpu/{number}", f"{gpu.name or 'GPU'} {number}", free.get(gpu.uuid), gpu.memory_total_bytes)
        for number, gpu in enumerate(gpus or ())
    ]


def _level(key: str, name: str, free: int | None, total: int | None) -> Tree:
    if free is None or not total:
        return {"text": Cell(f"{key}/text", f"{name}: free not known"), "bar": Cell(f"{key}/bar", "", value=-1.0)}
    return {
        "text": Cell(f"{key}/text", f"{name}: {format_size(free)} free of {format_size(total)}"),
        "bar": Cell(f"{key}/bar", "", value=min(1.0, max(0.0, 1 - free / total))),
    }
