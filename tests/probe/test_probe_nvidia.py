from __future__ import annotations

import os

import pytest
from probe_fakes import DATA, RecordedSmi, captures, make_tree, smi_says

from llmgw.domain.facts import Truth
from llmgw.errors import CommandError
from llmgw.probe import nvidia
from llmgw.probe.gputools import STUCK, GpuTools
from llmgw.probe.libraries import Libraries
from llmgw.probe.rows import Memory
from llmgw.probe.tree import Tree
from llmgw.system.commands import Completed

H200 = captures()["nvidia-h200__590.48.01 (idle)"]
LOADED = {
    "/sys/module/nvidia/version": "590.48.01\n",
    "/dev/nvidiactl": "",
    "/dev/nvidia-uvm": "",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1": "",
}
PCI = {"/sys/bus/pci/devices/0000:83:00.0/vendor": "0x10de\n", "/sys/bus/pci/devices/0000:83:00.0/class": "0x030200\n"}


def look(tmp_path, files, runner, *, tool=True, setting=""):
    root = make_tree(tmp_path, {**files, **({"/usr/bin/nvidia-smi": "#!/bin/true\n"} if tool else {})})
    if tool:
        os.chmod(tmp_path / "usr/bin/nvidia-smi", 0o755)
    tree = Tree(root)
    return nvidia.look(
        tree,
        GpuTools(tree, runner),
        Libraries(tree, runner, "x86_64"),
        Memory(1 << 37, 1 << 36),
        smi_setting=setting,
        prefer_nvml=False,
    )


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.173.02  Tue Jun 23 08:38:17 UTC 2026", "580.173.02"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22-I3)"
            "  Tue Sep 23 09:55:41 UTC 2025\nGCC version:  gcc version 123.4.5",
            "580.95.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  TempVersion  Release Build  (x)  2025", None),
        ("595.80", "595.80"),
    ],
)
def test_the_module_version_is_read_from_every_form(line, version):
    assert nvidia.parse_module_version(line) == version


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("610.57.04", "13.3"), ("595.71.05", "13.2"), ("595.80", "13.2"), ("590.48.01", "13.1"), ("590.44.01", "13.1"),
        ("590.40", "13.0"), ("580.65.06", "13.0"), ("575.57.08", "12.9"), ("570.86.15", "12.8"), ("550.54.14", "12.4"),
        ("535.183.01", "12.2"), ("525.60.13", "12.0"), ("470.256.02", None), ("700.1", "13.3"), ("nonsense", None),
    ],
)  # fmt: skip
def test_the_highest_cuda_of_a_driver(driver, cuda):
    assert nvidia.cuda_for_driver(driver) == cuda


def test_a_working_driver_is_yes_with_its_version_cuda_and_devices(tmp_path):
    runner = RecordedSmi([H200], version=(DATA / "nvidia-smi-version-590.txt").read_text())
    found = look(tmp_path, LOADED, runner)
    assert found.facts.driver.value is Truth.YES
    assert found.facts.driver.words == "NVIDIA driver 590.48.01, supports CUDA up to 13.1, 1 device"
    assert (found.facts.version, found.facts.cuda) == ("590.48.01", "13.1")
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H200"]
    assert found.readings[0].memory_free_bytes == 143158 << 20


def test_cuda_comes_from_the_table_when_the_tool_does_not_tell(tmp_path):
    assert look(tmp_path, LOADED, RecordedSmi([H200])).facts.cuda == "13.1"


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "`libcuda.so.1` is missing"),
        ("/dev/nvidiactl", "`/dev/nvidiactl` is missing"),
        ("/dev/nvidia-uvm", "`/dev/nvidia-uvm` is missing"),
    ],
)
def test_a_driver_cuda_cannot_use_is_no_with_the_missing_piece(tmp_path, missing, words):
    files = {path: text for path, text in LOADED.items() if path != missing}
    found = look(tmp_path, files, RecordedSmi([H200]))
    assert found.facts.driver.value is Truth.NO
    assert words in found.facts.driver.words
    assert len(found.gpus) == 1


def test_a_missing_uvm_device_is_no_fault_where_it_is_made_on_demand(tmp_path):
    files = {path: text for path, text in LOADED.items() if path != "/dev/nvidia-uvm"}
    make_tree(tmp_path, {"/usr/bin/nvidia-modprobe": ""})
    os.chmod(tmp_path / "usr/bin/nvidia-modprobe", 0o755)
    assert look(tmp_path, files, RecordedSmi([H200])).facts.driver.value is Truth.YES


def test_a_mismatch_asks_for_a_reboot_and_never_says_there_is_no_gpu(tmp_path):
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.178\n"
    found = look(tmp_path, LOADED, smi_says(said, 18))
    assert found.facts.driver.value is Truth.NO
    assert "590.48.01 is loaded (its library is 580.178)" in found.facts.driver.words
    assert "reboot this node" in found.facts.driver.words
    assert found.gpus is None
    assert [concern.code for concern in found.concerns] == ["driver-mismatch"]


