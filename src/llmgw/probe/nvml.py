"""GPUs by NVML (the optional `nvidia-ml-py`), in a child: a hanging driver hangs the child, not the agent."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from llmgw.probe.child import run_python
from llmgw.probe.gputools import GpuTools
from llmgw.probe.rows import Instance, Row
from llmgw.probe.smi import pci_address

_TIMEOUT_S = 30.0
# what "this GPU has no such value" means to NVML: not supported, no permission, not found, function not found
_CODE = """
import pynvml as n

def plain(value):
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

def ask(call, *args, **named):
    try:
        return plain(call(*args, **named))
    except n.NVMLError as error:
        if error.value in (3, 4, 6, 13):
            return None
        raise

def sizes(handle):
    try:
        found = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
    except (n.NVMLError, TypeError, AttributeError):
        try:
            found = n.nvmlDeviceGetMemoryInfo(handle)
        except n.NVMLError as error:
            if error.value not in (3, 4, 6, 13):
                raise
            return {"sized": error.value == 3}
    return {"total": found.total, "used": found.used, "free": found.free}

def look(index):
    gpu = {"index": index}
    try:
        handle = n.nvmlDeviceGetHandleByIndex(index)
        gpu["uuid"] = ask(n.nvmlDeviceGetUUID, handle)
        gpu["name"] = ask(n.nvmlDeviceGetName, handle)
        pci = ask(n.nvmlDeviceGetPciInfo, handle)
        gpu["bus"] = plain(pci.busId) if pci is not None else None
        mode = ask(n.nvmlDeviceGetMigMode, handle)
        gpu["mig"] = bool(mode and mode[0])
        gpu.update(sizes(handle))
        capability = ask(n.nvmlDeviceGetCudaComputeCapability, handle)
        gpu["cap"] = "%d.%d" % tuple(capability) if capability else None
        busy = ask(n.nvmlDeviceGetUtilizationRates, handle)
        gpu["util"] = busy.gpu if busy is not None else None
        gpu["temp"] = ask(n.nvmlDeviceGetTemperature, handle, n.NVML_TEMPERATURE_GPU)
        if gpu["mig"]:
            gpu["instances"] = list(instances(handle))
    except n.NVMLError as error:
        gpu["fault"] = str(error)
    return gpu

def instances(handle):
    for slot in range(ask(n.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            mig = n.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except n.NVMLError:
            continue
        yield {"uuid": ask(n.nvmlDeviceGetUUID, mig), "name": ask(n.nvmlDeviceGetName, mig), **sizes(mig)}

try:
    n.nvmlInit()
    cuda = ask(n.nvmlSystemGetCudaDriverVersion_v2)
    answer = {
        "driver": ask(n.nvmlSystemGetDriverVersion),
        "cuda": "%d.%d" % (cuda // 1000, cuda % 1000 // 10) if cuda else None,
        "gpus": [look(index) for index in range(n.nvmlDeviceGetCount())],
    }
except n.NVMLError as error:
    answer = {"error": str(error), "value": error.value}
print(json.dumps(answer))
"""


@frozen
class NvmlAnswer:
    """What NVML said. `error` is its own sentence when it could not be initialised; then the rest is empty."""

    rows: tuple[Row, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    error: str = ""


def installed() -> bool:
    """True when `nvidia-ml-py` is importable."""
    try:
        return importlib.util.find_spec("pynvml") is not None
    except (ImportError, ValueError):
        return False


def ask(tools: GpuTools) -> NvmlAnswer:
    """Ask NVML for every GPU.

    Raises:
        CommandError: the child could not be started, crashed, hung, or gave no usable answer.
    """
    return parse(run_python(_CODE, tools.run, _TIMEOUT_S))


def parse(answer: Mapping[str, Any]) -> NvmlAnswer:
    """The child's JSON as rows; what has not the expected type counts as unknown."""
    if isinstance(answer.get("error"), str):
        return NvmlAnswer(error=answer["error"])
    gpus = answer.get("gpus")
    return NvmlAnswer(
        rows=tuple(_row(gpu) for gpu in gpus if isinstance(gpu, dict)) if isinstance(gpus, list) else (),
        driver=_text(answer.get("driver")),
        cuda=_text(answer.get("cuda")),
    )


def _row(gpu: Mapping[str, Any]) -> Row:
    index, bus, instances = _int(gpu.get("index")), _text(gpu.get("bus")), gpu.get("instances")
    return Row(
        index=index,
        uuid=_text(gpu.get("uuid")),
        name=_text(gpu.get("name")),
        pci_bus_id=pci_address(bus) if bus else None,
        total_bytes=_int(gpu.get("total")),
        used_bytes=_int(gpu.get("used")),
        free_bytes=_int(gpu.get("free")),
        compute_cap=_text(gpu.get("cap")),
        utilization_percent=_float(gpu.get("util")),
        temperature_c=_float(gpu.get("temp")),
        mig=gpu.get("mig") is True,
        sized=gpu.get("sized") is not False,
        fault=f"NVML says: {gpu['fault']}" if _text(gpu.get("fault")) else "",
        instances=tuple(
            Instance(
                uuid=str(mig["uuid"]),
                name=_text(mig.get("name")),
                total_bytes=_int(mig.get("total")),
                used_bytes=_int(mig.get("used")),
                free_bytes=_int(mig.get("free")),
            )
            for mig in instances
            if isinstance(mig, dict) and _text(mig.get("uuid"))
        )
        if isinstance(instances, list)
        else None,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _int(value: object) -> int | None:
    return value if type(value) is int else None


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
