"""The NVIDIA driver: is one loaded, can programs use it, which CUDA does it support. In words."""

from __future__ import annotations

import os
import re

from attrs import frozen

from llmgw.domain.facts import Finding, GpuFacts, GpuReading, NvidiaFacts, Truth
from llmgw.domain.warnings import Concern
from llmgw.probe.gpus import Listing, listing
from llmgw.probe.gputools import GpuTools
from llmgw.probe.libraries import Libraries
from llmgw.probe.rows import Memory, devices
from llmgw.probe.smi import Failure, Smi, find
from llmgw.probe.tree import Tree

_VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")
# first driver that supports each CUDA version on Linux, newest first (the toolkits' release notes)
_CUDA = (
    ((610,), "13.3"), ((595,), "13.2"), ((590, 44, 1), "13.1"), ((580, 65, 6), "13.0"), ((575, 51, 3), "12.9"),
    ((570, 26), "12.8"), ((565,), "12.7"), ((560, 28), "12.6"), ((555, 42, 2), "12.5"), ((550, 54, 14), "12.4"),
    ((545, 23, 6), "12.3"), ((535, 54, 3), "12.2"), ((530, 30, 2), "12.1"), ((525, 60, 13), "12.0"),
)  # fmt: skip
_NVIDIA_PCI = "0x10de"


@frozen
class DriverFiles:
    """What the file tree alone tells.

    Args:
        loaded: a kernel module is loaded.
        version: its version, None when it has no number (some Jetsons).
        pci: addresses of NVIDIA display devices on the PCI bus, with the driver bound to each (None: none).
        control, uvm: /dev/nvidiactl and /dev/nvidia-uvm exist.
        modprobe: `nvidia-modprobe` can create missing device files.
        wsl: the GPU is a Windows host's.
        tegra: a Jetson's release line, None elsewhere.
    """

    loaded: bool
    version: str | None
    pci: tuple[tuple[str, str | None], ...] = ()
    control: bool = False
    uvm: bool = False
    modprobe: bool = False
    wsl: bool = False
    tegra: str | None = None


@frozen
class NvidiaLook:
    """Driver, devices and their readings. `gpus` None: there may be GPUs, but they could not be listed."""

    facts: NvidiaFacts
    gpus: tuple[GpuFacts, ...] | None
    readings: tuple[GpuReading, ...] = ()
    concerns: tuple[Concern, ...] = ()
    tool: str = ""


def parse_module_version(text: str) -> str | None:
    """The driver version in the first line of /proc/driver/nvidia/version (both forms) or a bare number."""
    match = _VERSION.search(text.strip().split("\n", 1)[0])
    return match[0] if match else None


def cuda_for_driver(version: str) -> str | None:
    """The highest CUDA version a driver supports, None below 525 or when `version` is no version."""
    parts = tuple(int(part) for part in version.split(".") if part.isdigit())
    return next((cuda for floor, cuda in _CUDA if parts >= floor), None)


def driver_files(tree: Tree) -> DriverFiles:
    """Look at sysfs, procfs and /dev."""
    module = tree.text("/sys/module/nvidia/version")
    proc = tree.text("/proc/driver/nvidia/version")
    return DriverFiles(
        loaded=module is not None or proc is not None,
        version=parse_module_version(module or "") or parse_module_version(proc or ""),
        pci=_pci_devices(tree),
        control=tree.exists("/dev/nvidiactl"),
        uvm=tree.exists("/dev/nvidia-uvm"),
        modprobe=any(os.access(tree.path(f"{d}/nvidia-modprobe"), os.X_OK) for d in ("/usr/bin", "/sbin", "/usr/sbin")),
        wsl=tree.exists("/dev/dxg"),
        tegra=(tree.text("/etc/nv_tegra_release") or "").split("\n", 1)[0] or None,
    )


def look(
    tree: Tree, tools: GpuTools, libraries: Libraries, memory: Memory, *, smi_setting: str, prefer_nvml: bool
) -> NvidiaLook:
    """Find out everything about the NVIDIA side of this node.

    Args:
        memory: the host's, for GPUs that share it.
        smi_setting: configured path of nvidia-smi, "" to look where drivers put it.
        prefer_nvml: use NVML when it is installed.
    """
    files = driver_files(tree)
    smi_path = find(tree, smi_setting)
    if smi_setting and smi_path is None:
        words = f"`discovery.nvidia_smi` names `{smi_setting}`, which is missing or not executable"
        return NvidiaLook(_facts(files, Truth.UNKNOWN if files.loaded else Truth.NO, words), None)
    if not files.loaded and not files.wsl and smi_path is None:
        return _without_driver(files)
    found = listing(
        tree, tools, Smi(smi_path, tools) if smi_path else None, use_nvml=prefer_nvml and (files.loaded or files.wsl)
    )
    if found.rows is None:
        return _broken(files, found.failure or Failure("other", "the GPUs could not be listed"), found)
    made = devices(found.rows, memory)
    concerns = (*found.concerns, *made.concerns)
    if not found.rows:
        none = _no_devices(files, f"`{found.tool}` lists no GPU")
        return NvidiaLook(none.facts, none.gpus, concerns=concerns)
    version, cuda = found.driver or files.version, found.cuda
    if cuda is None and version is not None:
        cuda = cuda_for_driver(version)
    truth, words = _usable(files, libraries, version, cuda, len(made.gpus))
    return NvidiaLook(
        NvidiaFacts(Finding(truth, words), version, cuda), made.gpus, made.readings, concerns, tool=found.tool
    )


