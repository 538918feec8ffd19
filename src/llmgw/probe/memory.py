"""Memory: what the machine has, and what the control groups above the agent leave of it."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from attrs import frozen

from llmgw.domain.facts import MemoryFacts
from llmgw.probe.tree import Tree

# cgroup v1 writes the largest page-aligned number for "none"
_NO_LIMIT = 1 << 62
_MEMINFO = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


@frozen
class Limit:
    """One control group's limit and what is in use under it, bytes; `used_bytes` leaves out file cache that yields."""

    path: str
    limit_bytes: int
    used_bytes: int | None


@frozen
class _Mount:
    version: int
    root: str
    point: str


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo as name -> bytes."""
    return {name: int(kib) * 1024 for name, kib in _MEMINFO.findall(text)}


def parse_cgroup_paths(text: str) -> dict[int, str]:
    """/proc/self/cgroup as version (1: the memory controller's line, 2: the unified one) -> path in the hierarchy."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        number, controllers, path = parts
        if number == "0" and not controllers:
            found[2] = path
        elif "memory" in controllers.split(","):
            found[1] = path
    return found


def parse_cgroup_mounts(text: str) -> tuple[_Mount, ...]:
    """The cgroup hierarchies that can limit memory, from /proc/self/mountinfo (fields as in proc(5))."""
    mounts: list[_Mount] = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if not dash or len(left) < 5 or len(right) < 3:
            continue
        if right[0] == "cgroup2":
            mounts.append(_Mount(2, left[3], left[4]))
        elif right[0] == "cgroup" and "memory" in right[2].split(","):
            mounts.append(_Mount(1, left[3], left[4]))
    return tuple(mounts)


def limits(tree: Tree) -> tuple[Limit, ...]:
    """Every memory limit from the agent's own control group up to the root, v1, v2 or both at once."""
    paths = parse_cgroup_paths(tree.text("/proc/self/cgroup") or "")
    mounts = parse_cgroup_mounts(tree.text("/proc/self/mountinfo") or "") or (
        _Mount(2, "/", "/sys/fs/cgroup"),
        _Mount(1, "/", "/sys/fs/cgroup/memory"),
    )
    found: list[Limit] = []
    for mount in mounts:
        if mount.version in paths:
            found += _up_the_tree(tree, mount, paths[mount.version])
    return tuple(found)


def _up_the_tree(tree: Tree, mount: _Mount, path: str) -> list[Limit]:
    # in a container the hierarchy may be mounted from below its top, and the path may lead out of it
    inner = path.removeprefix(mount.root.rstrip("/")) if path.startswith(mount.root) else "/"
    inner_path = PurePosixPath(inner if inner.startswith("/") else f"/{inner}")
    if ".." in inner_path.parts:
        inner_path = PurePosixPath("/")
    found: list[Limit] = []
    for part in (inner_path, *inner_path.parents):
        directory = mount.point.rstrip("/") + str(part).rstrip("/")
        if mount.version == 2:
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit = _number(tree.text(f"{directory}/{names[0]}"))
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _number(tree.text(f"{directory}/{names[1]}"))
        if used is not None:
            stat = re.search(rf"^{names[2]} (\d+)$", tree.text(f"{directory}/memory.stat") or "", re.MULTILINE)
            used = max(0, used - (int(stat[1]) if stat else 0))
        found.append(Limit(directory, limit, used))
    return found


def memory_facts(tree: Tree) -> MemoryFacts:
    """Total memory and the smallest limit above the agent, bytes."""
    total = parse_meminfo(tree.text("/proc/meminfo") or "").get("MemTotal")
    smallest = min((limit.limit_bytes for limit in limits(tree)), default=None)
    if smallest is not None and total is not None and smallest >= total:
        smallest = None
    return MemoryFacts(total_bytes=total, limit_bytes=smallest)


def available_bytes(tree: Tree) -> int | None:
    """MemAvailable, capped by what every control group above the agent still has room for; None when unknown."""
    available = parse_meminfo(tree.text("/proc/meminfo") or "").get("MemAvailable")
    if available is None:
        return None
    rooms = [limit.limit_bytes - limit.used_bytes for limit in limits(tree) if limit.used_bytes is not None]
    return max(0, min([available, *rooms]))


def load_1m(tree: Tree) -> float | None:
    """Load average of the last minute."""
    match = re.match(r"(\d+\.\d+) ", tree.text("/proc/loadavg") or "")
    return float(match[1]) if match else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