@pytest.mark.parametrize(
    ("files", "said", "code", "gpus", "words"),
    [
        (
            LOADED,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            9,
            None,
            "not running",
        ),
        (PCI, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, None, "not running"),
        ({}, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, (), "only its tools"),
        (LOADED, "something nobody knows", 255, None, "something nobody knows"),
        (LOADED, "No devices were found", 6, (), "no NVIDIA GPU"),
        ({**LOADED, **PCI}, "No devices were found", 6, None, "0000:83:00.0"),
    ],
)
def test_a_failing_tool_is_a_broken_driver_unless_the_bus_has_no_gpu(tmp_path, files, said, code, gpus, words):
    found = look(tmp_path, files, smi_says(f"{said}\n", code))
    assert found.facts.driver.value is Truth.NO
    assert words in found.facts.driver.words
    assert found.gpus == gpus


def test_no_driver_and_no_card_is_known_to_be_none(tmp_path):
    found = look(tmp_path, {}, RecordedSmi(), tool=False)
    assert found.gpus == ()
    assert found.facts.driver.value is Truth.NO
    assert found.concerns == ()


def test_a_card_without_a_driver_is_said(tmp_path):
    make_tree(tmp_path, {"/sys/bus/pci/drivers/nouveau/bind": "", **PCI})
    (tmp_path / "sys/bus/pci/devices/0000:83:00.0/driver").symlink_to(tmp_path / "sys/bus/pci/drivers/nouveau")
    found = look(tmp_path, PCI, RecordedSmi(), tool=False)
    assert found.concerns[0].code == "gpu-without-driver"
    assert "0000:83:00.0 is held by `nouveau`" in found.facts.driver.words


def test_a_loaded_driver_without_any_tool_is_unknown(tmp_path):
    found = look(tmp_path, LOADED, RecordedSmi(), tool=False)
    assert found.gpus is None
    assert found.facts.driver.value is Truth.UNKNOWN
    assert "`nvidia-smi` is not installed" in found.facts.driver.words
    assert found.facts.version == "590.48.01"


def test_a_jetson_without_nvidia_smi_is_unknown_not_gpuless(tmp_path):
    found = look(tmp_path, {"/etc/nv_tegra_release": "# R35 (release), REVISION: 4.1\n"}, RecordedSmi(), tool=False)
    assert found.gpus is None
    assert found.facts.driver.value is Truth.UNKNOWN
    assert "Jetson" in found.facts.driver.words


def test_a_configured_tool_that_is_missing_is_named(tmp_path):
    found = look(tmp_path, LOADED, RecordedSmi(), tool=False, setting="/opt/x/nvidia-smi")
    assert found.gpus is None
    assert "`/opt/x/nvidia-smi`" in found.facts.driver.words


def test_a_tool_that_gives_no_answer_is_a_driver_that_does_not_answer(tmp_path):
    found = look(tmp_path, LOADED, smi_says("", -9, timed_out=True))
    assert found.gpus is None
    assert "does not answer" in found.facts.driver.words


class Unkillable:
    """A Runner whose program cannot be ended: `pid` stands for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.calls = 0

    def run(self, argv, **_):
        self.calls += 1
        return Completed(tuple(argv), None, "", "", timed_out=True, pid=self.pid)


def stat(state: str, start: int) -> str:
    return f"77 (nvidia-smi) {state} 1 77 77 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 {start} 0 0\n"


def test_no_other_is_started_while_one_is_stuck_and_again_once_it_has_gone(tmp_path):
    tree = Tree(make_tree(tmp_path, {"/proc/77/stat": stat("D", 500)}))
    runner = Unkillable(77)
    tools = GpuTools(tree, runner)
    for _ in range(3):
        with pytest.raises(CommandError, match=r"`nvidia-smi` \(pid 77\) hangs in the NVIDIA driver") as caught:
            tools.run(["/usr/bin/nvidia-smi", "-L"], 1.0)
        assert caught.value.code == STUCK
    assert runner.calls == 1
    make_tree(tmp_path, {"/proc/77/stat": stat("S", 900)})  # the pid is somebody else's now
    with pytest.raises(CommandError):
        tools.run(["/usr/bin/nvidia-smi", "-L"], 1.0)
    assert runner.calls == 2
    make_tree(tmp_path, {"/proc/77/stat": stat("Z", 900)})
    assert tools.run(["/usr/bin/nvidia-smi", "-L"], 1.0).timed_out
    assert runner.calls == 3


def test_a_stuck_tool_makes_the_driver_unknown_not_absent(tmp_path):
    make_tree(tmp_path, {"/proc/77/stat": stat("D", 500)})
    runner = Unkillable(77)
    found = look(tmp_path, LOADED, runner)
    assert found.gpus is None
    assert found.facts.driver.value is Truth.UNKNOWN
    assert [concern.code for concern in found.concerns] == ["gpu-tool-stuck"]
