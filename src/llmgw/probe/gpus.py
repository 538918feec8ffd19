"""The node's NVIDIA GPUs: by NVML when wanted and installed, else by nvidia-smi, else by the kernel module's list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from llmgw.domain.warnings import Concern
from llmgw.errors import CommandError
from llmgw.probe import nvml
from llmgw.probe.gputools import STUCK, GpuTools
from llmgw.probe.rows import Instance, Row
from llmgw.probe.smi import Failure, Smi, is_absent, is_faulty, number, parse_lost, pci_address, text
from llmgw.probe.tree import Tree

# every driver in use knows these; one unknown field fails a whole query, so the others are asked for apart
FIELDS = (
    "index", "uuid", "name", "pci.bus_id", "memory.total", "memory.used", "memory.free", "driver_version",
    "mig.mode.current", "utilization.gpu", "temperature.gpu",
)  # fmt: skip
NEWER = ("index", "compute_cap", "fabric.state")
_OLDER = ("index", "compute_cap")
_HEALTH = ("uuid", "name", "pci.bus_id", "memory.total", "memory.used", "memory.free")
_MIB = 1 << 20


@frozen
class Listing:
    """What could be found out about the GPUs.

    Args:
        rows: None when they could not be listed; then `failure` says why.
        driver, cuda: as the tool tells them.
        tool: `NVML`, `nvidia-smi` or `/proc`.
    """

    rows: tuple[Row, ...] | None
    tool: str
    failure: Failure | None = None
    driver: str | None = None
    cuda: str | None = None
    concerns: tuple[Concern, ...] = ()


def parse_gpu(cells: Mapping[str, str]) -> Row:
    """One row of the query for FIELDS, merged with NEWER where known."""
    mib = {name: number(cells.get(f"memory.{name}", "")) for name in ("total", "used", "free")}
    index, bus = number(cells.get("index", "")), text(cells.get("pci.bus_id", ""))
    sick = next((cells[name] for name in _HEALTH if is_faulty(cells.get(name, ""))), "")
    fabric = cells.get("fabric.state", "")
    return Row(
        index=int(index) if index is not None else None,
        uuid=text(cells.get("uuid", "")),
        name=text(cells.get("name", "")),
        pci_bus_id=pci_address(bus) if bus else None,
        total_bytes=_bytes(mib["total"]),
        used_bytes=_bytes(mib["used"]),
        free_bytes=_bytes(mib["free"]),
        compute_cap=text(cells.get("compute_cap", "")),
        utilization_percent=number(cells.get("utilization.gpu", "")),
        temperature_c=number(cells.get("temperature.gpu", "")),
        mig=cells.get("mig.mode.current", "").strip().lower() == "enabled",
        fault=f"`nvidia-smi` says: {sick.strip('[]')}" if sick else "",
        fabric=None if is_absent(fabric) or is_faulty(fabric) else fabric,
        driver=text(cells.get("driver_version", "")),
        sized="permission" not in cells.get("memory.total", "").lower(),
    )


def cards(tree: Tree) -> Mapping[str, Mapping[str, str]]:
    """The cards the loaded kernel module drives: PCI address -> fields of its `information` file."""
    found: dict[str, Mapping[str, str]] = {}
    for address in tree.names("/proc/driver/nvidia/gpus"):
        lines = (tree.text(f"/proc/driver/nvidia/gpus/{address}/information") or "").splitlines()
        pairs = (line.partition(":") for line in lines)
        found[address.lower()] = {key.strip(): value.strip() for key, colon, value in pairs if colon}
    return found


def listing(tree: Tree, tools: GpuTools, smi: Smi | None, *, use_nvml: bool) -> Listing:
    """List the GPUs in full: facts and readings."""
    concerns: list[Concern] = []
    if use_nvml:
        if nvml.installed():
            by_nvml = _by_nvml(tools)
            if by_nvml.rows is not None or (by_nvml.failure is not None and by_nvml.failure.kind == "stuck"):
                return by_nvml
            assert by_nvml.failure is not None
            concerns.append(Concern("nvml-failed", f"NVML does not work here: {by_nvml.failure.words}; fell back"))
        else:
            concerns.append(
                Concern(
                    "nvml-missing",
                    "`discovery.prefer_nvml` is on but `nvidia-ml-py` is not installed: GPUs are read by `nvidia-smi`",
                )
            )
    found = _by_smi(tree, smi) if smi is not None else _by_kernel(tree)
    return evolve(found, concerns=(*concerns, *found.concerns))


def quick_rows(smi: Smi) -> tuple[Row, ...] | Failure:
    """The readings of all GPUs by one query; MIG parents come without instances."""
    rows, _, failure = smi.query(FIELDS)
    if not rows:
        return failure or Failure("other", "`nvidia-smi` listed nothing")
    return tuple(parse_gpu(cells) for cells in rows)


def _by_nvml(tools: GpuTools) -> Listing:
    try:
        answer = nvml.ask(tools)
    except CommandError as error:
        return Listing(None, "NVML", Failure("stuck" if error.code == STUCK else "other", error.words()))
    if answer.error:
        return Listing(None, "NVML", Failure("other", f"NVML says: {answer.error}"))
    return Listing(answer.rows, "NVML", driver=answer.driver, cuda=answer.cuda)


def _by_smi(tree: Tree, smi: Smi) -> Listing:
    cells, rejected, failure = smi.query(FIELDS)
    if failure is not None and failure.kind in ("stuck", "silent", "missing", "mismatch", "down", "no-devices"):
        return Listing(None, "nvidia-smi", failure)
    rows = [parse_gpu(row) for row in cells]
    if failure is not None:
        rows += _one_by_one(tree, smi, rows, rejected)
        if not rows:
            return Listing(None, "nvidia-smi", failure)
    newer = _newer(smi)
    rows = [
        evolve(row, compute_cap=parsed.compute_cap, fabric=parsed.fabric)
        if row.index is not None and (parsed := newer.get(row.index)) is not None
        else row
        for row in rows
    ]
    if any(row.mig for row in rows):
        rows = _with_instances(smi, rows)
    driver = next((row.driver for row in rows if row.driver), None)
    return Listing(tuple(rows), "nvidia-smi", driver=driver, cuda=smi.cuda())


def _one_by_one(tree: Tree, smi: Smi, known: Sequence[Row], rejected: Sequence[str]) -> list[Row]:
    """One lost GPU can fail the whole listing: ask for each card that is not in it by itself."""
    seen = {row.pci_bus_id for row in known}
    said = dict(parse_lost(rejected))
    listed = cards(tree)
    found: list[Row] = []
    for address in sorted({*listed, *said} - seen):
        cells, lines, failure = smi.query(FIELDS, address)
        if cells:
            found.append(parse_gpu(cells[0]))
            continue
        if failure is not None and failure.kind == "stuck":
            break
        words = parse_lost(lines).get(address) or said.get(address)
        told = (
            f"`nvidia-smi` says: {words.rstrip('.')}" if words else failure.words if failure else "it does not answer"
        )
        found.append(_from_kernel(address, listed.get(address, {}), fault=told))
    return found


def _newer(smi: Smi) -> dict[int, Row]:
    rows, _, failure = smi.query(NEWER)
    if not rows and (failure is None or failure.kind == "other"):
        rows, _, _ = smi.query(_OLDER)
    parsed = (parse_gpu(cells) for cells in rows)
    return {row.index: row for row in parsed if row.index is not None}


def _with_instances(smi: Smi, rows: Sequence[Row]) -> list[Row]:
    found = smi.instances()
    if isinstance(found, Failure):
        return list(rows)
    return [
        evolve(
            row,
            instances=tuple(
                Instance(mig.uuid, f"{row.name or 'GPU'} MIG {mig.profile}") for mig in found if mig.parent == row.index
            ),
        )
        if row.mig
        else row
        for row in rows
    ]


def _by_kernel(tree: Tree) -> Listing:
    """Without any tool the kernel module still names its cards; their memory stays unknown."""
    listed = cards(tree)
    if not listed:
        return Listing(None, "/proc", Failure("missing", "`nvidia-smi` is not installed"))
    concern = Concern(
        "nvidia-smi-missing",
        "`nvidia-smi` is not installed: the GPUs are known by name, their memory is not;"
        " install the driver's utilities, or name it as `discovery.nvidia_smi`",
    )
    rows = tuple(_from_kernel(address, fields) for address, fields in sorted(listed.items()))
    return Listing(rows, "/proc", concerns=(concern,))


def _from_kernel(address: str, fields: Mapping[str, str], fault: str = "") -> Row:
    uuid = fields.get("GPU UUID", "")
    return Row(
        index=None,
        uuid=uuid if re.fullmatch(r"GPU-[0-9a-fA-F-]+", uuid) else None,  # "GPU-????…" until it is initialised
        name=fields.get("Model") or None,
        pci_bus_id=address,
        fault=fault,
        sized=False,
    )


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else round(mib * _MIB)
