"""Bytes to messages: split anywhere, hostile in every known way."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_helpers import some_facts

from llmgw.domain.report import Desired
from llmgw.errors import WireError
from llmgw.wire.codec import MAX_NESTING, Codec, parse
from llmgw.wire.messages import OPENING_LIMIT, PROTOCOL, Ack, DesiredSet, Hello, Welcome, encode

HELLO = Hello(PROTOCOL, "node-a", "0.1.0", "b", "i", 1.5, 5.0, some_facts(hostname="nöde\u2028x"))
STREAM = encode(HELLO) + encode(Ack(1)) + encode(Ack(2))


def test_a_stream_split_at_every_offset_gives_the_same_messages() -> None:
    for at in range(len(STREAM) + 1):
        codec = Codec()
        assert codec.feed(STREAM[:at]) + codec.feed(STREAM[at:]) == [HELLO, Ack(1), Ack(2)]


def test_a_stream_fed_byte_by_byte_gives_the_same_messages() -> None:
    codec = Codec()
    got = [message for at in range(len(STREAM)) for message in codec.feed(STREAM[at : at + 1])]
    assert got == [HELLO, Ack(1), Ack(2)]
    assert (codec.messages, codec.bytes, codec.unknown) == (3, len(STREAM), 0)


HOSTILE = {
    "nesting": (b'{"type":"ack","seq":' + b"[" * 100_000, "nested too deep"),
    "balanced nesting": (b'{"type":"ack","x":' + b"[" * 33 + b"]" * 33 + b"}", "nested too deep"),
    "mixed nesting": (b'{"type":"ack","x":' + b'[{"a":' * 20 + b"1" + b"}]" * 20 + b"}", "nested too deep"),
    "nesting hidden behind a broken string": (b'{"a":"\\' + b"[" * 1000, "nested too deep|not JSON"),
    "duplicate key": (b'{"type":"ack","seq":1,"seq":2}', "duplicate key"),
    "duplicate key, escaped": (b'{"type":"ack","seq":1,"s\\u0065q":2}', "duplicate key"),
    "NaN": (b'{"type":"ack","seq":NaN}', "`NaN`"),
    "Infinity": (b'{"type":"ack","seq":-Infinity}', "`-Infinity`"),
    "number out of range": (b'{"type":"ack","seq":1e400}', "out of range"),
    "huge integer": (b'{"type":"ack","seq":' + b"9" * 10_000 + b"}", "64 bits"),
    "just too large an integer": (b'{"type":"ack","seq":18446744073709551616}', "64 bits"),
    "lone surrogate": (b'{"type":"ack","x":"\\ud800"}', "lone surrogate"),
    "lone surrogate as key": (b'{"type":"ack","\\uDFFF":1}', "lone surrogate"),
    "not UTF-8": (b'{"type":"ack","x":"\xff"}', "not UTF-8"),
    "surrogate in UTF-8": (b'{"type":"ack","x":"\xed\xa0\x80"}', "not UTF-8"),
    "UTF-16": ('{"type":"ack","seq":1}'.encode("utf-16"), "not UTF-8"),
    "byte order mark": (b'\xef\xbb\xbf{"type":"ack","seq":1}', "not JSON"),
    "no object": (b"[1]", "not a JSON object"),
    "empty line": (b"", "not JSON"),
    "no type": (b'{"seq":1}', "without a `type`"),
    "type is no string": (b'{"type":["ack"],"seq":1}', "without a `type`"),
    "missing field": (b'{"type":"ack"}', "not a valid Ack"),
    "wrong type": (b'{"type":"ack","seq":"1"}', "not a valid Ack"),
    "boolean for a number": (b'{"type":"ack","seq":true}', "not a valid Ack"),
    "two values": (b'{"type":"ack","seq":1}{}', "not JSON"),
    "trailing comma": (b'{"type":"ack","seq":1,}', "not JSON"),
    "raw control character": (b'{"type":"ack","x":"\x01"}', "not JSON"),
    "HTTP": (b"GET / HTTP/1.1\r", "not JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_refused_and_the_connection_is_of_no_more_use(name: str) -> None:
    line, words = HOSTILE[name]
    codec = Codec(1 << 20)
    with pytest.raises(WireError, match=words):
        codec.feed(line + b"\n")
    with pytest.raises(WireError, match=words):
        codec.feed(b'{"type":"ack","seq":1}\n')


FINE = {
    "deepest nesting": b'{"type":"ack","seq":1,"x":' + b"[" * (MAX_NESTING - 1) + b"]" * (MAX_NESTING - 1) + b"}",
    "brackets in strings": b'{"type":"ack","seq":1,"x":"' + b"[{" * 5000 + b'\\"[["}',
    "surrogate pair": b'{"type":"ack","seq":1,"x":"\\ud83d\\ude00"}',
    "unknown keys": b'{"type":"ack","seq":1,"later":{"a":[1,2,null]}}',
    "line separators": '{"type":"ack","seq":1,"x":"\u2028\u0085\f"}'.replace("\f", "\\f").encode(),
    "carriage return": b'{"type":"ack","seq":1}\r',
    "empty lists, many": b'{"type":"ack","seq":1,"x":[' + b"[]," * 1000 + b"[]]}",
}


@pytest.mark.parametrize("name", FINE)
def test_odd_but_right_json_is_understood(name: str) -> None:
    assert Codec().feed(FINE[name] + b"\n") == [Ack(1)]


def test_an_unknown_type_is_counted_and_skipped() -> None:
    codec = Codec()
    assert codec.feed(b'{"type":"from-the-future","x":1}\n' + encode(Ack(7))) == [Ack(7)]
    assert codec.unknown == 1


def test_messages_before_a_fault_are_returned_and_the_fault_is_kept() -> None:
    codec = Codec()
    assert codec.feed(encode(Ack(1)) + b"nonsense\n" + encode(Ack(2))) == [Ack(1)]
    assert codec.fault is not None
    with pytest.raises(WireError):
        codec.feed(b"")


def test_a_line_without_an_end_is_refused_at_the_limit_and_held_no_longer() -> None:
    codec = Codec()
    codec.feed(b"x" * OPENING_LIMIT)
    with pytest.raises(WireError, match="too long"):
        codec.feed(b"x")
    assert not codec._buffer


def test_the_limit_is_64_kib_before_the_welcome_and_1_mib_after() -> None:
    long = encode(DesiredSet(Desired(1, 1)))[:-2] + b',"x":"' + b"y" * 100_000 + b'"}\n'
    with pytest.raises(WireError, match="too long"):
        Codec().feed(long)
    codec = Codec()
    codec.raise_limit()
    assert codec.feed(long) == [DesiredSet(Desired(1, 1))]
    with pytest.raises(WireError, match="too long"):
        codec.feed(b" " * (1 << 20) + b"1")


def test_what_follows_a_welcome_in_the_same_bytes_has_the_full_length() -> None:
    long = encode(DesiredSet(Desired(1, 1)))[:-2] + b',"x":"' + b"y" * 100_000 + b'"}\n'
    welcome = Welcome(PROTOCOL, "s", 1, 5.0)
    assert len(Codec(peer_welcomes=True).feed(encode(welcome) + long)) == 2
    server_end = Codec()
    server_end.feed(encode(welcome) + long)
    assert server_end.fault is not None


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":' + b'"\\' * 500_000,
        b'{"a":' + b'\\"' * 500_000,
        b"[" * 1_000_000,
        b"[]," * 330_000,
        b'"' * 1_000_000,
        b"\\" * 1_000_000,
    ],
    ids=["escaped quotes", "quotes behind backslashes", "open", "many", "quotes", "backslashes"],
)
def test_a_hostile_megabyte_costs_less_than_a_second(line: bytes) -> None:
    began = time.process_time()
    with pytest.raises(WireError):
        parse(line)
    assert time.process_time() - began < 1.0


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["type", "seq", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | _JSON.map(lambda value: json.dumps(value).encode()), st.integers(0, 200))
def test_no_bytes_make_anything_but_messages_or_a_wire_error(data: bytes, at: int) -> None:
    codec = Codec()
    for chunk in (data[:at], data[at:], b"\n"):
        try:
            codec.feed(chunk)
        except WireError:
            return


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=5), st.lists(st.integers(1, 40), max_size=30))
def test_any_split_of_good_lines_gives_them_back(numbers: list[int], cuts: list[int]) -> None:
    stream = b"".join(encode(Ack(number)) for number in numbers)
    codec, got, at = Codec(), [], 0
    for cut in [*cuts, len(stream)]:
        got += codec.feed(stream[at : at + cut])
        at += cut
    assert got == [Ack(number) for number in numbers]
