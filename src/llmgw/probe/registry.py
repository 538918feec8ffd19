"""Merges all facts of a node. One that cannot be found out becomes unknown, with words, and never stops the others."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import attrs
from attrs import evolve, field, frozen

from llmgw.domain.devices import DeviceMemory
from llmgw.domain.facts import (
    CpuFacts,
    DiskReading,
    FabricFacts,
    Finding,
    GpuReading,
    MemoryFacts,
    NodeFacts,
    NodeWarning,
    NvidiaFacts,
    OsFacts,
    Readings,
    Truth,
    WeightsFile,
)
from llmgw.domain.warnings import Concern, dated, node_concerns
from llmgw.errors import CommandError, FileError, LlmgwError
from llmgw.probe import address, gpus, host, memory, nvidia
from llmgw.probe.background import Latest
from llmgw.probe.cpu import CpuName, cpu_facts
from llmgw.probe.fabrics import FabricLabel, fabric_facts, read_hcas
from llmgw.probe.gputools import STUCK, GpuTools
from llmgw.probe.libraries import Libraries
from llmgw.probe.othergpus import other_gpu_concerns
from llmgw.probe.rows import Memory, Row, devices
from llmgw.probe.smi import Failure, Smi, find
from llmgw.probe.tree import Tree
from llmgw.probe.weights import WeightsScanner
from llmgw.system.clock import Clock
from llmgw.system.commands import Runner
from llmgw.system.files import free_space
from llmgw.units import format_duration

_LOG = logging.getLogger("llmgw.probe")
_DISK_WAIT_S = 0.3
_DISK_MAX_AGE_S = 60.0
_GPU_AWAITED_S = 1.0
T = TypeVar("T")


@frozen
class ProbeSettings:
    """What the probe needs of agent.yaml.

    Args:
        nvidia_smi: path of nvidia-smi; "" looks where drivers put it.
        ib_root: where the kernel lists HCAs.
        prefer_nvml: use NVML when `nvidia-ml-py` is installed.
        fabrics: the labelled fabrics, (name, hcas, rate_gbps) each.
        labels: of the node.
        mgmt_addr, mgmt_interface: as configured, None when not.
        server_host, server_port: the control plane, to find the route to it.
        model_dirs: every directory weights are looked for in, the one fetched weights land in included.
        engines_dir, work_dir: of the agent; the CPU's name is remembered in `work_dir`.
        root: of the file tree facts are read from.
        gpu_interval_s, weights_interval_s: least time between two looks in the background.
    """

    nvidia_smi: str = ""
    ib_root: str = "/sys/class/infiniband"
    prefer_nvml: bool = True
    fabrics: tuple[FabricLabel | tuple[str, tuple[str, ...], float | None], ...] = ()
    labels: dict[str, str] = field(factory=dict)
    mgmt_addr: str | None = None
    mgmt_interface: str | None = None
    server_host: str | None = None
    server_port: int = 7443
    model_dirs: tuple[str, ...] = ()
    engines_dir: str = "/opt/llmgw/engines"
    work_dir: str = "/var/lib/llmgw-agent"
    root: str = "/"
    gpu_interval_s: float = 10.0
    weights_interval_s: float = 30.0


class Registry:
    """Everything the agent knows about its node.

    `probe` is slow and for one thread at a time; `readings`, `weights` and `warnings` are for the heartbeat: they never
    wait for a GPU, and for a disk at most a fraction of a second.
    """

    def __init__(self, settings: ProbeSettings, runner: Runner, clock: Clock) -> None:
        self._settings = settings
        self._runner = runner
        self._clock = clock
        self._tree = Tree(settings.root)
        self._tools = GpuTools(self._tree, runner)
        self._cpu_name = CpuName(self._tree, runner, settings.work_dir)
        self._scanner = WeightsScanner(settings.model_dirs)
        self._scanning = threading.Lock()
        self._facts: NodeFacts | None = None
        self._probed_at: float | None = None
        self._concerns: tuple[Concern, ...] = ()
        self._gpu_tool = ""
        self._since: dict[tuple[str, str], float] = {}
        self._dating = threading.Lock()
        self._disks = Latest("probe-disks", self._read_disks, clock, 0.0)
        self._gpus = Latest("probe-gpus", self._read_gpus, clock, settings.gpu_interval_s)
        self._weights = Latest("probe-weights", self._scan, clock, settings.weights_interval_s)

    @property
    def facts(self) -> NodeFacts | None:
        """Facts of the last probe, None before the first."""
        return self._facts

    @property
    def probed_at(self) -> float | None:
        """When the last probe ended, seconds since the epoch; None: has not looked yet, empty lists mean nothing."""
        return self._probed_at

    def probe(self) -> NodeFacts:
        """Look at everything, weights included. Takes seconds; a hanging GPU tool costs its timeout once."""
        concerns: list[Concern] = []

        def attempt(fact: str, make: Callable[[], T], fallback: T) -> T:
            try:
                return make()
            except Exception as error:
                concerns.append(Concern("probe-failed", f"could not find out {fact}: {_words(error)}", subject=fact))
                if not isinstance(error, LlmgwError):
                    _LOG.warning("could not find out %s", fact, exc_info=True)
                return fallback

        settings, tree = self._settings, self._tree
        arch = os.uname().machine
        libraries = Libraries(tree, self._runner, arch)
        boot = attempt("the boot id", lambda: host.boot_id(tree), "unknown")
        name = attempt("the CPU's name", lambda: self._cpu_name.get(boot), None)
        mem = attempt("the memory", lambda: memory.memory_facts(tree), MemoryFacts())
        gpus_began = self._clock.monotonic()
        nvidia_look = attempt(
            "the GPUs",
            lambda: nvidia.look(
                tree,
                self._tools,
                libraries,
                Memory(mem.total_bytes, memory.available_bytes(tree)),
                smi_setting=settings.nvidia_smi,
                prefer_nvml=settings.prefer_nvml,
            ),
            nvidia.NvidiaLook(NvidiaFacts(Finding(Truth.UNKNOWN, "the NVIDIA driver could not be looked at")), None),
        )
        fabrics = attempt("the fabrics", self._look_at_fabrics, self._unknown_fabrics())
        mgmt = attempt("the management address", self._management_address, None)
        concerns += nvidia_look.concerns
        concerns += attempt("other GPUs", lambda: other_gpu_concerns(tree), ())
        fabric_interfaces = {interface for fabric in fabrics for interface in fabric.interfaces}
        if mgmt is not None and mgmt.interface in fabric_interfaces:
            concerns.append(
                Concern(
                    "mgmt-on-fabric",
                    f"the management address {mgmt.address} is on the fabric interface `{mgmt.interface}`:"
                    " set `mgmt_interface` to an Ethernet interface",
                )
            )
        facts = NodeFacts(
            hostname=attempt("the host name", lambda: host.hostname(tree), "unknown"),
            boot_id=boot,
            os=attempt(
                "the operating system", lambda: host.os_facts(tree, self._runner, libraries), OsFacts(id="unknown")
            ),
            cpu=attempt("the CPU", lambda: cpu_facts(tree, arch, name), CpuFacts(arch=arch, name=name)),
            memory=mem,
            nvidia=nvidia_look.facts,
            gpus=nvidia_look.gpus,
            fabrics=fabrics,
            labels=dict(settings.labels),
            mgmt_addr=mgmt.address if mgmt is not None else None,
            model_dirs=settings.model_dirs,
        )
        facts = evolve(facts, revision=revision(facts))
        self._gpu_tool = nvidia_look.tool
        self._gpus.put(nvidia_look.readings, gpus_began)
        nothing: tuple[tuple[WeightsFile, ...], tuple[str, ...]] = ((), ())
        self._weights.put(attempt("the weights", self._scan, nothing))
        self._concerns = tuple(concerns)
        self._facts = facts
        self._probed_at = self._clock.now()
        return facts

    def readings(self) -> Readings:
        """How the node is now. GPU values come from the background; those older than a minute or so are unknown."""
        facts = self._facts
        stale_s = max(60.0, 4 * self._settings.gpu_interval_s)
        measured = {reading.uuid: reading for reading in self._gpus.get(0.0, stale_s) or ()} if facts else {}
        listed = facts.gpus or () if facts is not None else ()
        disks = self._disks.get(_DISK_WAIT_S, _DISK_MAX_AGE_S)
        return Readings(
            at=self._clock.now(),
            memory_available_bytes=memory.available_bytes(self._tree),
            load_1m=memory.load_1m(self._tree),
            disks=disks if disks is not None else tuple(DiskReading(path) for path in self._disk_paths()),
            gpus=tuple(measured.get(gpu.uuid, GpuReading(gpu.uuid)) for gpu in listed),
        )

    def gpu_memory(self) -> Mapping[str, DeviceMemory] | None:
        """Memory of each GPU by uuid as last read; None before the first probe and while it cannot be read.

        Never waits; asked again and again, it is read anew every second. A GPU is missing when its memory is unknown,
        and when it is the host's own: that comes and goes with every process of the node.
        """
        facts = self._facts
        dated = self._gpus.dated(_GPU_AWAITED_S) if facts is not None and facts.gpus else None
        if facts is None or dated is None or self._gpus.error is not None:
            return None
        own = {gpu.uuid: gpu.memory_total_bytes for gpu in facts.gpus or () if not gpu.unified_memory}
        readings, began = dated
        return {
            each.uuid: DeviceMemory(each.memory_free_bytes, own[each.uuid], began)
            for each in readings
            if each.memory_free_bytes is not None and each.uuid in own
        }

    def weights(self) -> tuple[WeightsFile, ...]:
        """Model files as of the last scan; a new scan begins in the background when one is due."""
        found = self._weights.get()
        return found[0] if found is not None else ()

    def warnings(self, facts: NodeFacts | None, readings: Readings | None) -> tuple[NodeWarning, ...]:
        """Everything worth a person's attention; `since` stays while a warning lasts."""
        concerns: list[Concern] = []
        if facts is not None:
            concerns += node_concerns(facts, readings)
            concerns += [c for c in self._concerns if c.code != "nvml-missing" or facts.gpus]
        scanned = self._weights.get()
        if scanned is not None:
            concerns += [Concern("weights-unreadable", note, subject=note) for note in scanned[1]]
        if (error := self._weights.error) is not None:
            concerns.append(Concern("weights-unreadable", f"could not look for weights: {_words(error)}"))
        if (error := self._gpus.error) is not None:
            code = STUCK if getattr(error, "code", "") == STUCK else "gpu-readings"
            concerns.append(Concern(code, _words(error)))
        for latest, what in ((self._disks, "a disk"), (self._weights, "a model directory")):
            if latest.hanging_s() > _DISK_MAX_AGE_S:
                hanging = format_duration(latest.hanging_s() // 60 * 60)
                concerns.append(
                    Concern("disk-hangs", f"{what} has not answered for {hanging}: check network mounts", subject=what)
                )
        with self._dating:
            warnings, self._since = dated(concerns, self._since, self._clock.now())
        return warnings

    def _management_address(self) -> address.Address | None:
        wanted = self._settings
        return address.management_address(
            wanted.mgmt_addr, wanted.mgmt_interface, wanted.server_host, wanted.server_port
        )

    def _labels(self) -> tuple[FabricLabel, ...]:
        return tuple(FabricLabel(name, tuple(hcas), rate) for name, hcas, rate in self._settings.fabrics)

    def _look_at_fabrics(self) -> tuple[FabricFacts, ...]:
        hcas = read_hcas(self._tree, self._settings.ib_root) if self._settings.fabrics else {}
        return tuple(fabric_facts(label, hcas, self._settings.ib_root) for label in self._labels())

    def _unknown_fabrics(self) -> tuple[FabricFacts, ...]:
        unknown = Finding(Truth.UNKNOWN, "could not be looked at")
        return tuple(FabricFacts(label.name, label.hcas, label.rate_gbps, unknown) for label in self._labels())

    def _scan(self) -> tuple[tuple[WeightsFile, ...], tuple[str, ...]]:
        with self._scanning:
            return self._scanner.scan()

    def _disk_paths(self) -> tuple[str, ...]:
        wanted = (*self._settings.model_dirs, self._settings.engines_dir, self._settings.work_dir)
        return tuple(dict.fromkeys((*wanted, tempfile.gettempdir())))

    def _read_disks(self) -> tuple[DiskReading, ...]:
        found: list[DiskReading] = []
        for path in self._disk_paths():
            try:
                space = free_space(Path(path))
            except (FileError, OSError):
                found.append(DiskReading(path))
            else:
                found.append(DiskReading(path, space.free_bytes, space.total_bytes))
        return tuple(found)

    def _read_gpus(self) -> tuple[GpuReading, ...]:
        if self._gpu_tool not in ("NVML", "nvidia-smi"):
            return ()
        path = find(self._tree, self._settings.nvidia_smi)
        smi = Smi(path, self._tools) if path else None
        rows: tuple[Row, ...] | Failure | None
        if self._gpu_tool == "NVML" or smi is None:
            found = gpus.listing(self._tree, self._tools, smi, use_nvml=self._gpu_tool == "NVML")
            rows = found.rows if found.rows is not None else found.failure
        else:
            rows = gpus.quick_rows(smi)
        if rows is None or isinstance(rows, Failure):
            words = rows.words if rows is not None else "the GPUs could not be listed"
            stuck = rows is not None and rows.kind == "stuck"
            raise CommandError(f"GPU memory cannot be read: {words}", code=STUCK if stuck else "gpu-readings")
        known = Memory(memory.memory_facts(self._tree).total_bytes, memory.available_bytes(self._tree))
        return devices(rows, known).readings


def _words(error: Exception) -> str:
    if not isinstance(error, LlmgwError):
        return f"{type(error).__name__}: {error}"
    return f"{error.words()}; {error.hint}" if error.hint else error.words()


def revision(facts: NodeFacts) -> str:
    """A hash that changes when any fact does."""
    content = attrs.asdict(evolve(facts, revision=""))
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
