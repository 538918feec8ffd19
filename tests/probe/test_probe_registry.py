from __future__ import annotations

import os
import platform
import threading
import time

import pytest
from gguf_maker import QWEN, gguf, tensor
from probe_fakes import captures, make_tree

from llmgw.domain.facts import Truth
from llmgw.probe import registry as registry_module
from llmgw.probe.background import Latest
from llmgw.probe.gputools import STUCK
from llmgw.probe.registry import ProbeSettings, Registry, revision
from llmgw.system.clock import RealClock
from llmgw.system.commands import Completed, RealRunner

H200 = captures()["nvidia-h200__590.48.01 (idle)"]
FIELDS = tuple(H200)
NO_AVX2 = "processor\t: 0\nmodel name\t: Common KVM processor\nflags\t\t: fpu sse sse2 lm hypervisor\n"
MACHINE = {
    "/etc/os-release": 'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    "/proc/cpuinfo": NO_AVX2,
    "/proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   25165824 kB\n",
    "/proc/loadavg": "0.52 0.58 0.59 1/389 12345\n",
    "/proc/sys/kernel/random/boot_id": "b00t\n",
    "/proc/sys/kernel/hostname": "gpu-7\n",
    "/proc/sys/kernel/osrelease": "6.1.0-37-amd64\n",
}
DRIVER = {
    "/sys/module/nvidia/version": "590.48.01\n",
    "/dev/nvidiactl": "",
    "/dev/nvidia-uvm": "",
    f"/usr/lib/{platform.machine()}-linux-gnu/libcuda.so.1": "",
}
# a program that answers the way nvidia-smi does, from a file of rows beside it
SMI = r"""#!/bin/sh
here="${0%/*}"
[ -e "$here/broken" ] && { cat "$here/broken"; exit 9; }
case "$1" in
  --version) echo "CUDA Version        : 13.1"; exit 0;;
  --query-gpu=index,uuid,name*) cat "$here/rows"; exit 0;;
  --query-gpu=index,compute_cap,fabric.state) echo "0, 9.0, Completed"; exit 0;;
esac
exit 2
"""


