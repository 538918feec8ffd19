"""Nodes for tables: a small machine, connected, probed, with one engine ready; each argument changes one thing."""

from __future__ import annotations

from typing import Any

from llmgw.domain.engines import EngineSpec, EngineState, EngineStatus
from llmgw.domain.facts import (
    CpuFacts,
    Finding,
    GpuFacts,
    GpuReading,
    MemoryFacts,
    NodeFacts,
    NvidiaFacts,
    OsFacts,
    Readings,
    Truth,
    WeightsFile,
)
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaState, ReplicaStatus
from llmgw.domain.report import NodeReport, NodeView, Presence

GIB = 1 << 30
SPEC = EngineSpec("llama.cpp", "b1")
READY = EngineStatus("llama.cpp", "b1", "cpu", EngineState.READY, "ready: b1 for cpu", 1.0, usable=True)
QWEN = Profile("qwen", "/models/qwen.gguf")


def engine(state: EngineState, words: str, **more: Any) -> EngineStatus:
    return EngineStatus("llama.cpp", more.pop("version", "b1"), more.pop("build", None), state, words, 1.0, **more)


def facts(*, labels: dict[str, str] | None = None, gpus: tuple[GpuFacts, ...] | None = (), **more: Any) -> NodeFacts:
    return NodeFacts(
        hostname="h",
        boot_id="boot",
        os=OsFacts("debian"),
        cpu=CpuFacts("x86_64", 4),
        memory=MemoryFacts(16 * GIB, more.pop("limit_bytes", None)),
        nvidia=NvidiaFacts(Finding(Truth.NO, "no NVIDIA driver is loaded")),
        gpus=gpus,
        labels=labels or {},
        **more,
    )


def gpu(uuid: str, gib: int = 24, **more: Any) -> GpuFacts:
    return GpuFacts(uuid, name="H100", memory_total_bytes=gib * GIB, **more)


def weights(path: str, size: int, complete: Truth = Truth.YES, words: str = "complete") -> WeightsFile:
    return WeightsFile(path, size, "gguf", Finding(complete, words))


def node(
    node_id: str = "n1",
    *,
    presence: Presence = Presence.CONNECTED,
    words: str = "connected",
    engines: tuple[EngineStatus, ...] = (READY,),
    probed: bool = True,
    free: int | None = 8 * GIB,
    gpu_free: dict[str, int] | None = None,
    files: tuple[WeightsFile, ...] = (),
    replicas: tuple[ReplicaStatus, ...] = (),
    draining: bool = False,
    **more: Any,
) -> NodeView:
    readings = Readings(1.0, free, gpus=tuple(GpuReading(uuid, left) for uuid, left in (gpu_free or {}).items()))
    report = NodeReport(1, 1, 1, 5.0 if probed else None, None, readings, engines, replicas, files)
    return NodeView(node_id, presence, words, facts(**more), report, draining)


def status(
    replica_id: str, epoch: int, state: ReplicaState, words: str = "", port: int | None = 9000, **more: Any
) -> ReplicaStatus:
    profile = replica_id.split("#")[0]
    return ReplicaStatus(
        replica_id, epoch, profile, state, words or state.value, 1.0, host="10.0.0.1", port=port, **more
    )
