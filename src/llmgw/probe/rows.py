"""What a GPU tool says of one GPU, and what that means: devices to place on, and their readings."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from llmgw.domain.facts import GpuFacts, GpuReading
from llmgw.domain.warnings import Concern


@frozen
class Instance:
    """One MIG instance; sizes None when the tool does not tell them."""

    uuid: str
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None


@frozen
class Row:
    """One GPU as a tool describes it. None: the tool says there is no such value.

    Args:
        mig: it is split into MIG instances; its own memory is then not one allocation.
        fault: why it does not answer, empty when it does.
        instances: of a MIG parent; None when they could not be listed.
        fabric: NVLink fabric state, such as `Completed`.
        sized: the tool can tell memory sizes, so that None means "has none of its own".
    """

    index: int | None
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    compute_cap: str | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    mig: bool = False
    fault: str = ""
    instances: tuple[Instance, ...] | None = None
    fabric: str | None = None
    driver: str | None = None
    sized: bool = True


@frozen
class Memory:
    """The host's memory, bytes: what a GPU without memory of its own uses."""

    total_bytes: int | None
    available_bytes: int | None


@frozen
class Devices:
    """What rows mean."""

    gpus: tuple[GpuFacts, ...]
    readings: tuple[GpuReading, ...]
    concerns: tuple[Concern, ...]


def devices(rows: Iterable[Row], memory: Memory) -> Devices:
    """Devices, readings and concerns of the rows of one listing.

    A healthy GPU that has no memory size of its own shares the host's: its total and free bytes are then the host's and
    `unified_memory` is set, so that whoever adds up counts them once. A faulty GPU and a MIG parent never do.
    """
    gpus: list[GpuFacts] = []
    readings: list[GpuReading] = []
    concerns: list[Concern] = []
    for row in rows:
        if row.fabric is not None and row.fabric.lower() not in ("completed", "not supported"):
            concerns.append(
                Concern(
                    "nvlink-fabric",
                    f"GPU {row.index}: its NVLink fabric is `{row.fabric}`, CUDA cannot start before it is `Completed`;"
                    " check the service `nvidia-fabricmanager`",
                    subject=_identity(row),
                )
            )
        if row.mig and not row.fault:
            _add_instances(row, gpus, readings, concerns)
            continue
        unified = row.sized and not row.fault and not row.total_bytes
        gpus.append(
            GpuFacts(
                uuid=_identity(row),
                index=row.index,
                name=row.name,
                pci_bus_id=row.pci_bus_id,
                memory_total_bytes=memory.total_bytes if unified else row.total_bytes or None,
                compute_cap=row.compute_cap,
                unified_memory=unified,
                faulty=row.fault,
            )
        )
        used = row.used_bytes
        if unified:
            used = None
            if memory.total_bytes is not None and memory.available_bytes is not None:
                used = max(0, memory.total_bytes - memory.available_bytes)
        readings.append(
            GpuReading(
                uuid=_identity(row),
                memory_free_bytes=memory.available_bytes if unified else row.free_bytes,
                memory_used_bytes=used,
                utilization_percent=row.utilization_percent,
                temperature_c=row.temperature_c,
            )
        )
    return Devices(tuple(gpus), tuple(readings), tuple(concerns))


def _add_instances(row: Row, gpus: list[GpuFacts], readings: list[GpuReading], concerns: list[Concern]) -> None:
    label = f"GPU {row.index} ({row.name or 'unnamed'}) is split by MIG"
    if row.instances is None:
        concerns.append(Concern("mig-unknown", f"{label}, but its instances cannot be listed", _identity(row)))
    elif not row.instances:
        concerns.append(
            Concern("mig-empty", f"{label}, but has no instances: create some, or disable MIG", _identity(row))
        )
    elif any(instance.total_bytes is None for instance in row.instances):
        concerns.append(
            Concern(
                "mig-size-unknown",
                f"{label}: `nvidia-smi` does not tell the memory of its instances; install `nvidia-ml-py` to know it",
                _identity(row),
            )
        )
    for instance in row.instances or ():
        gpus.append(
            GpuFacts(
                uuid=instance.uuid,
                index=row.index,
                name=instance.name,
                pci_bus_id=row.pci_bus_id,
                memory_total_bytes=instance.total_bytes,
                compute_cap=row.compute_cap,
            )
        )
        readings.append(
            GpuReading(
                uuid=instance.uuid,
                memory_free_bytes=instance.free_bytes,
                memory_used_bytes=instance.used_bytes,
                temperature_c=row.temperature_c,
            )
        )


def _identity(row: Row) -> str:
    """The UUID; for a GPU that has none, what CUDA_VISIBLE_DEVICES takes instead, or its place on the bus."""
    if row.uuid:
        return row.uuid
    return str(row.index) if row.index is not None else f"pci-{row.pci_bus_id or 'unknown'}"
