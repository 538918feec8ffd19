"""What a person should know about a node that stops nothing, decided from its facts and readings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from llmgw.domain.facts import CpuFacts, DiskReading, NodeFacts, NodeWarning, Readings, Truth
from llmgw.units import format_size

DISK_LOW_BYTES = 5 * 10**9
DISK_LOW_FRACTION = 0.05
DISK_LOW_FRACTION_CAP = 20 * 10**9


@frozen
class Concern:
    """A warning before it has a date.

    `subject` tells concerns of one code apart (a path, a GPU, a fabric) while `words` may change from beat to beat.
    """

    code: str
    words: str
    subject: str = ""


def avx2_words(cpu: CpuFacts) -> str | None:
    """Why an x86-64 CPU without AVX2 is slow and what to do; None when it has AVX2, is no x86-64, or is not known."""
    if cpu.arch != "x86_64" or cpu.flags is None or "avx2" in cpu.flags:
        return None
    if cpu.virtual:
        advice = "set the VM's CPU type to `host` or `x86-64-v3`, then restart the VM"
    else:
        advice = "give this node small models only, or serve from its GPUs"
    return f"the CPU has no AVX2: engines run on it, about five times slower; {advice}"


def disk_concerns(disks: Iterable[DiskReading]) -> tuple[Concern, ...]:
    """One concern for each file system that is nearly full.

    Low is less than 5 GB, or less than 5 % where that is below 20 GB. Paths with the same free and total bytes are
    taken to be on one file system.
    """
    low: dict[tuple[int, int], list[str]] = {}
    for disk in disks:
        free, total = disk.free_bytes, disk.total_bytes
        if free is None or total is None or total <= 0:
            continue
        if free < DISK_LOW_BYTES or free < min(total * DISK_LOW_FRACTION, DISK_LOW_FRACTION_CAP):
            low.setdefault((free, total), []).append(disk.path)
    return tuple(
        Concern(
            "disk-low",
            f"only {format_size(free)} of {format_size(total)} free for {_list(paths)}: free some space,"
            " or engines and weights cannot be installed",
            subject=paths[0],
        )
        for (free, total), paths in low.items()
    )


def node_concerns(facts: NodeFacts, readings: Readings | None) -> tuple[Concern, ...]:
    """Everything facts and readings alone give reason to warn about."""
    found: list[Concern] = []
    slow = avx2_words(facts.cpu)
    if slow:
        found.append(Concern("no-avx2", slow))
    if facts.os.family == "alpine" and facts.os.glibc is None:
        found.append(
            Concern(
                "no-glibc", "this system has musl instead of glibc: prebuilt engines cannot run here; name your own"
            )
        )
    found += [
        Concern("gpu-faulty", f"GPU {gpu.name or gpu.uuid} at {gpu.pci_bus_id or '?'}: {gpu.faulty}", subject=gpu.uuid)
        for gpu in facts.gpus or ()
        if gpu.faulty
    ]
    found += [
        Concern("fabric-unusable", f"fabric `{fabric.name}`: {fabric.usable.words}", subject=fabric.name)
        for fabric in facts.fabrics
        if fabric.usable.value is not Truth.YES
    ]
    if facts.mgmt_addr is None:
        found.append(
            Concern(
                "no-mgmt-addr",
                "the address other machines reach this node at is not known: set `mgmt_addr` in agent.yaml",
            )
        )
    if readings is not None:
        found += disk_concerns(readings.disks)
    return tuple(found)


def dated(
    concerns: Iterable[Concern], before: Mapping[tuple[str, str], float], now: float
) -> tuple[tuple[NodeWarning, ...], dict[tuple[str, str], float]]:
    """Give each concern the time it began.

    Args:
        before: (code, subject) -> since, as returned last time.
        now: seconds since the epoch.

    Returns:
        The warnings, oldest kept dates first served, and the map to pass next time (ended concerns are forgotten).
    """
    since: dict[tuple[str, str], float] = {}
    warnings: list[NodeWarning] = []
    for concern in concerns:
        key = (concern.code, concern.subject)
        if key in since:
            continue
        since[key] = before.get(key, now)
        warnings.append(NodeWarning(concern.code, concern.words, since[key]))
    return tuple(warnings), since


def _list(paths: list[str]) -> str:
    quoted = [f"`{path}`" for path in paths]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1]
