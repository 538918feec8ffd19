"""nvidia-smi: finding it, reading its CSV, and telling its failures apart. Its table is never read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from attrs import frozen

from llmgw.errors import CommandError
from llmgw.probe.gputools import STUCK, GpuTools
from llmgw.probe.tree import Tree
from llmgw.system.commands import Completed

# where the driver's own packages put it; PATH is never asked
_PLACES = (
    "/usr/bin/nvidia-smi", "/usr/local/bin/nvidia-smi", "/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi",
    "/usr/local/nvidia/bin/nvidia-smi", "/run/current-system/sw/bin/nvidia-smi", "/opt/bin/nvidia-smi",
)  # fmt: skip
_TIMEOUT_S = 30.0  # without persistence mode every call initialises every GPU
_ABSENT = {"", "n/a", "[n/a]", "not supported", "[not supported]", "[insufficient permissions]"}
_FAULTY = {"[unknown error]", "[gpu is lost]", "gpu is lost", "err!", "[err!]", "[gpu requires reset]"}
_LOST = re.compile(r"Unable to determine the device handle for GPU\s*([0-9A-Fa-f:.]+): (.+)")
_LIBRARY = re.compile(r"NVML library version: (\d+(?:\.\d+)+)")
_CUDA = re.compile(r"^CUDA (?:UMD )?version\s*:\s*(\d+\.\d+)\s*$", re.IGNORECASE | re.MULTILINE)
_GPU_LINE = re.compile(r"^GPU (\d+): .+ \(UUID: ([^)\s]+)\)")
_MIG_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)")


@frozen
class Failure:
    """Why nvidia-smi listed nothing.

    Args:
        kind: `missing`, `stuck`, `silent`, `mismatch`, `down`, `no-devices`, `lost`, `no-library` or `other`.
        words: what it said, or how it ended.
        library: version of the NVML library, when a mismatch names it.
    """

    kind: str
    words: str
    library: str | None = None


@frozen
class MigInstance:
    """One line of `nvidia-smi -L` below a GPU; `profile` is such as `3g.40gb`."""

    parent: int
    uuid: str
    profile: str


def find(tree: Tree, setting: str) -> str | None:
    """Path of nvidia-smi on this machine: the configured one, else where driver packages put it; None when absent."""
    if setting:
        return setting if os.access(setting, os.X_OK) else None
    return next((str(tree.path(place)) for place in _PLACES if os.access(tree.path(place), os.X_OK)), None)


def is_absent(cell: str) -> bool:
    """True for the cells that say "this GPU has no such value"."""
    return cell.strip().lower() in _ABSENT


def is_faulty(cell: str) -> bool:
    """True for the cells that say "the GPU does not answer"."""
    return cell.strip().lower() in _FAULTY


def number(cell: str) -> float | None:
    """A numeric cell, None for anything else."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def text(cell: str) -> str | None:
    """A text cell, None when absent or faulty."""
    return None if is_absent(cell) or is_faulty(cell) else cell.strip()


def parse_rows(stdout: str, fields: Sequence[str]) -> tuple[tuple[dict[str, str], ...], tuple[str, ...]]:
    """The CSV rows of a query as field -> cell, and the lines that are no rows.

    Errors are printed among the rows: a row begins with a number (ask for `index` first) and has all cells.
    """
    rows: list[dict[str, str]] = []
    rejected: list[str] = []
    for line in stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if cells[0].isdigit() and len(cells) == len(fields):
            rows.append(dict(zip(fields, cells, strict=True)))
        elif line.strip():
            rejected.append(line.strip())
    return tuple(rows), tuple(rejected)


def parse_instances(stdout: str) -> tuple[MigInstance, ...]:
    """The MIG instances in the output of `nvidia-smi -L`, in order."""
    found: list[MigInstance] = []
    parent: int | None = None
    for line in stdout.splitlines():
        if gpu := _GPU_LINE.match(line):
            parent = int(gpu[1])
        elif (mig := _MIG_LINE.match(line)) and parent is not None:
            found.append(MigInstance(parent, mig[3], mig[1]))
    return tuple(found)


def parse_cuda(stdout: str) -> str | None:
    """The highest CUDA version the driver supports, from `nvidia-smi --version` of any driver generation."""
    match = _CUDA.search(stdout)
    return match[1] if match else None


def parse_lost(lines: Sequence[str]) -> Mapping[str, str]:
    """PCI address (as sysfs writes it) -> what nvidia-smi says of a GPU it cannot open."""
    return {pci_address(match[1]): match[2].strip() for line in lines if (match := _LOST.search(line))}


def pci_address(bus_id: str) -> str:
    """`00000000:83:00.0` as sysfs writes it: `0000:83:00.0`."""
    domain, colon, rest = bus_id.strip().lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}{colon}{rest}"


def failure(done: Completed) -> Failure:
    """Classify a run that listed nothing, by its text first: exit codes differ between versions."""
    said = f"{done.stdout}\n{done.stderr}"
    line = next((line.strip() for line in said.splitlines() if line.strip()), "")
    quoted = f"`nvidia-smi` says: {line[:300].rstrip('.')}" if line else f"`nvidia-smi` {done.words()}"
    if done.timed_out:
        return Failure("silent", "`nvidia-smi` gave no answer in time and was stopped")
    if "version mismatch" in said or done.code == 18:
        library = _LIBRARY.search(said)
        return Failure("mismatch", quoted, library[1] if library else None)
    if "communicate with the NVIDIA driver" in said or done.code == 9:
        return Failure("down", quoted)
    if "No devices were found" in said or (done.code == 6 and not line):
        return Failure("no-devices", quoted)
    if _LOST.search(said) or "is lost" in said or done.code == 15:
        return Failure("lost", quoted)
    if done.code == 12 or "NVML Shared Library" in said:
        return Failure("no-library", quoted)
    return Failure("other", quoted)


class Smi:
    """nvidia-smi at `path`, run through the one door for GPU programs."""

    def __init__(self, path: str, tools: GpuTools) -> None:
        self.path = path
        self._tools = tools

    def query(
        self, fields: Sequence[str], bus_id: str | None = None
    ) -> tuple[tuple[dict[str, str], ...], tuple[str, ...], Failure | None]:
        """Ask for `fields` of all GPUs, or of the one at `bus_id`.

        Returns:
            Rows, lines that are no rows, and the failure: None when it exited 0 with rows only.
        """
        argv = [self.path, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        done = self._run([*argv, "-i", bus_id] if bus_id else argv)
        if isinstance(done, Failure):
            return (), (), done
        rows, rejected = parse_rows(done.stdout, fields)
        clean = done.code == 0 and bool(rows) and not rejected
        return rows, rejected, None if clean else failure(done)

    def instances(self) -> tuple[MigInstance, ...] | Failure:
        """The MIG instances of all GPUs."""
        done = self._run([self.path, "-L"])
        if isinstance(done, Failure):
            return done
        return parse_instances(done.stdout) if done.code == 0 else failure(done)

    def cuda(self) -> str | None:
        """The highest CUDA version the driver supports, None when this nvidia-smi does not tell."""
        done = self._run([self.path, "--version"])
        return None if isinstance(done, Failure) else parse_cuda(done.stdout)

    def _run(self, argv: list[str]) -> Completed | Failure:
        try:
            return self._tools.run(argv, _TIMEOUT_S)
        except CommandError as error:
            return Failure("stuck" if error.code == STUCK else "missing", error.words())