class Clock(RealClock):
    """The real clock, with a wall time and a monotonic time that can be moved."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:
        return 1000.0 + self.ahead

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the made CPU is an x86-64")


def eventually(true, deadline_s=10.0):
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, "it did not become true in time"
        threading.Event().wait(0.01)


def gpu_row(free="143158", total="143771"):
    return f"0, GPU-a, NVIDIA H200, 00000000:83:00.0, {total}, 0, {free}, 590.48.01, Disabled, 3, 41\n"


@pytest.fixture
def node(tmp_path):
    """Builds a registry over a made machine; `gpu=True` gives it a driver and a real program as nvidia-smi."""

    def build(files=None, *, gpu=False, clock=None, runner=None, **settings):
        root = make_tree(tmp_path / "root", {**MACHINE, **(DRIVER if gpu else {}), **(files or {})})
        if gpu:
            make_tree(tmp_path / "root", {"/usr/bin/nvidia-smi": SMI, "/usr/bin/rows": gpu_row()})
            os.chmod(tmp_path / "root/usr/bin/nvidia-smi", 0o755)
        settings = {"prefer_nvml": False, "mgmt_addr": "192.0.2.7", **settings}
        wanted = ProbeSettings(
            root=root, work_dir=str(tmp_path / "work"), engines_dir=str(tmp_path / "engines"), **settings
        )
        return Registry(wanted, runner or RealRunner(), clock or Clock())

    return build


def codes(registry, facts, readings):
    return [warning.code for warning in registry.warnings(facts, readings)]


def test_before_the_first_probe_nothing_is_claimed(node):
    registry = node(gpu=True)
    assert registry.probed_at is None
    assert registry.facts is None
    assert registry.readings().gpus == ()
    assert registry.warnings(None, None) == ()


@x86
def test_a_made_machine_is_described_whole(node, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/m.gguf").write_bytes(gguf(QWEN, [tensor("w", [32], 0, 0)], 128))
    registry = node(gpu=True, labels={"rack": "r1"}, model_dirs=(str(tmp_path / "models"),))
    facts = registry.probe()
    assert (facts.hostname, facts.boot_id, facts.os.family) == ("gpu-7", "b00t", "debian")
    assert (facts.cpu.cores, facts.cpu.name, facts.cpu.virtual) == (1, "Common KVM processor", True)
    assert facts.memory.total_bytes == 32 << 30
    assert facts.nvidia.driver.value is Truth.YES
    assert (facts.nvidia.version, facts.nvidia.cuda) == ("590.48.01", "13.1")
    assert [(gpu.uuid, gpu.compute_cap) for gpu in facts.gpus] == [("GPU-a", "9.0")]
    assert (facts.mgmt_addr, dict(facts.labels)) == ("192.0.2.7", {"rack": "r1"})
    assert registry.probed_at == 1000.0
    assert [model.complete.value for model in registry.weights()] == [Truth.YES]
    readings = registry.readings()
    assert (readings.at, readings.load_1m, readings.memory_available_bytes) == (1000.0, 0.52, 24 << 30)
    assert readings.gpus[0].memory_free_bytes == 143158 << 20
    assert {disk.path for disk in readings.disks} >= {str(tmp_path / "engines"), str(tmp_path / "models")}
    assert all(disk.free_bytes for disk in readings.disks)


def test_the_revision_changes_with_a_fact_and_only_then(node, tmp_path):
    registry = node()
    first = registry.probe()
    assert first.revision == registry.probe().revision == revision(first)
    make_tree(tmp_path / "root", {"/proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   99 kB\n"})
    assert registry.probe().revision == first.revision
    make_tree(tmp_path / "root", {"/proc/meminfo": "MemTotal:       16777216 kB\n"})
    assert registry.probe().revision != first.revision


@x86
def test_a_warning_keeps_its_date_while_it_lasts_and_its_words_may_change(node, tmp_path):
    clock = Clock()
    registry = node(clock=clock)
    facts = registry.probe()
    (first,) = registry.warnings(facts, registry.readings())
    assert (first.code, first.since) == ("no-avx2", 1000.0)
    assert "set the VM's CPU type to `host` or `x86-64-v3`" in first.words
    clock.ahead = 500.0
    assert registry.warnings(facts, registry.readings())[0].since == 1000.0
    make_tree(tmp_path / "root", {"/proc/cpuinfo": NO_AVX2.replace("lm", "lm avx2")})
    assert codes(registry, registry.probe(), registry.readings()) == []
    make_tree(tmp_path / "root", {"/proc/cpuinfo": NO_AVX2})
    assert registry.warnings(registry.probe(), registry.readings())[0].since == 1500.0


def test_one_failing_fact_becomes_unknown_with_words_and_stops_no_other(node, monkeypatch):
    registry = node()
    for where, name in (
        ("host", "os_facts"),
        ("memory", "memory_facts"),
        ("nvidia", "look"),
        ("address", "management_address"),
    ):
        monkeypatch.setattr(getattr(registry_module, where), name, lambda *_, **__: 1 / 0)
    facts = registry.probe()
    assert (facts.os.id, facts.memory.total_bytes, facts.gpus, facts.mgmt_addr) == ("unknown", None, None, None)
    assert facts.nvidia.driver.value is Truth.UNKNOWN
    assert facts.cpu.cores == 1
    failed = [warning for warning in registry.warnings(facts, None) if warning.code == "probe-failed"]
    assert len(failed) == 4
    assert all("ZeroDivisionError" in warning.words for warning in failed)


def test_gpu_readings_follow_in_the_background_without_a_new_probe(node, tmp_path):
    clock = Clock()
    registry = node(gpu=True, clock=clock)
    registry.probe()
    (tmp_path / "root/usr/bin/rows").write_text(gpu_row(free="7"))
    assert registry.readings().gpus[0].memory_free_bytes == 143158 << 20
    clock.ahead = 11.0
    eventually(lambda: registry.readings().gpus[0].memory_free_bytes == 7 << 20)


def test_gpu_memory_that_is_waited_for_is_read_every_second_and_dated_by_its_beginning(node, tmp_path):
    clock = Clock()
    registry = node(gpu=True, clock=clock)
    assert registry.gpu_memory() is None
    registry.probe()
    probed = registry.gpu_memory()["GPU-a"]
    assert (probed.free_bytes, probed.total_bytes) == (143158 << 20, 143771 << 20)
    assert probed.at < clock.monotonic()
    (tmp_path / "root/usr/bin/rows").write_text(gpu_row(free="7"))
    clock.ahead = 1.5
    asked = clock.monotonic()
    assert registry.gpu_memory()["GPU-a"] == probed
    eventually(lambda: registry.gpu_memory()["GPU-a"].free_bytes == 7 << 20)
    assert asked <= registry.gpu_memory()["GPU-a"].at <= clock.monotonic()
    (tmp_path / "root/usr/bin/broken").write_text("couldn't communicate with the NVIDIA driver\n")
    clock.ahead = 3.0
    eventually(lambda: registry.gpu_memory() is None)


def test_gpu_memory_that_is_the_hosts_own_is_not_waited_for(node, tmp_path):
    registry = node(gpu=True)
    (tmp_path / "root/usr/bin/rows").write_text(gpu_row(free="[N/A]", total="[N/A]"))
    assert registry.probe().gpus[0].unified_memory
    assert registry.gpu_memory() == {}


def test_readings_that_can_no_longer_be_had_become_unknown_and_are_said(node, tmp_path):
    clock = Clock()
    registry = node(gpu=True, clock=clock)
    facts = registry.probe()
    (tmp_path / "root/usr/bin/broken").write_text("couldn't communicate with the NVIDIA driver\n")
    clock.ahead = 11.0
    eventually(lambda: "gpu-readings" in codes(registry, facts, registry.readings()))
    assert registry.readings().gpus[0].memory_free_bytes == 143158 << 20
    clock.ahead = 100.0
    gpu = registry.readings().gpus[0]
    assert (gpu.uuid, gpu.memory_free_bytes) == ("GPU-a", None)


class Hanging:
    """A Runner whose nvidia-smi hangs until let go, then cannot be ended."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.hang = False
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.started = 0

    def run(self, argv, **more):
        if not self.hang or not argv[0].endswith("nvidia-smi"):
            return self.inner.run(argv, **more)
        self.started += 1
        self.entered.set()
        self.let_go.wait(20)
        return Completed(tuple(argv), None, "", "", timed_out=True, pid=4242)


