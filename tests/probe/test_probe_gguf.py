from __future__ import annotations

import struct
import time
import tracemalloc

import pytest
from gguf_maker import QWEN, gguf, tensor, text
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.probe.gguf import GgufError, NeedMore, parse_header

TENSORS = [tensor("token_embd.weight", [256, 10], 12, 0), tensor("norm", [256], 0, 1440)]
WHOLE = gguf(QWEN, TENSORS, 1440 + 1024)


def head(tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs)


def test_a_header_tells_the_models_shape():
    header = parse_header(WHOLE)
    assert header.architecture == "qwen3"
    shape = ("block_count", "context_length", "attention.head_count", "attention.head_count_kv", "attention.key_length")
    assert [header.count(name) for name in shape] == [28, 40960, 16, 8, 128]
    assert header.count("attention.sliding_window") is None
    assert header.has_chat_template
    assert header.lengths == {"tokenizer.ggml.tokens": 3}
    assert header.values["qwen3.rope.freq_base"] == 1000000.0
    assert header.split is None


def test_tensor_bytes_follow_the_types_blocks_and_the_end_is_where_the_last_one_ends():
    header = parse_header(WHOLE)
    assert header.tensor_bytes == 256 * 10 // 256 * 144 + 256 * 4
    assert header.data_start % 32 == 0
    assert header.data_end == header.data_start + 1440 + 1024 == len(WHOLE)


def test_a_value_per_layer_counts_by_its_largest():
    header = parse_header(gguf({"general.architecture": "x", "x.attention.head_count_kv": [0, 8, 4]}))
    assert header.count("attention.head_count_kv") == 8


def test_a_split_file_knows_its_place_and_a_wider_alignment_moves_the_data():
    values = {"general.architecture": "x", "split.no": 1, "split.count": 3, "general.alignment": 128}
    header = parse_header(gguf(values, alignment=128))
    assert header.split == (1, 3)
    assert header.data_start == 256


def test_an_unknown_tensor_type_is_named():
    header = parse_header(gguf({}, [tensor("a", [32], 99, 64)]))
    assert header.unknown_types == (99,)
    assert header.data_end == header.data_start + 64


@pytest.mark.parametrize("cut", [0, 3, 4, 10, 23, 24, 40, 100, 400, len(WHOLE) - 2464 - 64])
def test_a_header_cut_short_asks_for_more(cut):
    with pytest.raises(NeedMore):
        parse_header(WHOLE[:cut])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "big endian"),
        (head(tensors=1 << 40), "announced"),
        (head(pairs=1 << 63), "announced"),
        (head(pairs=1) + struct.pack("<Q", 1 << 62), "a key of"),
        (head(pairs=1) + text("k") + struct.pack("<IQ", 8, 1 << 62), "unreasonably large"),
        (head(pairs=1) + text("k") + struct.pack("<I", 77), "a value of type 77"),
        (head(pairs=1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "an array of type 9"),
        (head(pairs=1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 61), "unreasonably large"),
        (head(pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 40), "strings"),
        (head(pairs=1) + text("k") + struct.pack("<IIQQ", 9, 8, 2, 1 << 63), "unreasonably large"),
        (head(tensors=1) + text("t") + struct.pack("<I", 1000), "1000 dimensions"),
        (head(tensors=1) + tensor("t", [1 << 40, 1 << 40], 0, 0), "2^60 elements"),
        (head(tensors=1) + tensor("t", [33], 2, 0), "a row of 33 elements"),
        (head(tensors=1) + tensor("t", [32], 2, 1 << 63), "begins beyond"),
        (gguf({"general.alignment": 0}), "alignment 0"),
        (gguf({"general.alignment": 3}), "alignment 3"),
        (gguf({"general.alignment": "x"}), "alignment 'x'"),
    ],
)
def test_a_lying_header_is_refused_with_words(data, words):
    with pytest.raises(GgufError) as caught:
        parse_header(data)
    assert words in caught.value.words()


def test_no_lie_makes_the_reader_allocate_or_spin():
    hostile = head(pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, 1_000_000) + bytes(7 << 20)
    started = time.thread_time()
    with pytest.raises(NeedMore):
        parse_header(hostile)
    assert time.thread_time() - started < 1.0
    short = hostile[: 1 << 20]
    tracemalloc.start()
    with pytest.raises(NeedMore):
        parse_header(short)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(WHOLE) - 2464 - 1), st.binary(min_size=1, max_size=12))
def test_a_damaged_header_is_read_or_refused_but_never_crashes(position, damage):
    data = WHOLE[:position] + damage + WHOLE[position + len(damage) :]
    try:
        header = parse_header(data)
    except GgufError:
        return
    assert 0 < header.data_start <= header.data_end


def cache_of(**changed):
    values = {**QWEN, **{f"qwen3.{key.replace('__', '.')}": value for key, value in changed.items()}}
    kept = {key: value for key, value in values.items() if value is not None}
    return parse_header(gguf(kept)).cache_bytes_per_token


def test_the_header_says_what_a_token_takes_in_the_cache():
    assert cache_of() == 28 * 8 * (128 + 128) * 2
    assert cache_of(attention__head_count_kv=None) == 28 * 16 * (128 + 128) * 2
    assert cache_of(attention__head_count_kv=[4] * 14 + [0] * 14) == 14 * 4 * (128 + 128) * 2
    usual = cache_of(attention__key_length=None, attention__value_length=None, embedding_length=1024)
    assert usual == 28 * 8 * (64 + 64) * 2
    assert cache_of(attention__kv_lora_rank=512, rope__dimension_count=64) == 28 * (512 + 64) * 2


def test_a_header_whose_tokens_differ_or_that_lies_says_nothing_of_the_cache():
    assert cache_of(attention__sliding_window=4096) is None
    assert cache_of(ssm__state_size=16) is None
    assert cache_of(block_count=None) is None
    assert cache_of(block_count=2**31 - 1) is None
    assert cache_of(attention__head_count_kv=[4, 4]) is None
    assert cache_of(attention__key_length=None) is None
    assert cache_of(attention__key_length=2**31 - 1) is None
