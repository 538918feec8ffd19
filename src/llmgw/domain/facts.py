"""What a node is (facts, rarely change) and how it is right now (readings, change each beat).

A value that could not be found out is None, never 0 or "": unknown is not absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import field, frozen


class Truth(StrEnum):
    """Three-valued truth. `unknown` is never treated as `no`."""

    UNKNOWN = "unknown"
    NO = "no"
    YES = "yes"


@frozen
class Finding:
    """A three-valued statement with the sentence a person can act on."""

    value: Truth
    words: str


@frozen
class OsFacts:
    """The operating system.

    Args:
        id: os-release ID, such as `debian`.
        version: os-release VERSION_ID.
        name: pretty name.
        family: how packages are installed: `debian`, `rhel`, `suse`, `arch`, `alpine`; None when it takes no packages.
        kernel: `uname -r`.
        glibc: version such as `2.36`; None on musl or when unknown.
        libstdcxx: highest GLIBCXX version of the installed libstdc++, such as `3.4.30`.
        immutable: packages cannot be installed (ostree, NixOS, Talos, …).
    """

    id: str
    version: str | None = None
    name: str | None = None
    family: str | None = None
    kernel: str | None = None
    glibc: str | None = None
    libstdcxx: str | None = None
    immutable: bool = False


@frozen
class CpuFacts:
    """The processor. `flags` are those the kernel enables on every processor; `level` is the x86-64 level (1-4)."""

    arch: str
    cores: int | None = None
    name: str | None = None
    flags: tuple[str, ...] | None = None
    level: int | None = None
    virtual: bool | None = None


@frozen
class MemoryFacts:
    """`limit_bytes` is the smallest cgroup limit above the agent, None when there is none."""

    total_bytes: int | None = None
    limit_bytes: int | None = None


@frozen
class GpuFacts:
    """One GPU or MIG instance. `uuid` is the identity; `index` may change at each boot."""

    uuid: str
    index: int | None = None
    name: str | None = None
    vendor: str = "nvidia"
    pci_bus_id: str | None = None
    memory_total_bytes: int | None = None
    compute_cap: str | None = None
    unified_memory: bool = False
    faulty: str = ""


@frozen
class NvidiaFacts:
    """`driver`: is an NVIDIA driver loaded and usable, in words. `cuda` is the highest CUDA version it supports."""

    driver: Finding
    version: str | None = None
    cuda: str | None = None


@frozen
class FabricFacts:
    """One labelled InfiniBand fabric of the agent's configuration and whether this node is on it."""

    name: str
    hcas: tuple[str, ...]
    rate_gbps: float | None = None
    usable: Finding = Finding(Truth.UNKNOWN, "not looked at yet")
    interfaces: tuple[str, ...] = ()


@frozen
class NodeFacts:
    """Everything about a node that rarely changes. `revision` changes when any of it does."""

    hostname: str
    boot_id: str
    os: OsFacts
    cpu: CpuFacts
    memory: MemoryFacts
    nvidia: NvidiaFacts
    gpus: tuple[GpuFacts, ...] | None = None
    fabrics: tuple[FabricFacts, ...] = ()
    labels: Mapping[str, str] = field(factory=dict)
    mgmt_addr: str | None = None
    model_dirs: tuple[str, ...] = ()
    revision: str = ""


@frozen
class GpuReading:
    """Free memory of a GPU now, counting what strangers use."""

    uuid: str
    memory_free_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None


@frozen
class DiskReading:
    """Free space on the file system that holds `path` (or its nearest existing parent)."""

    path: str
    free_bytes: int | None = None
    total_bytes: int | None = None


@frozen
class Readings:
    """How the node is right now; `at` is seconds since the epoch by the node's clock."""

    at: float
    memory_available_bytes: int | None = None
    load_1m: float | None = None
    disks: tuple[DiskReading, ...] = ()
    gpus: tuple[GpuReading, ...] = ()


@frozen
class NodeWarning:
    """Something a person should know that stops nothing."""

    code: str
    words: str
    since: float


@frozen
class WeightsFile:
    """A model file on a node. `complete` is no while it is being fetched or when its header does not parse.

    `cache_bytes_per_token`: what a token takes in a 16-bit key/value cache by the header; None when that does not say.
    """

    path: str
    size_bytes: int
    format: str
    complete: Finding
    fingerprint: str = ""
    cache_bytes_per_token: int | None = None
