"""Labelled InfiniBand fabrics: is this node on them.

Labels come from the configuration, since no identifier on the wire tells two isolated fabrics apart; a node can only
refute a label, and says why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from attrs import frozen

from llmgw.domain.facts import FabricFacts, Finding, Truth
from llmgw.probe.tree import Tree


class FabricLabel(NamedTuple):
    """One fabric of agent.yaml: `hcas` such as `mlx5_0` or `mlx5_0:1` (with a port), rate in gigabits a second."""

    name: str
    hcas: tuple[str, ...]
    rate_gbps: float | None = None


@frozen
class Port:
    """One port of an HCA as sysfs describes it; None: the file is missing."""

    number: int
    state: str | None = None
    phys_state: str | None = None
    link_layer: str | None = None
    rate_gbps: float | None = None
    sm_lid: int | None = None
    gid_prefix: str | None = None


@frozen
class Hca:
    """One host channel adapter; `interfaces` are its network interfaces (IPoIB)."""

    name: str
    ports: tuple[Port, ...] = ()
    interfaces: tuple[str, ...] = ()


def parse_state(text: str | None) -> str | None:
    """`4: ACTIVE` -> `ACTIVE`."""
    return text.partition(":")[2].strip().upper() or None if text else None


def parse_rate(text: str | None) -> float | None:
    """`400 Gb/sec (4X NDR)` -> 400.0; None when there is no rate or it is 0."""
    match = re.match(r"(\d+(?:\.\d+)?) G[Bb]/sec", text or "")
    return float(match[1]) or None if match else None


def read_hcas(tree: Tree, ib_root: str) -> Mapping[str, Hca]:
    """All HCAs below `ib_root` (usually /sys/class/infiniband), by name."""
    found: dict[str, Hca] = {}
    for name in tree.names(ib_root):
        base = f"{ib_root}/{name}"
        numbers = sorted(int(port) for port in tree.names(f"{base}/ports") if port.isdigit())
        ports = tuple(_read_port(tree, f"{base}/ports/{number}", number) for number in numbers)
        found[name] = Hca(name, ports, tree.names(f"{base}/device/net"))
    return found


def fabric_facts(label: FabricLabel, hcas: Mapping[str, Hca], ib_root: str) -> FabricFacts:
    """Judge whether this node is on a labelled fabric."""
    interfaces: list[str] = []
    chosen: list[tuple[str, Port]] = []
    verdict: Finding | None = None
    for wanted in label.hcas:
        name, _, port_text = wanted.partition(":")
        hca = hcas.get(name)
        if hca is None:
            verdict = verdict or Finding(Truth.NO, _missing_words(name, hcas, ib_root))
            continue
        interfaces += [interface for interface in hca.interfaces if interface not in interfaces]
        port, judged = _judge_hca(hca, int(port_text) if port_text.isdigit() else None)
        if judged.value is Truth.YES and port is not None:
            chosen.append((name, port))
        elif verdict is None or (verdict.value is Truth.UNKNOWN and judged.value is Truth.NO):
            verdict = judged
    if verdict is None:
        verdict = _judge_together(label, chosen)
    return FabricFacts(label.name, label.hcas, label.rate_gbps, verdict, tuple(interfaces))


def _judge_hca(hca: Hca, number: int | None) -> tuple[Port | None, Finding]:
    ports = [port for port in hca.ports if number is None or port.number == number]
    if not ports:
        which = f"port {number} of `{hca.name}`" if number is not None else f"every port of `{hca.name}`"
        return None, Finding(Truth.NO if number is not None else Truth.UNKNOWN, f"{which} is missing in sysfs")
    judged = [(port, _judge_port(hca.name, port)) for port in ports]
    for truth in (Truth.YES, Truth.NO):
        for port, finding in judged:
            if finding.value is truth:
                return port, finding
    return judged[0]


def _judge_port(name: str, port: Port) -> Finding:
    label = f"`{name}` port {port.number}"
    if port.link_layer is not None and port.link_layer.lower() != "infiniband":
        return Finding(Truth.NO, f"{label} is {port.link_layer}, not InfiniBand")
    if port.state == "INIT":
        return Finding(
            Truth.NO, f"{label} is INIT: the cable is connected but no subnet manager answers, start one (OpenSM)"
        )
    if port.state is not None and port.state != "ACTIVE":
        physical = f" (physical state {port.phys_state})" if port.phys_state else ""
        return Finding(Truth.NO, f"{label} is {port.state}{physical}: check the cable and the switch")
    if port.state is None or port.link_layer is None:
        missing = "state" if port.state is None else "link layer"
        return Finding(Truth.UNKNOWN, f"{label} does not tell its {missing}")
    if port.sm_lid == 0:
        return Finding(Truth.NO, f"{label} is ACTIVE but knows no subnet manager, start one (OpenSM)")
    return Finding(Truth.YES, f"{label} is ACTIVE")


def _judge_together(label: FabricLabel, chosen: Sequence[tuple[str, Port]]) -> Finding:
    if not chosen:
        return Finding(Truth.NO, "no HCA is named for it")
    prefixes = {port.gid_prefix: name for name, port in chosen if port.gid_prefix}
    if len(prefixes) > 1:
        said = ", ".join(f"`{name}` has {prefix}" for prefix, name in sorted(prefixes.items()))
        return Finding(Truth.NO, f"its HCAs are on different subnets: {said}")
    rates = [port.rate_gbps for _, port in chosen if port.rate_gbps is not None]
    words = ", ".join(f"`{name}` is ACTIVE" for name, _ in chosen)
    if rates:
        words += f" at {min(rates):g} Gb/s"
        if label.rate_gbps is not None and min(rates) < label.rate_gbps:
            words += f", slower than the {label.rate_gbps:g} Gb/s it is labelled with"
    return Finding(Truth.YES, words)


def _missing_words(name: str, hcas: Mapping[str, Hca], ib_root: str) -> str:
    if not hcas:
        return f"`{name}` is not on this node: `{ib_root}` has no InfiniBand device"
    return f"`{name}` is not on this node, which has {', '.join(f'`{other}`' for other in hcas)}"


def _read_port(tree: Tree, base: str, number: int) -> Port:
    sm_lid = tree.text(f"{base}/sm_lid")
    gid = tree.text(f"{base}/gids/0")
    return Port(
        number=number,
        state=parse_state(tree.text(f"{base}/state")),
        phys_state=(tree.text(f"{base}/phys_state") or "").partition(":")[2].strip() or None,
        link_layer=tree.text(f"{base}/link_layer") or None,
        rate_gbps=parse_rate(tree.text(f"{base}/rate")),
        sm_lid=int(sm_lid, 16) if sm_lid and re.fullmatch(r"0x[0-9a-fA-F]{1,8}", sm_lid) else None,
        gid_prefix=":".join(gid.split(":")[:4]) if gid and gid.count(":") == 7 else None,
    )
