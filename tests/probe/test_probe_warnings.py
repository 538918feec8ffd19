from __future__ import annotations

import pytest

from llmgw.domain.facts import (
    CpuFacts,
    DiskReading,
    Finding,
    GpuFacts,
    MemoryFacts,
    NodeFacts,
    NvidiaFacts,
    OsFacts,
    Readings,
    Truth,
)
from llmgw.domain.warnings import Concern, dated, disk_concerns, node_concerns

GB = 10**9


def facts(**more) -> NodeFacts:
    base = {
        "hostname": "n", "boot_id": "b", "os": OsFacts("debian", glibc="2.36", family="debian"),
        "cpu": CpuFacts("aarch64"), "memory": MemoryFacts(), "mgmt_addr": "192.0.2.1",
        "nvidia": NvidiaFacts(Finding(Truth.NO, "none")),
    }  # fmt: skip
    return NodeFacts(**{**base, **more})


@pytest.mark.parametrize(
    ("free", "total", "low"),
    [
        (4 * GB, 20 * GB, True),
        (6 * GB, 100 * GB, False),
        (6 * GB, 200 * GB, True),
        (19 * GB, 4000 * GB, True),
        (21 * GB, 4000 * GB, False),
        (None, 100 * GB, False),
        (0, 0, False),
        (0, 100 * GB, True),
    ],
)
def test_a_disk_is_low_by_size_and_by_share(free, total, low):
    assert bool(disk_concerns([DiskReading("/x", free, total)])) == low


def test_paths_on_one_file_system_are_one_concern():
    same = [DiskReading(path, 1 * GB, 50 * GB) for path in ("/a", "/b", "/c")]
    (concern,) = disk_concerns([*same, DiskReading("/d", 40 * GB, 50 * GB)])
    assert "only 1.0 GB of 50 GB free for `/a`, `/b` and `/c`" in concern.words


def test_a_sound_node_has_no_concerns():
    assert node_concerns(facts(), Readings(0.0)) == ()


def test_each_thing_wrong_has_its_own_code():
    node = facts(
        os=OsFacts("alpine", family="alpine"),
        cpu=CpuFacts("x86_64", flags=("sse2",)),
        mgmt_addr=None,
        gpus=(GpuFacts("GPU-a", name="L4", pci_bus_id="0000:01:00.0", faulty="GPU is lost"),),
    )
    found = node_concerns(node, Readings(0.0, disks=(DiskReading("/x", 0, GB),)))
    assert [c.code for c in found] == ["no-avx2", "no-glibc", "gpu-faulty", "no-mgmt-addr", "disk-low"]
    assert found[2].words == "GPU L4 at 0000:01:00.0: GPU is lost"


def test_dates_last_as_long_as_the_concern_and_subjects_are_apart():
    a, b = Concern("disk-low", "one", "/a"), Concern("disk-low", "two", "/b")
    warnings, known = dated([a], {}, 10.0)
    assert [(w.words, w.since) for w in warnings] == [("one", 10.0)]
    warnings, known = dated([Concern("disk-low", "other words", "/a"), b], known, 20.0)
    assert [(w.words, w.since) for w in warnings] == [("other words", 10.0), ("two", 20.0)]
    _, known = dated([], known, 30.0)
    assert dated([a, a], known, 40.0)[0][0].since == 40.0
    assert len(dated([a, a], known, 40.0)[0]) == 1
