from __future__ import annotations

import pytest
from probe_fakes import make_tree

from llmgw.probe import memory
from llmgw.probe.tree import Tree

KIB = 1024
GIB = 1 << 30
MEMINFO = (
    "MemTotal:       33554432 kB\nMemFree:         1000000 kB\nMemAvailable:   25165824 kB\nHugePages_Total:       0\n"
)
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 24 0:30 / /sys/fs/cgroup/memory rw shared:14 - cgroup cgroup rw,memory\n"
HYBRID_V2 = "30 24 0:26 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 cgroup2 rw\n"
UNIT = "/sys/fs/cgroup/system.slice/llmgw-agent.service"
NONE_V1 = "9223372036854771712\n"


def tree(tmp_path, files):
    return Tree(make_tree(tmp_path, {"/proc/meminfo": MEMINFO, **files}))


def test_without_a_limit_available_is_what_the_kernel_says(tmp_path):
    found = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/user.slice\n",
            "/proc/self/mountinfo": V2,
            "/sys/fs/cgroup/user.slice/memory.max": "max\n",
        },
    )
    assert memory.memory_facts(found).total_bytes == 32 * GIB
    assert memory.memory_facts(found).limit_bytes is None
    assert memory.available_bytes(found) == 24 * GIB


def test_a_v2_limit_of_an_ancestor_counts_and_file_cache_that_yields_does_not(tmp_path):
    found = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/system.slice/llmgw-agent.service\n",
            "/proc/self/mountinfo": V2,
            f"{UNIT}/memory.max": "max\n",
            "/sys/fs/cgroup/system.slice/memory.max": f"{16 * GIB}\n",
            "/sys/fs/cgroup/system.slice/memory.current": f"{10 * GIB}\n",
            "/sys/fs/cgroup/system.slice/memory.stat": f"anon 5\nactive_file 7\ninactive_file {4 * GIB}\n",
        },
    )
    assert memory.memory_facts(found).limit_bytes == 16 * GIB
    assert memory.available_bytes(found) == 10 * GIB


def test_the_smallest_limit_up_the_tree_wins(tmp_path):
    found = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/system.slice/llmgw-agent.service\n",
            "/proc/self/mountinfo": V2,
            f"{UNIT}/memory.max": f"{8 * GIB}\n",
            f"{UNIT}/memory.current": f"{GIB}\n",
            "/sys/fs/cgroup/system.slice/memory.max": f"{16 * GIB}\n",
            "/sys/fs/cgroup/system.slice/memory.current": f"{15 * GIB}\n",
        },
    )
    assert memory.memory_facts(found).limit_bytes == 8 * GIB
    assert memory.available_bytes(found) == GIB


def test_v1_and_hybrid_hosts_are_limited_by_their_memory_controller(tmp_path):
    found = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "4:memory:/box/engine\n1:cpu,cpuacct:/\n0::/\n",
            "/proc/self/mountinfo": HYBRID_V2 + V1,
            "/sys/fs/cgroup/memory/box/engine/memory.limit_in_bytes": NONE_V1,
            "/sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
            "/sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{3 * GIB}\n",
            "/sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {GIB}\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": NONE_V1,
        },
    )
    assert memory.memory_facts(found).limit_bytes == 4 * GIB
    assert memory.available_bytes(found) == 2 * GIB


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../../elsewhere"])
def test_in_a_container_the_mounts_own_root_is_the_top(tmp_path, path):
    found = tree(
        tmp_path,
        {
            "/proc/self/cgroup": f"0::{path}\n",
            "/proc/self/mountinfo": "30 24 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
            "/sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "/sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert memory.memory_facts(found).limit_bytes == 2 * GIB


def test_a_limit_above_the_machines_memory_is_no_limit_and_an_overdrawn_one_leaves_nothing(tmp_path):
    files = {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": V2, "/sys/fs/cgroup/memory.current": f"{3 * GIB}\n"}
    assert (
        memory.memory_facts(tree(tmp_path, {**files, "/sys/fs/cgroup/memory.max": f"{99 * GIB}\n"})).limit_bytes is None
    )
    assert memory.available_bytes(tree(tmp_path, {**files, "/sys/fs/cgroup/memory.max": f"{GIB}\n"})) == 0


def test_unknown_memory_is_none(tmp_path):
    empty = Tree(str(tmp_path))
    assert memory.memory_facts(empty).total_bytes is None
    assert memory.available_bytes(empty) is None
    assert memory.load_1m(empty) is None


def test_this_machine_has_no_more_available_than_it_has():
    total, available = memory.memory_facts(Tree()).total_bytes, memory.available_bytes(Tree())
    assert total is not None
    assert available is not None
    assert 0 < available <= total
    assert memory.load_1m(Tree()) is not None
