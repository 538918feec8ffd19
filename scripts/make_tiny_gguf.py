#!/usr/bin/env python3
"""Write a tiny GGUF model with random weights that a real llama-server loads, from the standard library alone.

    make_tiny_gguf.py OUT.gguf                       about 0.6 MB, chat template, generates whole words for ever
    make_tiny_gguf.py OUT.gguf --stops               answers end by themselves after a few words
    make_tiny_gguf.py OUT.gguf --embedding           an embedding model (mean pooling)
    make_tiny_gguf.py OUT.gguf --layers 12 --embd 1024 --heads 16 --kv-heads 4 --ff 4096   slow, 300 MB

The format is GGUF version 3: header, key-value pairs, tensor infos, then the tensors, each aligned to 32 bytes. The
same options give the same bytes everywhere.

Random logits would mostly pick single bytes, and a reply that is not UTF-8 makes llama-server answer 500. So
component 0 of the residual stream is held constant (no layer writes it) and column 0 of the output matrix works as a
bias per token: whole words are likely, everything else is not.
"""

from __future__ import annotations

import argparse
import random
import struct
from collections.abc import Iterator
from pathlib import Path

WORDS = """a an and as at be by can day do for from go has he her his how in is it its like may more my new no not
now of on one or our out over people said see she so some than that the their them then there they this
time to two up use was way we were what when which who will with word work would year yes you your rain
tree hill lake bird wind sand moon""".split()

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ALIGNMENT = 32
U32, I32, F32, BOOL, STR, ARRAY = 4, 5, 6, 7, 8, 9
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
TYPE_F32, TYPE_F16 = 0, 1
BOS, EOS = 1, 4


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: object) -> bytes:
    packers = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}
    body = text(str(value)) if kind == STR else struct.pack(packers[kind], value)
    return text(key) + struct.pack("<I", kind) + body


def array(key: str, kind: int, values: list) -> bytes:  # type: ignore[type-arg]
    if kind == STR:
        body = b"".join(text(v) for v in values)
    else:
        body = struct.pack(f"<{len(values)}{'f' if kind == F32 else 'i'}", *values)
    return text(key) + struct.pack("<IIQ", ARRAY, kind, len(values)) + body


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    tokens, scores, kinds = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>"], [0.0] * 5, [UNKNOWN] + [CONTROL] * 4
    for byte in range(256):
        tokens.append(f"<0x{byte:02X}>")
        scores.append(0.0)
        kinds.append(BYTE)
    # the tokenizer merges pairs, so every beginning of a word is a token too; longer pieces score higher
    pieces = ["\u2581", *(chr(c) for c in range(33, 127))]
    pieces += ["\u2581" + word[:length] for word in WORDS for length in range(1, len(word) + 1)]
    for place, piece in enumerate(dict.fromkeys(pieces)):
        tokens.append(piece)
        scores.append(len(piece) * 10.0 - place * 1e-3 - 1000.0)
        kinds.append(NORMAL)
    while len(tokens) % 32:
        tokens.append(f"<spare{len(tokens)}>")
        scores.append(-2000.0)
        kinds.append(5)
    return tokens, scores, kinds


