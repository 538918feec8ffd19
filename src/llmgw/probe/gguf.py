"""The header of a GGUF file, read from bytes that may be anybody's.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from attrs import field, frozen

from llmgw.errors import LlmgwError

MAX_HEADER_BYTES = 64 << 20
_MAX_PAIRS = 8_192
_MAX_TENSORS = 20_000
_MAX_KEY = 65_535
_MAX_STRINGS = 1_000_000  # the largest vocabularies with their merges have about 800 000
_MAX_KEPT_STRING = 1024
_MAX_KEPT_ARRAY = 4096
_MAX_DIMS = 4
_MAX_ELEMENTS = 1 << 60

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# ggml type -> (elements in a block, bytes of a block), from ggml's type traits
_TYPES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66),
    17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54),
    35: (256, 66), 39: (32, 17), 40: (64, 36),
}  # fmt: skip

Value = int | float | bool | str | tuple[int | float | bool, ...]


_MAX_LAYERS = 10_000
_MAX_CACHE_BYTES = 1 << 30


class GgufError(LlmgwError):
    """The bytes are no GGUF header that llmgw can read."""

    code = "gguf-invalid"


class NeedMore(GgufError):
    """The header goes on beyond the bytes given."""

    code = "gguf-short"


@frozen
class GgufHeader:
    """What a GGUF file says about itself.

    Args:
        version: of the format.
        values: numbers, short strings and short arrays of numbers by key, such as `qwen3.block_count`.
        tensor_count: tensors in this file.
        tensor_bytes: bytes of all tensors of known type.
        data_start, data_end: where tensor data begins and must at least end in the file, bytes.
        unknown_types: ggml types llmgw does not know; the real end may then be later.
        has_chat_template: the tokenizer carries one.
        lengths: number of elements of arrays too long to keep, such as `tokenizer.ggml.tokens`.
    """

    version: int
    values: Mapping[str, Value]
    tensor_count: int
    tensor_bytes: int
    data_start: int
    data_end: int
    unknown_types: tuple[int, ...] = ()
    has_chat_template: bool = False
    lengths: Mapping[str, int] = field(factory=dict)

    @property
    def architecture(self) -> str | None:
        """`general.architecture`, such as `qwen3`."""
        value = self.values.get("general.architecture")
        return value if isinstance(value, str) else None

    def count(self, name: str) -> int | None:
        """A whole number of the architecture, such as `block_count`, `context_length`, `attention.head_count`,
        `attention.key_length`. Of a value per layer, the largest. None when the file does not tell."""
        value = self.values.get(f"{self.architecture}.{name}")
        if isinstance(value, tuple):
            value = max((item for item in value if isinstance(item, int)), default=None)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    @property
    def cache_bytes_per_token(self) -> int | None:
        """Bytes of a token in a 16-bit key/value cache: 2 x sum over layers of key/value heads x (key + value length).

        Keys are those of GGUF files made for llama.cpp. Heads may differ by layer; lengths default to embedding length
        / heads. With latent attention a layer keeps `attention.kv_lora_rank` + `rope.dimension_count` values. None
        where tokens do not all take the same: sliding windows and recurrent layers.
        """
        layers, heads = self.count("block_count"), self.count("attention.head_count")
        if not layers or layers > _MAX_LAYERS or self.count("attention.sliding_window") or self.count("ssm.state_size"):
            return None
        latent = self.count("attention.kv_lora_rank")
        if latent:
            rope = self.count("rope.dimension_count")
            return None if rope is None else 2 * layers * (latent + rope)
        per_layer = self.values.get(f"{self.architecture}.attention.head_count_kv")
        if isinstance(per_layer, tuple):
            if len(per_layer) != layers or not all(type(item) is int and item >= 0 for item in per_layer):
                return None
            total = sum(int(item) for item in per_layer)
        else:
            each = self.count("attention.head_count_kv")
            total = layers * (each if each is not None else heads or 0)
        embedding = self.count("embedding_length")
        usual = embedding // heads if embedding and heads else None
        key, value = self.count("attention.key_length"), self.count("attention.value_length")
        key, value = usual if key is None else key, usual if value is None else value
        if key is None or value is None or not total:
            return None
        found = 2 * total * (key + value)
        return found if found <= _MAX_CACHE_BYTES else None

    @property
    def split(self) -> tuple[int, int] | None:
        """(number of this part from 0, parts) of a split set, None for a whole file."""
        number, parts = self.values.get("split.no"), self.values.get("split.count")
        return (number, parts) if isinstance(number, int) and isinstance(parts, int) and parts > 1 else None


class _Reader:
    """A position in bytes. Nothing is ever allocated by a size the file names."""

    __slots__ = ("data", "pos", "strings")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pos = 0
        self.strings = 0

    def skip(self, count: int) -> int:
        start = self.pos
        end = start + count
        if end > MAX_HEADER_BYTES:
            raise GgufError("the header is unreasonably large", cause=f"something in it ends at byte {end}")
        if end > len(self.data):
            raise NeedMore("the header goes on beyond the end of the file")
        self.pos = end
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.skip(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.skip(8))[0])

    def string(self) -> bytes:
        length = self.u64()
        start = self.skip(length)
        return self.data[start : start + length]

    def skip_string(self) -> int:
        length = self.u64()
        self.skip(length)
        return length

    def skip_strings(self, count: int) -> None:
        self.strings += count
        if self.strings > _MAX_STRINGS:
            raise GgufError(f"the header has more than {_MAX_STRINGS} strings")
        data, pos, unpack = self.data, self.pos, _U64.unpack_from
        try:
            for _ in range(count):
                pos += 8 + unpack(data, pos)[0]
        except (struct.error, OverflowError):  # the position is beyond the bytes, or beyond any memory
            self.skip(pos + 8 - self.pos)
            raise NeedMore("the header goes on beyond the end of the file") from None
        self.skip(pos - self.pos)


def parse_header(data: bytes) -> GgufHeader:
    """Read a header from the first bytes of a file.

    Args:
        data: the file's beginning; never more than MAX_HEADER_BYTES of it are needed.

    Raises:
        NeedMore: the header goes on beyond `data`.
        GgufError: it is no GGUF file, or one that contradicts itself; in words.
    """
    reader = _Reader(data)
    if len(data) >= 4 and data[:4] != b"GGUF":
        raise GgufError("not a GGUF file", cause="it does not begin with `GGUF`")
    reader.skip(4)
    version = reader.u32()
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        raise GgufError(
            f"GGUF version {'big endian' if swapped else version} is not supported", hint="convert the model again"
        )
    tensor_count, pair_count = reader.u64(), reader.u64()
    if tensor_count > _MAX_TENSORS or pair_count > _MAX_PAIRS:
        raise GgufError("the header is unreasonable", cause=f"{tensor_count} tensors and {pair_count} values announced")
    values: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    chat_template = False
    for _ in range(pair_count):
        key = _key(reader)
        kind = reader.u32()
        if key == "tokenizer.chat_template" and kind == _STRING:
            chat_template = reader.skip_string() > 0
            continue
        kept = _value(reader, kind, key, lengths)
        if kept is not None:
            values[key] = kept
    return _tensors(reader, version, values, lengths, tensor_count, chat_template)


def _tensors(
    reader: _Reader,
    version: int,
    values: dict[str, Value],
    lengths: dict[str, int],
    tensor_count: int,
    chat_template: bool,
) -> GgufHeader:
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise GgufError("the header is unreasonable", cause=f"alignment {alignment!r}")
    total = end = 0
    unknown: set[int] = set()
    for _ in range(tensor_count):
        reader.skip_string()
        dims = reader.u32()
        if dims > _MAX_DIMS:
            raise GgufError("the header is unreasonable", cause=f"a tensor of {dims} dimensions")
        elements, row = 1, 1
        for axis in range(dims):
            size = reader.u64()
            row = size if axis == 0 else row
            elements *= size
        if elements > _MAX_ELEMENTS:
            raise GgufError("the header is unreasonable", cause="a tensor of more than 2^60 elements")
        kind, offset = reader.u32(), reader.u64()
        if kind in _TYPES:
            block, block_bytes = _TYPES[kind]
            if row % block:
                raise GgufError("the header is unreasonable", cause=f"a row of {row} elements in blocks of {block}")
            size = elements // block * block_bytes
        else:
            unknown.add(kind)
            size = 0
        if offset > _MAX_ELEMENTS:
            raise GgufError("the header is unreasonable", cause="a tensor begins beyond 2^60 bytes")
        total += size
        end = max(end, offset + size)
    start = -(-reader.pos // alignment) * alignment
    return GgufHeader(
        version=version,
        values=values,
        tensor_count=tensor_count,
        tensor_bytes=total,
        data_start=start,
        data_end=start + end,
        unknown_types=tuple(sorted(unknown)),
        has_chat_template=chat_template,
        lengths=lengths,
    )


def _key(reader: _Reader) -> str:
    length = reader.u64()
    if length > _MAX_KEY:
        raise GgufError("the header is unreasonable", cause=f"a key of {length} bytes")
    start = reader.skip(length)
    return reader.data[start : start + length].decode("utf-8", "replace")


def _value(reader: _Reader, kind: int, key: str, lengths: dict[str, int]) -> Value | None:
    """Read one value; None for what is not kept."""
    if kind in _SCALARS:
        form = f"<{_SCALARS[kind]}"
        number: int | float | bool = struct.unpack_from(form, reader.data, reader.skip(struct.calcsize(form)))[0]
        return number
    if kind == _STRING:
        raw = reader.string()
        return raw.decode("utf-8", "replace") if len(raw) <= _MAX_KEPT_STRING else None
    if kind != _ARRAY:
        raise GgufError("the header is unreasonable", cause=f"a value of type {kind}")
    inner, count = reader.u32(), reader.u64()
    if inner == _STRING:
        lengths[key] = count
        reader.skip_strings(count)
        return None
    if inner not in _SCALARS:
        raise GgufError("the header is unreasonable", cause=f"an array of type {inner}")
    width = struct.calcsize(f"<{_SCALARS[inner]}")
    if count * width > MAX_HEADER_BYTES:
        raise GgufError("the header is unreasonably large", cause=f"an array of {count} elements")
    start = reader.skip(count * width)
    if count > _MAX_KEPT_ARRAY:
        lengths[key] = count
        return None
    return struct.unpack_from(f"<{count}{_SCALARS[inner]}", reader.data, start)