def test_a_hanging_tool_never_delays_a_heartbeat_and_is_never_joined_by_another(node, tmp_path):
    clock, runner = Clock(), Hanging(RealRunner())
    registry = node(
        {"/proc/4242/stat": "4242 (nvidia-smi) D 1 " + "0 " * 17 + "77 0\n"}, gpu=True, clock=clock, runner=runner
    )
    facts = registry.probe()
    runner.hang = True
    clock.ahead = 11.0
    registry.readings()
    assert runner.entered.wait(10)
    started = time.monotonic()
    for beat in range(20):
        clock.ahead = 20.0 + 10 * beat
        registry.warnings(facts, registry.readings())
    assert time.monotonic() - started < 5.0
    assert registry.readings().gpus[0].memory_free_bytes is None
    runner.let_go.set()
    eventually(lambda: STUCK in codes(registry, facts, registry.readings()))
    clock.ahead += 100.0
    eventually(lambda: "pid 4242" in " ".join(w.words for w in registry.warnings(facts, registry.readings())))
    assert runner.started == 1
    again = registry.probe()
    assert again.gpus is None
    assert again.nvidia.driver.value is Truth.UNKNOWN
    assert runner.started == 1


def test_missing_nvml_is_said_only_where_there_are_gpus(node, monkeypatch):
    monkeypatch.setattr("llmgw.probe.nvml.installed", lambda: False)
    with_gpu = node(gpu=True, prefer_nvml=True)
    assert "nvml-missing" in codes(with_gpu, with_gpu.probe(), None)


def test_missing_nvml_is_no_matter_without_gpus(node, monkeypatch):
    monkeypatch.setattr("llmgw.probe.nvml.installed", lambda: False)
    plain = node(prefer_nvml=True)
    assert "nvml-missing" not in codes(plain, plain.probe(), None)


