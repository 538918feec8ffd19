"""Whether a node has the memory and the devices for a replica, counted free now: what strangers use is not free."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from llmgw.domain.estimate import Estimate
from llmgw.domain.facts import GpuFacts
from llmgw.domain.profiles import Profile
from llmgw.domain.report import NodeView
from llmgw.units import format_size

CPU_BUILD = "cpu"


@frozen
class Room:
    """Devices (uuids) the replica gets, none for the processor, and how it fits: words are made when asked for."""

    gpus: tuple[str, ...]
    told: str
    free_bytes: int | None = None

    def words(self) -> str:
        """How it fits."""
        return self.told if self.free_bytes is None else f"{self.told}, {format_size(self.free_bytes)} are free"


@frozen
class NoRoom:
    """Why it does not fit."""

    code: str
    words: str


@frozen
class Taken:
    """What one replica placed earlier takes here.

    Args:
        settled: the node's readings already count its memory.
        leaving: it stops first, so what it takes counts as free.
    """

    gpus: tuple[str, ...]
    memory_bytes: int | None
    settled: bool
    leaving: bool = False


def find_room(
    profile: Profile, need: Estimate, build: str | None, node: NodeView, taken: Sequence[Taken]
) -> Room | NoRoom:
    """Devices and memory for one replica of `profile` on `node`.

    `gpus: auto` takes the fewest free devices that hold the estimate, one when it is unknown, and the processor when
    the build uses no device or the node has none.

    Args:
        build: the engine's build on that node; `cpu` uses no device.
        taken: what our replicas placed there earlier take.
    """
    known = node.facts.gpus if node.facts is not None else None
    if profile.gpus == 0 or build == CPU_BUILD or (profile.gpus is None and not known):
        if profile.gpus:
            return NoRoom("gpus-unused", f"{profile.gpus} GPUs wanted, its engine is a `{build}` build")
        return _in_host_memory(need, node, taken)
    if known is None or not known:
        driver = f": {node.facts.nvidia.driver.words}" if node.facts is not None else ""
        has = "does not know its GPUs" if known is None else "has no GPU"
        return NoRoom("gpus-none", f"{has}, {profile.gpus} wanted{driver}")
    return _on_devices(profile, need, known, node, taken)


def _in_host_memory(need: Estimate, node: NodeView, taken: Sequence[Taken]) -> Room | NoRoom:
    reading = node.report.readings if node.report is not None else None
    free = reading.memory_available_bytes if reading is not None else None
    limit = node.facts.memory.limit_bytes if node.facts is not None else None
    if free is not None and limit is not None:
        free = min(free, limit)
    if need.memory_bytes is None:
        return Room((), need.words)
    if free is None:
        return Room((), "free memory not known, so it was not checked")
    coming = 0
    for item in taken:
        if item.gpus or item.settled is not item.leaving:
            continue
        if item.settled:
            free += item.memory_bytes or 0
        else:
            coming += item.memory_bytes or 0
    if need.memory_bytes > free - coming:
        also = f", of which {format_size(coming)} are for replicas still loading" if coming else ""
        return NoRoom("memory", f"needs {need.words}, {format_size(free)} are free{also}")
    return Room((), f"needs {need.words}", free - coming)


def _on_devices(
    profile: Profile, need: Estimate, known: Sequence[GpuFacts], node: NodeView, taken: Sequence[Taken]
) -> Room | NoRoom:
    claimed = {uuid for item in taken if not item.leaving for uuid in item.gpus}
    usable = [gpu for gpu in known if not gpu.faulty]
    if not usable:
        return NoRoom("gpus-faulty", f"none of its {len(known)} GPUs is usable: {known[0].faulty}")
    idle = [gpu for gpu in usable if gpu.uuid not in claimed]
    wanted = profile.gpus or 1
    if len(idle) < wanted:
        return NoRoom(
            "gpus-taken", f"{wanted} GPUs wanted, {len(idle)} of {len(known)} are not taken by other replicas"
        )
    reading = node.report.readings if node.report is not None else None
    free = {item.uuid: item.memory_free_bytes for item in (reading.gpus if reading is not None else ())}
    for item in taken:
        for uuid in item.gpus if item.leaving and item.settled else ():
            left = free.get(uuid)
            free[uuid] = left + (item.memory_bytes or 0) // len(item.gpus) if left is not None else None
    # unknown free memory is neither small nor large: such a device is taken after those that are known to fit
    idle.sort(key=lambda gpu: (-(free.get(gpu.uuid) or 0), gpu.uuid))
    if need.memory_bytes is None:
        return Room(tuple(gpu.uuid for gpu in idle[:wanted]), need.words)
    most = wanted if profile.gpus else len(idle)
    for count in range(wanted, most + 1):
        share = need.memory_bytes / count
        roomy = [gpu for gpu in idle if (has := free.get(gpu.uuid)) is None or has >= share]
        if len(roomy) >= count:
            chosen = tuple(gpu.uuid for gpu in roomy[:count])
            return Room(chosen, f"needs {need.words} on {count} GPU{'s' if count > 1 else ''}")
    best = sum(free.get(gpu.uuid) or 0 for gpu in idle[:most])
    return NoRoom("gpu-memory", f"needs {need.words}, {format_size(best)} are free on {most} of its GPUs")
