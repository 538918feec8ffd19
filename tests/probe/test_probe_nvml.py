"""The NVML child against a made `pynvml` that raises what the real one raises."""

from __future__ import annotations

import pytest

from llmgw.probe import gpus, nvml
from llmgw.probe.gputools import GpuTools
from llmgw.probe.rows import Memory, devices
from llmgw.probe.tree import Tree
from llmgw.system.commands import RealRunner

PYNVML = """
class NVMLError(Exception):
    def __init__(self, value):
        self.value = value
    def __str__(self):
        return {3: "Not Supported", 9: "Driver Not Loaded", 15: "GPU is lost"}.get(self.value, f"error {self.value}")

class Info:
    def __init__(self, **fields):
        self.__dict__.update(fields)

nvmlMemory_v2, NVML_TEMPERATURE_GPU = 33554472, 0
MIG = {"GPU-mig": [None, "MIG-a", "MIG-b"]}

def nvmlInit():
    pass
def nvmlSystemGetDriverVersion():
    return b"590.48.01"
def nvmlSystemGetCudaDriverVersion_v2():
    return 13010
def nvmlDeviceGetCount():
    return 4
def nvmlDeviceGetHandleByIndex(index):
    if index == 3:
        raise NVMLError(15)
    return ["GPU-plain", "GPU-mig", "GPU-unified"][index]
def nvmlDeviceGetUUID(handle):
    return handle
def nvmlDeviceGetName(handle):
    return "NVIDIA H100 MIG 3g.40gb" if handle.startswith("MIG") else "NVIDIA H100"
def nvmlDeviceGetPciInfo(handle):
    return Info(busId=b"00000000:83:00.0")
def nvmlDeviceGetMigMode(handle):
    if handle == "GPU-unified":
        raise NVMLError(3)
    return [int(handle in MIG), 0]
def nvmlDeviceGetMemoryInfo(handle, version=None):
    if version or handle == "GPU-unified":
        raise NVMLError(13 if version else 3)
    return Info(total=40 << 30, used=1 << 30, free=38 << 30)
def nvmlDeviceGetCudaComputeCapability(handle):
    return (9, 0)
def nvmlDeviceGetUtilizationRates(handle):
    if handle in MIG:
        raise NVMLError(3)
    return Info(gpu=7)
def nvmlDeviceGetTemperature(handle, sensor):
    return 41
def nvmlDeviceGetMaxMigDeviceCount(handle):
    return 3
def nvmlDeviceGetMigDeviceHandleByIndex(handle, slot):
    if MIG[handle][slot] is None:
        raise NVMLError(6)
    return MIG[handle][slot]
"""
HOST = Memory(128 << 30, 100 << 30)


@pytest.fixture
def tools():
    return GpuTools(Tree(), RealRunner())


@pytest.fixture
def made_pynvml(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text(PYNVML)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "pynvml.py"


def test_every_gpu_is_read_and_a_lost_one_is_faulty(made_pynvml, tools):
    assert nvml.installed()
    found = gpus.listing(Tree(), tools, None, use_nvml=True)
    assert (found.tool, found.driver, found.cuda) == ("NVML", "590.48.01", "13.1")
    made = devices(found.rows, HOST)
    assert [gpu.uuid for gpu in made.gpus] == ["GPU-plain", "MIG-a", "MIG-b", "GPU-unified", "3"]
    plain, mig, _, unified, lost = made.gpus
    assert (plain.memory_total_bytes, plain.compute_cap, plain.pci_bus_id) == (40 << 30, "9.0", "0000:83:00.0")
    assert (mig.memory_total_bytes, mig.name) == (40 << 30, "NVIDIA H100 MIG 3g.40gb")
    assert unified.unified_memory
    assert "GPU is lost" in lost.faulty
    assert made.readings[0].memory_free_bytes == 38 << 30
    assert made.readings[0].utilization_percent == 7.0
    assert made.concerns == ()


def test_nvml_that_cannot_start_is_said_and_the_next_way_is_taken(made_pynvml, tools, tmp_path):
    made_pynvml.write_text(PYNVML.replace("def nvmlInit():\n    pass", "def nvmlInit():\n    raise NVMLError(9)"))
    found = gpus.listing(Tree(str(tmp_path)), tools, None, use_nvml=True)
    assert found.rows is None
    assert found.concerns[0].code == "nvml-failed"
    assert "Driver Not Loaded" in found.concerns[0].words


def test_a_crashing_child_does_not_take_the_agent_with_it(made_pynvml, tools, tmp_path):
    made_pynvml.write_text(PYNVML.replace("def nvmlInit():\n    pass", "def nvmlInit():\n    import os; os.abort()"))
    found = gpus.listing(Tree(str(tmp_path)), tools, None, use_nvml=True)
    assert "SIGABRT" in found.concerns[0].words


def test_answers_of_the_wrong_type_are_unknown():
    answer = nvml.parse(
        {"gpus": [{"index": "0", "uuid": 7, "total": "x", "util": True, "mig": "yes"}, "no"], "cuda": 13}
    )
    (row,) = answer.rows
    assert (row.index, row.uuid, row.total_bytes, row.utilization_percent, row.mig) == (None, None, None, None, False)
    assert answer.cuda is None