def test_fabrics_are_probed_and_an_unusable_one_is_a_warning(node):
    registry = node(fabrics=(("blue", ("mlx5_0",), 400.0),))
    facts = registry.probe()
    assert facts.fabrics[0].usable.value is Truth.NO
    assert "fabric-unusable" in codes(registry, facts, None)


def test_a_management_address_on_a_fabric_interface_is_warned_about(node):
    hca = "/sys/class/infiniband/mlx5_0"
    files = {f"{hca}/ports/1/state": "4: ACTIVE", f"{hca}/device/net/lo/address": "x"}
    registry = node(files, fabrics=(("blue", ("mlx5_0",), None),), mgmt_addr="127.0.0.1")
    assert "mgmt-on-fabric" in codes(registry, registry.probe(), None)


def test_a_new_model_is_seen_without_a_new_probe(node, tmp_path):
    clock = Clock()
    (tmp_path / "models").mkdir()
    registry = node(clock=clock, model_dirs=(str(tmp_path / "models"), str(tmp_path / "gone")))
    facts = registry.probe()
    assert registry.weights() == ()
    assert "weights-unreadable" in codes(registry, facts, None)
    (tmp_path / "models/m.gguf").write_bytes(gguf(QWEN))
    clock.ahead = 31.0
    eventually(lambda: len(registry.weights()) == 1)


def test_an_amd_gpu_is_said_though_unused(node):
    card = "/sys/class/drm/card1/device"
    files = {f"{card}/vendor": "0x1002\n", f"{card}/mem_info_vram_total": f"{16 << 30}\n"}
    apu = {"/sys/class/drm/card2/device/vendor": "0x1002\n", "/sys/class/drm/card2/device/mem_info_vram_total": "9\n"}
    registry = node({**files, **apu})
    said = [w.words for w in registry.warnings(registry.probe(), None) if w.code == "gpu-unsupported"]
    assert len(said) == 1
    assert "17 GB" in said[0]


def test_a_background_value_is_made_once_at_a_time_and_an_error_keeps_the_last():
    clock, gate, calls = Clock(), threading.Event(), []

    def make():
        calls.append(1)
        gate.wait(10)
        if len(calls) > 1:
            raise ValueError("no more")
        return len(calls)

    latest = Latest("test", make, clock, 5.0)
    assert [latest.get() for _ in range(3)] == [None] * 3
    assert latest.hanging_s() > 0
    gate.set()
    eventually(lambda: latest.get() == 1)
    assert len(calls) == 1
    clock.ahead = 6.0
    latest.get(wait_s=5.0)
    eventually(lambda: latest.error is not None)
    assert latest.get() == 1
    assert latest.get(max_age_s=3.0) is None
    assert latest.hanging_s() == 0


def test_this_very_machine_can_be_probed(tmp_path):
    registry = Registry(
        ProbeSettings(work_dir=str(tmp_path / "work"), engines_dir=str(tmp_path), server_host="127.0.0.1"),
        RealRunner(),
        RealClock(),
    )
    before = time.time()
    facts = registry.probe()
    assert facts.cpu.arch == platform.machine()
    assert facts.cpu.cores
    assert facts.memory.total_bytes
    assert facts.hostname == platform.node()
    assert facts.boot_id not in ("", "unknown")
    assert facts.os.id
    assert facts.os.kernel == platform.release()
    assert facts.mgmt_addr == "127.0.0.1"
    assert facts.nvidia.driver.words
    assert facts.gpus is None or isinstance(facts.gpus, tuple)
    assert facts.gpus or facts.nvidia.driver.value is not Truth.YES
    assert registry.probed_at is not None
    assert before <= registry.probed_at <= time.time()
    readings = registry.readings()
    assert 0 < readings.memory_available_bytes <= facts.memory.total_bytes
    assert len(readings.gpus) == len(facts.gpus or ())
    assert readings.disks[0].free_bytes is not None
    assert not [w for w in registry.warnings(facts, readings) if w.code == "probe-failed"]
    assert registry.probe().revision == facts.revision
