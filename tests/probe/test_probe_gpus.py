from __future__ import annotations

import pytest
from probe_fakes import DATA, RecordedSmi, captures, make_tree, smi_says

from llmgw.probe import gpus, smi
from llmgw.probe.gputools import GpuTools
from llmgw.probe.rows import Instance, Memory, Row, devices
from llmgw.probe.tree import Tree
from llmgw.system.commands import Completed

MIB = 1 << 20
HOST = Memory(128 << 30, 100 << 30)
CAPTURES = captures()
LOST = "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU"


def look(runner, root="/nonexistent"):
    tree = Tree(str(root))
    tools = GpuTools(tree, runner)
    return gpus.listing(tree, tools, smi.Smi("/usr/bin/nvidia-smi", tools), use_nvml=False)


def card(n, **cells):
    base = CAPTURES["nvidia-h200__590.48.01 (idle)"]
    return {**base, "index": str(n), "uuid": f"GPU-{n}", "pci.bus_id": f"00000000:0{n}:00.0", **cells}


@pytest.mark.parametrize("title", sorted(CAPTURES))
def test_every_recorded_host_is_read_field_by_field(title):
    recorded = CAPTURES[title]
    version = (DATA / "nvidia-smi-version-610.txt").read_text()
    found = look(RecordedSmi([recorded], version=version))
    assert found.failure is None
    assert found.driver == recorded["driver_version"]
    assert found.cuda == "13.3"
    (row,) = found.rows
    assert row.name == recorded["name"]
    assert row.total_bytes == int(recorded["memory.total"]) * MIB
    assert row.free_bytes == int(recorded["memory.free"]) * MIB
    assert row.compute_cap == recorded["compute_cap"]
    assert row.mig == ("mig" in title)
    assert row.fault == ""
    assert (row.utilization_percent is None) == (recorded["utilization.gpu"] == "[N/A]")
    assert row.temperature_c == float(recorded["temperature.gpu"])


def test_free_is_the_tools_own_figure_not_total_minus_used():
    (row,) = look(RecordedSmi([CAPTURES["nvidia-h200__590.48.01 (idle)"]])).rows
    made = devices([row], HOST)
    assert made.gpus[0].memory_total_bytes == 143771 * MIB
    assert made.readings[0].memory_free_bytes == 143158 * MIB


def test_mig_instances_replace_their_parent_and_their_unknown_size_is_said():
    listing = (DATA / "nvidia-smi-list-h200-mig.txt").read_text()
    found = look(RecordedSmi([CAPTURES["nvidia-h200-mig__590.48.01 (idle)"]], listing=listing))
    made = devices(found.rows, HOST)
    assert [gpu.uuid[:12] for gpu in made.gpus] == [f"MIG-0000000{n}" for n in range(5)]
    assert made.gpus[0].name == "NVIDIA H200 MIG 1c.3g.71gb"
    assert made.gpus[0].compute_cap == "9.0"
    assert {gpu.memory_total_bytes for gpu in made.gpus} == {None}
    assert not any(gpu.unified_memory for gpu in made.gpus)
    (concern,) = made.concerns
    assert concern.code == "mig-size-unknown"
    assert "nvidia-ml-py" in concern.words


def test_a_mig_parent_without_instances_is_no_device_and_is_said():
    found = look(RecordedSmi([CAPTURES["nvidia-h100-mig__590.48.01 (idle)"]], listing="GPU 0: X (UUID: GPU-0)\n"))
    made = devices(found.rows, HOST)
    assert made.gpus == ()
    assert made.concerns[0].code == "mig-empty"


def test_a_healthy_gpu_without_memory_of_its_own_shares_the_hosts():
    gb10 = card(0, **dict.fromkeys(("memory.total", "memory.used", "memory.free"), "[N/A]"), name="NVIDIA GB10")
    made = devices(look(RecordedSmi([{**gb10, "pci.bus_id": "0000000F:01:00.0"}])).rows, HOST)
    assert made.gpus[0].unified_memory
    assert made.gpus[0].pci_bus_id == "000f:01:00.0"
    assert made.gpus[0].memory_total_bytes == HOST.total_bytes
    assert made.readings[0].memory_free_bytes == HOST.available_bytes


def test_a_gpu_whose_memory_may_not_be_seen_is_unknown_not_unified():
    cells = dict.fromkeys(("memory.total", "memory.used", "memory.free"), "[Insufficient Permissions]")
    made = devices(look(RecordedSmi([card(0, **cells)])).rows, HOST)
    assert not made.gpus[0].unified_memory
    assert made.gpus[0].memory_total_bytes is None


def test_a_jetson_without_uuid_is_known_by_the_index_cuda_takes():
    cells = dict.fromkeys(CAPTURES["nvidia-l40s__595.80 (idle)"], "[N/A]") | {"index": "0", "name": "Orin (nvgpu)"}
    made = devices(look(RecordedSmi([cells])).rows, HOST)
    assert made.gpus[0].uuid == "0"
    assert made.gpus[0].unified_memory


@pytest.mark.parametrize("cell", ["[Unknown Error]", "[GPU is lost]", "ERR!"])
def test_a_faulty_cell_is_a_faulty_gpu_never_a_unified_one(cell):
    row = card(0, **dict.fromkeys(("memory.total", "memory.used", "memory.free"), cell))
    made = devices(look(RecordedSmi([row])).rows, HOST)
    assert cell.strip("[]") in made.gpus[0].faulty
    assert not made.gpus[0].unified_memory
    assert made.gpus[0].memory_total_bytes is None