class Noise:
    """Normal noise from a pool, so that a 300 MB model takes seconds, not minutes."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.pool = [rng.gauss(0, 1) for _ in range(65521)]
        self.packed: dict[float, bytes] = {}
        self.at = 0

    def f16(self, rows: int, cols: int) -> bytearray:
        scale = cols**-0.5
        if scale not in self.packed:
            self.packed[scale] = struct.pack(f"<{len(self.pool)}e", *(v * scale for v in self.pool))
        source, need, out = self.packed[scale], rows * cols * 2, bytearray()
        self.at = (self.at + 7919) % len(self.pool)
        out += source[self.at * 2 :]
        while len(out) < need:
            out += source
        return out[:need]


def put_column0(data: bytearray, cols: int, values: dict[int, float], default: float | None = None) -> bytearray:
    for row in range(len(data) // 2 // cols):
        value = values.get(row, default)
        if value is not None:
            struct.pack_into("<e", data, row * cols * 2, value)
    return data


def tensors(a: argparse.Namespace, tokens: list[str]) -> Iterator[tuple[str, tuple[int, ...], int, bytes]]:
    """(name, dimensions with the contiguous one first, type, bytes)."""
    noise, d, kv = Noise(a.seed), a.embd, a.embd // a.heads * a.kv_heads
    ones = struct.pack(f"<{d}f", *[1.0] * d)

    def weight(name: str, rows: int, cols: int, *, keep0: bool = False) -> tuple[str, tuple[int, ...], int, bytes]:
        data = noise.f16(rows, cols)
        if keep0:  # row 0 writes component 0 of the residual stream: leave it alone
            data[: cols * 2] = bytes(cols * 2)
        return name, (cols, rows), TYPE_F16, bytes(data)

    embedding = put_column0(noise.f16(len(tokens), d), d, {}, 3.0)
    yield "token_embd.weight", (d, len(tokens)), TYPE_F16, bytes(embedding)
    for i in range(a.layers):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", (d,), TYPE_F32, ones
        yield weight(b + "attn_q.weight", d, d)
        yield weight(b + "attn_k.weight", kv, d)
        yield weight(b + "attn_v.weight", kv, d)
        yield weight(b + "attn_output.weight", d, d, keep0=True)
        yield b + "ffn_norm.weight", (d,), TYPE_F32, ones
        yield weight(b + "ffn_gate.weight", a.ff, d)
        yield weight(b + "ffn_up.weight", a.ff, d)
        yield weight(b + "ffn_down.weight", d, a.ff, keep0=True)
    yield "output_norm.weight", (d,), TYPE_F32, ones
    bias = {i: 0.0 for i, token in enumerate(tokens) if token[1:] in WORDS and token[0] == "\u2581"}
    bias[EOS] = 0.5 if a.stops else -20.0
    output = put_column0(noise.f16(len(tokens), d), d, bias, -20.0)
    yield "output.weight", (d, len(tokens)), TYPE_F16, bytes(output)


def metadata(a: argparse.Namespace, vocab: tuple[list[str], list[float], list[int]]) -> list[bytes]:
    tokens, scores, kinds = vocab
    arch = "llama."
    pairs = [
        pair("general.architecture", STR, "llama"),
        pair("general.type", STR, "model"),
        pair("general.name", STR, a.name),
        pair("general.file_type", U32, 1),
        pair(arch + "context_length", U32, a.ctx),
        pair(arch + "embedding_length", U32, a.embd),
        pair(arch + "block_count", U32, a.layers),
        pair(arch + "feed_forward_length", U32, a.ff),
        pair(arch + "attention.head_count", U32, a.heads),
        pair(arch + "attention.head_count_kv", U32, a.kv_heads),
        pair(arch + "attention.layer_norm_rms_epsilon", F32, 1e-5),
        pair(arch + "rope.dimension_count", U32, a.embd // a.heads),
        pair(arch + "rope.freq_base", F32, 10000.0),
        pair(arch + "vocab_size", U32, len(tokens)),
        pair("tokenizer.ggml.model", STR, "llama"),
        pair("tokenizer.ggml.pre", STR, "default"),
        array("tokenizer.ggml.tokens", STR, tokens),
        array("tokenizer.ggml.scores", F32, scores),
        array("tokenizer.ggml.token_type", I32, kinds),
        pair("tokenizer.ggml.bos_token_id", U32, BOS),
        pair("tokenizer.ggml.eos_token_id", U32, EOS),
        pair("tokenizer.ggml.unknown_token_id", U32, 0),
        pair("tokenizer.ggml.add_bos_token", BOOL, True),
        pair("tokenizer.ggml.add_eos_token", BOOL, False),
    ]
    if a.embedding:
        pairs.append(pair(arch + "pooling_type", U32, 1))
    if not a.no_chat_template:
        pairs.append(pair("tokenizer.chat_template", STR, CHAT_TEMPLATE))
    return pairs


def padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


def write(path: Path, a: argparse.Namespace) -> None:
    vocab = vocabulary()
    pairs, listed = metadata(a, vocab), list(tensors(a, vocab[0]))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(pairs)) + b"".join(pairs)
    offset = 0
    for name, dims, kind, data in listed:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        offset += len(data) + len(padding(len(data)))
    with path.open("wb") as out:
        out.write(head + padding(len(head)))
        for _, _, _, data in listed:
            out.write(data + padding(len(data)))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a tiny GGUF model with random weights")
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", default="tiny")
    for option, value in dict(layers=2, embd=96, heads=4, kv_heads=2, ff=256, ctx=2048, seed=11).items():
        parser.add_argument("--" + option.replace("_", "-"), type=int, default=value)
    parser.add_argument("--stops", action="store_true", help="answers end by themselves")
    parser.add_argument("--embedding", action="store_true")
    parser.add_argument("--no-chat-template", action="store_true")
    a = parser.parse_args(argv)
    write(a.out, a)


if __name__ == "__main__":
    main()