def _usable(
    files: DriverFiles, libraries: Libraries, version: str | None, cuda: str | None, count: int
) -> tuple[Truth, str]:
    name = f"NVIDIA driver {version or '(no version number)'}"
    if libraries.find("libcuda.so.1") is None:
        return Truth.NO, (
            f"{name} is loaded but `libcuda.so.1` is missing: CUDA programs cannot start;"
            " install the driver's compute libraries, or pass them into this container"
        )
    if not files.wsl and files.tegra is None:
        if not files.control:
            return (
                Truth.NO,
                f"{name} is loaded but `/dev/nvidiactl` is missing: pass the GPU devices into this container",
            )
        if not files.uvm and not files.modprobe:
            return Truth.NO, (
                f"{name} is loaded but `/dev/nvidia-uvm` is missing and there is no `nvidia-modprobe` to create it:"
                " run `modprobe nvidia-uvm`, or pass the device into this container"
            )
    supports = f", supports CUDA up to {cuda}" if cuda else ""
    return Truth.YES, f"{name}{supports}, {count} device{'' if count == 1 else 's'}"


def _broken(files: DriverFiles, failure: Failure, found: Listing) -> NvidiaLook:
    """A driver, or its tools, without a list of GPUs. None, never (): nobody saw that there are none."""
    if failure.kind == "no-devices":
        look = _no_devices(files, failure.words)
        return NvidiaLook(look.facts, look.gpus, concerns=found.concerns)
    if not files.loaded and not files.wsl and not files.pci and failure.kind in ("down", "no-library", "other"):
        words = "no NVIDIA driver is loaded and no NVIDIA GPU is on the PCI bus (only its tools are installed)"
        return NvidiaLook(_facts(files, Truth.NO, words), ())
    if failure.kind == "missing" and files.tegra is not None:
        words = f"this is a Jetson ({files.tegra[:80]}) without `nvidia-smi`: its GPU cannot be listed"
        return NvidiaLook(_facts(files, Truth.UNKNOWN, words), None, concerns=found.concerns)
    code, words = {
        "mismatch": (
            "driver-mismatch",
            f"the NVIDIA driver was upgraded while {files.version or 'an older one'} is loaded"
            f"{f' (its library is {failure.library})' if failure.library else ''}: running engines live on, new ones"
            f" cannot use the GPUs; reboot this node ({failure.words})",
        ),
        "stuck": ("gpu-tool-stuck", failure.words),
        "silent": ("driver-broken", f"the NVIDIA driver does not answer: {failure.words}; look for `Xid` in `dmesg`"),
        "down": (
            "driver-broken",
            f"the NVIDIA driver is not running: {failure.words}; load it with `modprobe nvidia`, or reinstall it",
        ),
        "missing": (
            "driver-broken",
            f"NVIDIA driver {files.version or ''} is loaded but its GPUs cannot be listed: {failure.words}",
        ),
    }.get(failure.kind, ("driver-broken", f"the NVIDIA driver does not work: {failure.words}"))
    # a driver nobody could question is not known to be bad
    truth = Truth.UNKNOWN if failure.kind in ("stuck", "missing") else Truth.NO
    return NvidiaLook(_facts(files, truth, words), None, concerns=(*found.concerns, Concern(code, words)))


def _no_devices(files: DriverFiles, words: str) -> NvidiaLook:
    if files.pci:
        where = ", ".join(address for address, _ in files.pci)
        said = f"the driver sees no GPU although the PCI bus has {where}: {words}; look for `NVRM` in `dmesg`"
        return NvidiaLook(_facts(files, Truth.NO, said), None)
    return NvidiaLook(_facts(files, Truth.NO, f"no NVIDIA GPU on this node ({words})"), ())


def _without_driver(files: DriverFiles) -> NvidiaLook:
    if files.tegra is not None:
        words = f"this is a Jetson ({files.tegra[:80]}) without `nvidia-smi`: its GPU cannot be listed"
        return NvidiaLook(_facts(files, Truth.UNKNOWN, words), None)
    if not files.pci:
        return NvidiaLook(_facts(files, Truth.NO, "no NVIDIA driver is loaded and no NVIDIA GPU is on the PCI bus"), ())
    bound = "; ".join(f"{address} is {f'held by `{by}`' if by else 'held by no driver'}" for address, by in files.pci)
    words = (
        f"an NVIDIA GPU is on the PCI bus but its driver is not loaded ({bound}): install the NVIDIA driver to use it"
    )
    # nothing can be placed on a GPU without its driver: known, and said as a warning
    return NvidiaLook(_facts(files, Truth.NO, words), (), concerns=(Concern("gpu-without-driver", words),))


def _facts(files: DriverFiles, truth: Truth, words: str) -> NvidiaFacts:
    cuda = cuda_for_driver(files.version) if files.version else None
    return NvidiaFacts(Finding(truth, words), files.version, cuda)


def _pci_devices(tree: Tree) -> tuple[tuple[str, str | None], ...]:
    found: list[tuple[str, str | None]] = []
    for address in tree.names("/sys/bus/pci/devices"):
        base = f"/sys/bus/pci/devices/{address}"
        if tree.text(f"{base}/vendor") != _NVIDIA_PCI or not (tree.text(f"{base}/class") or "").startswith("0x03"):
            continue
        driver = tree.path(f"{base}/driver")
        found.append((address, driver.resolve().name if driver.exists() else None))
    return tuple(found)
