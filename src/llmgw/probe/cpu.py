"""The processor: what the kernel enables on every core, its level, its name."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from llmgw.domain.facts import CpuFacts
from llmgw.errors import CommandError, FileError
from llmgw.probe.child import run_python
from llmgw.probe.tree import Tree
from llmgw.system.commands import Runner
from llmgw.system.files import make_dir, read_text, write_atomic

# kernel names of the flags of the x86-64 psABI levels; a level has all flags of those below it
_LEVELS = (
    ("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"),
    ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
)
_NAME_TIMEOUT_S = 10.0
# the library's public entry spins a core for a second and starts nine programs: only its two cheap readers are used
_NAME_CODE = """
name = None
try:
    from cpuinfo import cpuinfo
    for reader in ("_get_cpu_info_from_proc_cpuinfo", "_get_cpu_info_from_lscpu"):
        try:
            found = (getattr(cpuinfo, reader)() or {}).get("brand_raw")
        except Exception:
            found = None
        if isinstance(found, str) and any(letter.isalpha() for letter in found):
            name = found
            break
except ImportError:
    pass
print(json.dumps({"name": name}))
"""


def parse_cpuinfo(text: str) -> tuple[dict[str, str], ...]:
    """/proc/cpuinfo as one map per processor. Blocks without a `processor` number (an ARM trailer) are left out."""
    blocks: list[dict[str, str]] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        fields: dict[str, str] = {}
        for line in block.splitlines():
            key, colon, value = line.partition(":")
            if colon:
                fields[key.strip()] = value.strip()
        if fields.get("processor", "").isdigit():
            blocks.append(fields)
    return tuple(blocks)


def common_flags(processors: Collection[dict[str, str]]) -> tuple[str, ...] | None:
    """The flags every processor has (`flags` on x86, `Features` on ARM), sorted; None when any lists none."""
    sets = [set((cpu.get("flags") or cpu.get("Features") or "").split()) for cpu in processors]
    if not sets or not all(sets):
        return None
    return tuple(sorted(set.intersection(*sets)))


def x86_level(flags: Collection[str]) -> int:
    """The x86-64 level (1-4) of the System V psABI that `flags` reach."""
    level = 1
    for needed in _LEVELS:
        if not all(flag in flags for flag in needed):
            break
        level += 1
    return level


def cpu_facts(tree: Tree, arch: str, name: str | None) -> CpuFacts:
    """Look at the processors.

    Args:
        arch: machine name of the kernel, such as `x86_64` or `aarch64`.
        name: the processor's name when known, see `CpuName`.
    """
    processors = parse_cpuinfo(tree.text("/proc/cpuinfo", 16 << 20) or "")
    flags = common_flags(processors)
    x86 = arch == "x86_64" and flags is not None
    return CpuFacts(
        arch=arch,
        cores=len(processors) or None,
        name=name,
        flags=flags,
        level=x86_level(flags or ()) if x86 else None,
        virtual="hypervisor" in (flags or ()) if x86 else None,
    )


class CpuName:
    """The processor's name, asked for once per boot in a child with a deadline and remembered in `work_dir`."""

    def __init__(self, tree: Tree, runner: Runner, work_dir: str) -> None:
        self._tree = tree
        self._runner = runner
        self._file = Path(work_dir) / "cpu-name.json"
        self._known: tuple[str, str] | None = None

    def get(self, boot_id: str) -> str | None:
        """The name, None when nothing tells it."""
        for remembered in self._remembered():
            if remembered[0] == boot_id:
                self._known = remembered
                return remembered[1]
        name = self._ask() or self._plain()
        if name:
            self._known = (boot_id, name)
            try:
                make_dir(self._file.parent)
                write_atomic(self._file, json.dumps({"boot_id": boot_id, "name": name}).encode())
            except FileError:  # a read-only work_dir is told by whoever needs it; a name is asked for again then
                pass
        return name

    def _remembered(self) -> Iterator[tuple[str, str]]:
        if self._known is not None:
            yield self._known
        try:
            data = json.loads(read_text(self._file, 4096) or "")
        except ValueError:
            return
        if isinstance(data, dict) and isinstance(data.get("boot_id"), str) and isinstance(data.get("name"), str):
            yield data["boot_id"], data["name"]

    def _ask(self) -> str | None:
        if not self._tree.real:  # the child would describe this machine, not the tree
            return None
        try:
            answer = run_python(
                _NAME_CODE, lambda argv, timeout: self._runner.run(argv, timeout_s=timeout), _NAME_TIMEOUT_S
            )
        except CommandError:
            return None
        name = answer.get("name")
        return name.strip()[:200] if isinstance(name, str) and name.strip() else None

    def _plain(self) -> str | None:
        for processor in parse_cpuinfo(self._tree.text("/proc/cpuinfo", 16 << 20) or ""):
            name = processor.get("model name") or processor.get("cpu model") or processor.get("uarch")
            if name:
                return name[:200]
        return None
