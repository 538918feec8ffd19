"""GPUs of other makers: seen and said, though nothing is placed on them yet."""

from __future__ import annotations

import re

from llmgw.domain.warnings import Concern
from llmgw.probe.tree import Tree
from llmgw.units import format_size

_AMD = "0x1002"
_WORTH_BYTES = 2 << 30


def other_gpu_concerns(tree: Tree) -> tuple[Concern, ...]:
    """One concern for each AMD GPU with memory worth using, from the amdgpu driver's files in sysfs."""
    found: list[Concern] = []
    for card in tree.names("/sys/class/drm"):
        base = f"/sys/class/drm/{card}/device"
        if not re.fullmatch(r"card\d+", card) or tree.text(f"{base}/vendor") != _AMD:
            continue
        vram = _number(tree.text(f"{base}/mem_info_vram_total"))
        gtt = _number(tree.text(f"{base}/mem_info_gtt_total"))
        # an APU shows a small carve-out; what it can really use is in the GTT
        size = gtt if vram and gtt and gtt >= 8 * vram else vram
        if size is not None and size >= _WORTH_BYTES:
            where = tree.path(base).resolve().name
            words = f"an AMD GPU ({where}, {format_size(size)}) is on this node: llmgw places nothing on AMD GPUs yet"
            found.append(Concern("gpu-unsupported", words, subject=where))
    return tuple(found)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