def test_one_lost_gpu_does_not_hide_the_others(tmp_path):
    info = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{n}2345678-0000\nBus Location: \t 0000:0{n}:00.0\n"
    root = make_tree(
        tmp_path, {f"/proc/driver/nvidia/gpus/0000:0{n}:00.0/information": info.format(n=n) for n in (1, 2, 3)}
    )
    runner = RecordedSmi([card(1), card(3)], lost={"0000:02:00.0": LOST})
    made = devices(look(runner, root).rows, HOST)
    assert [gpu.uuid for gpu in made.gpus] == ["GPU-1", "GPU-22345678-0000", "GPU-3"]
    assert "GPU is lost" in made.gpus[1].faulty
    assert made.gpus[1].name == "NVIDIA H200"
    assert [bool(gpu.faulty) for gpu in made.gpus] == [False, True, False]
    assert made.readings[2].memory_free_bytes == 143158 * MIB


def test_a_field_an_old_driver_does_not_know_costs_only_the_newer_fields():
    found = look(RecordedSmi([card(0)], unknown_fields=["fabric.state"]))
    assert found.rows[0].compute_cap == "9.0"
    assert found.rows[0].fabric is None
    found = look(RecordedSmi([card(0)], unknown_fields=["fabric.state", "compute_cap"]))
    assert found.rows[0].compute_cap is None
    assert found.rows[0].total_bytes == 143771 * MIB


def test_an_unfinished_nvlink_fabric_is_said():
    made = devices(look(RecordedSmi([card(0, **{"fabric.state": "In Progress"})])).rows, HOST)
    assert made.concerns[0].code == "nvlink-fabric"
    assert "nvidia-fabricmanager" in made.concerns[0].words
    assert devices(look(RecordedSmi([card(0)])).rows, HOST).concerns == ()


def test_lines_that_are_no_rows_are_rejected_and_kept_apart():
    rows, rejected = smi.parse_rows(f"0, GPU-a, X\n{LOST}\n\n1, short\nindex, uuid, name\n", ("index", "uuid", "name"))
    assert rows == ({"index": "0", "uuid": "GPU-a", "name": "X"},)
    assert rejected == (LOST, "1, short", "index, uuid, name")


def test_lost_gpus_are_named_in_both_spellings():
    other = "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error"
    assert smi.parse_lost([LOST, other]) == {
        "0000:02:00.0": "GPU is lost.  Reboot the system to recover this GPU",
        "0000:07:00.0": "Unknown Error",
    }


@pytest.mark.parametrize(("name", "cuda"), [("590", "13.1"), ("610", "13.3")])
def test_cuda_is_read_from_every_generation_of_version_output(name, cuda):
    assert smi.parse_cuda((DATA / f"nvidia-smi-version-{name}.txt").read_text()) == cuda
    assert smi.parse_cuda("CUDA version        : Deprecated\n") is None


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.178\n", 18, "mismatch"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", 255, "mismatch"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure …\n", 9, "down"),
        ("No devices were found\n", 6, "no-devices"),
        (f"{LOST}\n", 15, "lost"),
        ("", 12, "no-library"),
        ("something new\n", 1, "other"),
    ],
)
def test_failures_are_told_apart_by_their_text(text, code, kind):
    found = smi.failure(Completed(("nvidia-smi",), code, text, ""))
    assert found.kind == kind
    if text:
        assert text.splitlines()[0].rstrip(".") in found.words
    assert found.library == ("580.178" if "580.178" in text else None)


def test_a_mismatch_lists_nothing():
    found = look(smi_says("Failed to initialize NVML: Driver/library version mismatch\n", 18))
    assert found.rows is None
    assert found.failure.kind == "mismatch"


def test_a_driver_without_tools_still_names_its_cards_but_not_their_memory(tmp_path):
    info = "Model: \t\t NVIDIA L4\nGPU UUID: \t {}\n"
    root = make_tree(
        tmp_path,
        {
            "/proc/driver/nvidia/gpus/0000:01:00.0/information": info.format("GPU-aa-bb"),
            "/proc/driver/nvidia/gpus/0000:02:00.0/information": info.format("GPU-????????-????"),
        },
    )
    tree = Tree(root)
    found = gpus.listing(tree, GpuTools(tree, RecordedSmi()), None, use_nvml=False)
    made = devices(found.rows, HOST)
    assert [gpu.uuid for gpu in made.gpus] == ["GPU-aa-bb", "pci-0000:02:00.0"]
    assert {gpu.memory_total_bytes for gpu in made.gpus} == {None}
    assert not any(gpu.unified_memory for gpu in made.gpus)
    assert found.concerns[0].code == "nvidia-smi-missing"


def test_a_faulty_gpu_with_mig_is_listed_as_faulty():
    made = devices([Row(index=0, uuid="GPU-a", mig=True, fault="lost", instances=(Instance("MIG-a"),))], HOST)
    assert [gpu.uuid for gpu in made.gpus] == ["GPU-a"]
    assert made.gpus[0].faulty == "lost"
