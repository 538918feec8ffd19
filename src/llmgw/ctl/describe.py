"""`llmgw ctl nodes NODE`: everything a node says, in full."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmgw.ctl.output import Look, size
from llmgw.ctl.tables import Cell, pairs, render, shown, state_cell

Items = list[tuple[str, Cell | str | None]]


def draw(node: dict[str, Any], look: Look) -> list[str]:
    """The whole description of one node."""
    facts = node.get("facts")
    out: list[str] = []
    presence = shown(node.get("presence"))
    items: Items = [
        ("Node", node.get("node_id")),
        ("State", state_cell(f"{presence}, draining" if node.get("draining") else presence, presence)),
        ("Words", node.get("words")),
        *([("Draining", node["drain_words"])] if node.get("drain_words") else []),
        ("llmgw", node.get("version")),
        ("Certificate", _certificate(node.get("certificate"), look)),
        ("Last seen", _since(look, node.get("last_seen"))),
        ("Last probed", _since(look, node.get("probed_at"))),
    ]
    out += pairs(items, columns=look.columns, colour=look.colour)
    _section(out, "Facts", _facts(facts) if facts else [("", "not yet known")], look)
    _section(out, "Readings", _readings(node.get("readings"), facts or {}), look)
    unknown = node.get("probed_at") is None
    _list(out, "Engines", _engines(node.get("engines"), look), look, unknown)
    _list(out, "Replicas", _replicas(node.get("replicas"), look), look, unknown)
    _list(out, "Weights", _weights(node.get("weights")), look, unknown)
    _list(out, "Warnings", _warnings(node.get("warnings"), look), look, unknown)
    return out


def _certificate(certificate: Any, look: Look) -> str:
    """Serial and end; "" for a node that connects without one."""
    if not isinstance(certificate, Mapping):
        return ""
    end, serial = certificate.get("not_after"), shown(certificate.get("serial"))
    if not isinstance(end, int | float):
        return serial
    left = look.until(end) if end > look.now else "already"
    return f"expires {left} ({time.strftime('%Y-%m-%d', time.gmtime(end))}), serial {serial}"


def _since(look: Look, at: Any) -> str | None:
    ago = look.ago(at)
    return None if ago is None else f"{ago} ago"


def _facts(facts: Mapping[str, Any]) -> Items:
    system, cpu, memory = facts.get("os") or {}, facts.get("cpu") or {}, facts.get("memory") or {}
    nvidia, labels = facts.get("nvidia") or {}, facts.get("labels") or {}
    flags = cpu.get("flags")
    # no driver has no version; of any other the version is unknown
    without = "" if (nvidia.get("driver") or {}).get("value") == "no" else None
    items: Items = [
        ("Host name", facts.get("hostname")),
        ("Boot id", facts.get("boot_id")),
        ("Labels", ", ".join(f"{k}={v}" for k, v in labels.items())),
        ("Address", facts.get("mgmt_addr")),
        ("System", system.get("name") or f"{shown(system.get('id'))} {shown(system.get('version'))}"),
        ("Package family", system.get("family")),
        ("Immutable", system.get("immutable")),
        ("Kernel", system.get("kernel")),
        ("glibc", system.get("glibc")),
        ("libstdc++", system.get("libstdcxx")),
        ("CPU", cpu.get("name")),
        ("CPU arch", cpu.get("arch")),
        ("CPU cores", cpu.get("cores")),
        ("x86-64 level", cpu.get("level")),
        ("Virtual", cpu.get("virtual")),
        ("CPU flags", None if flags is None else " ".join(flags)),
        ("Memory", size(memory.get("total_bytes"))),
        # no limit is an answer, not an unknown
        ("Memory limit", size(memory.get("limit_bytes")) or ""),
        ("NVIDIA driver", _finding(nvidia.get("driver"))),
        ("Driver version", nvidia.get("version") or without),
        ("CUDA", nvidia.get("cuda") or without),
        ("Model dirs", ", ".join(facts.get("model_dirs") or ())),
        ("Revision", facts.get("revision")),
    ]
    gpus = facts.get("gpus")
    if not gpus:
        items.append(("GPUs", None if gpus is None else "none"))
    for gpu in gpus or ():
        parts = [shown(gpu.get("name")), shown(size(gpu.get("memory_total_bytes"))), shown(gpu.get("uuid"))]
        parts += [f"compute {shown(gpu.get('compute_cap'))}", f"PCI {shown(gpu.get('pci_bus_id'))}"]
        parts += ["unified memory"] if gpu.get("unified_memory") else []
        parts += [f"faulty: {gpu['faulty']}"] if gpu.get("faulty") else []
        items.append((f"GPU {shown(gpu.get('index'))}", ", ".join(parts)))
    for fabric in facts.get("fabrics") or ():
        rate = fabric.get("rate_gbps")
        words = f"{', '.join(fabric.get('hcas') or ())}; {'?' if rate is None else f'{rate:g}'} Gb/s; "
        items.append((f"Fabric {shown(fabric.get('name'))}", words + shown(_finding(fabric.get("usable")))))
    return [(name, value if isinstance(value, Cell) else _text(value)) for name, value in items]


def _text(value: Any) -> str | None:
    return None if value is None else shown(value)


def _finding(finding: Any) -> str | None:
    if not isinstance(finding, dict):
        return None
    return f"{shown(finding.get('value'))}: {finding['words']}" if finding.get("words") else finding.get("value")


def _readings(readings: Any, facts: Mapping[str, Any]) -> Items:
    if not isinstance(readings, dict):
        return [("", "not yet known")]
    load = readings.get("load_1m")
    items: Items = [
        ("Memory available", size(readings.get("memory_available_bytes"))),
        ("Load (1 min)", None if load is None else f"{load:g}"),
    ]
    for disk in readings.get("disks") or ():
        words = f"{shown(size(disk.get('free_bytes')))} free of {shown(size(disk.get('total_bytes')))}"
        items.append((f"Disk {disk.get('path')}", words))
    names = {gpu.get("uuid"): f"GPU {shown(gpu.get('index'))}" for gpu in facts.get("gpus") or ()}
    for gpu in readings.get("gpus") or ():
        busy, heat = gpu.get("utilization_percent"), gpu.get("temperature_c")
        words = f"{shown(size(gpu.get('memory_free_bytes')))} free, {'?' if busy is None else f'{busy:g}'} % busy, "
        name = names.get(gpu.get("uuid"), f"GPU {shown(gpu.get('uuid'))}")
        items.append((name, words + f"{'?' if heat is None else f'{heat:g}'} °C"))
    return items


Table = tuple[Sequence[str], list[list[Cell | str | None]]]


def _engines(engines: Any, look: Look) -> Table:
    rows: list[list[Cell | str | None]] = []
    for engine in engines or ():
        name = [engine.get("name"), engine.get("version"), engine.get("build")]
        state = state_cell(shown(engine.get("state")))
        times = [look.ago(engine.get("since")), look.until(engine.get("next_try"))]
        rows.append([*name, state, *times, engine.get("words")])
        if engine.get("passed_over") and engine["passed_over"] not in (engine.get("words") or ""):
            rows.append([*name, state, *times, engine["passed_over"]])
    return ["ENGINE", "VERSION", "BUILD", "STATE", "SINCE", "NEXT TRY", "WORDS"], rows


def _replicas(replicas: Any, look: Look) -> Table:
    rows: list[list[Cell | str | None]] = []
    for replica in replicas or ():
        host, port = replica.get("host"), replica.get("port")
        address = "" if host is None or port is None else f"{host}:{port}"
        left = [replica.get("replica_id"), state_cell(shown(replica.get("state"))), address]
        left += [look.ago(replica.get("since")), _text(replica.get("restarts"))]
        rows.append([*left, replica.get("words")])
        rows += [[*left, f"log: {line}"] for line in replica.get("last_log") or () if replica.get("state") == "failed"]
    return ["REPLICA", "STATE", "ADDRESS", "SINCE", "RESTARTS", "WORDS"], rows


def _weights(weights: Any) -> Table:
    rows: list[list[Cell | str | None]] = [
        [file.get("path"), size(file.get("size_bytes")), file.get("format"), _finding(file.get("complete"))]
        for file in weights or ()
    ]
    return ["FILE", "SIZE", "FORMAT", "COMPLETE"], rows


def _warnings(warnings: Any, look: Look) -> Table:
    rows: list[list[Cell | str | None]] = [
        [warning.get("code"), look.ago(warning.get("since")), warning.get("words")] for warning in warnings or ()
    ]
    return ["CODE", "SINCE", "WORDS"], rows


def _section(out: list[str], title: str, items: Items, look: Look) -> None:
    out += ["", title]
    columns = None if look.columns is None else look.columns - 2
    out += ["  " + line.lstrip() if not line.strip() else "  " + line for line in pairs(
        items, columns=columns, colour=look.colour)]  # fmt: skip


def _list(out: list[str], title: str, table: Table, look: Look, unknown: bool) -> None:
    headers, rows = table
    out += ["", title]
    if not rows:
        out.append("  not yet known" if unknown else "  none")
        return
    columns = None if look.columns is None else look.columns - 2
    out += ["  " + line for line in render(headers, rows, columns=columns, colour=look.colour)]
