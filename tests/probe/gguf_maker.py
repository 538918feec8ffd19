"""GGUF bytes made by hand, honest or not."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, value: object) -> bytes:
    """One key with a value: bool, int (u32), float (f32), str, or a list of strings or ints."""
    head = text(key)
    if isinstance(value, bool):
        return head + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return head + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return head + struct.pack("<If", 6, value)
    if isinstance(value, str):
        return head + struct.pack("<I", 8) + text(value)
    assert isinstance(value, list)
    if value and isinstance(value[0], str):
        return head + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)
    return head + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(
    values: Mapping[str, object], tensors: Sequence[bytes] = (), data: int = 0, version: int = 3, alignment: int = 32
) -> bytes:
    """A whole file: header, padding, `data` zero bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    head += b"".join(pair(key, value) for key, value in values.items()) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


QWEN = {
    "general.architecture": "qwen3",
    "general.name": "Tiny",
    "qwen3.block_count": 28,
    "qwen3.context_length": 40960,
    "qwen3.attention.head_count": 16,
    "qwen3.attention.head_count_kv": 8,
    "qwen3.attention.key_length": 128,
    "qwen3.attention.value_length": 128,
    "qwen3.rope.freq_base": 1000000.0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["a", "bc", ""],
    "tokenizer.chat_template": "{{ messages }}" * 200,
}
