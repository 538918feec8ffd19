"""Heads and chunked bodies, bytes in and verdict out: what is refused is refused however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway.bodies import ChunkedBody, read_asked
from llmgw.gateway.errors import RequestRefused
from llmgw.gateway.head import header_lines, read_head

GOOD = b"POST /v1/x?y=1 HTTP/1.1\r\nHost: h:1\r\nContent-Length: 5\r\nX-Request-Id: abc-1\r\nAccept: a/b\r\n"


def test_a_good_head_is_read():
    head = read_head(GOOD)
    assert (head.method, head.path, head.target, head.length) == ("POST", "/v1/x", b"/v1/x?y=1", 5)
    assert (head.host, head.request_id, head.accept, head.keep_alive) == (b"h:1", b"abc-1", b"a/b", True)
    assert header_lines(head.fields)[0] == (b"host", b"h:1")


@pytest.mark.parametrize(
    ("lines", "keep", "chunked"),
    [
        (b"Connection: close\r\n", False, False),
        (b"Connection: Keep-Alive, CLOSE\r\n", False, False),
        (b"TRANSFER-ENCODING: Chunked\r\n", True, True),
        (b"x-a: \xe4\r\n", True, False),
        (b"x-empty:\r\n", True, False),
    ],
)
def test_headers_have_their_meaning(lines, keep, chunked):
    head = read_head(b"GET / HTTP/1.1\r\nHost: x\r\n" + lines)
    assert (head.keep_alive, head.chunked) == (keep, chunked)


def test_http_1_0_needs_no_host_and_is_closed():
    assert read_head(b"GET / HTTP/1.0\r\n").keep_alive is False


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n", "both"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 5\r\n", "two `content-length`"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\ncontent-length: 6\r\n", "two `content-length`"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 5\r\n", "plain number"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n", "plain number"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n", "plain number"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0x5\r\n", "plain number"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5 5\r\n", "plain number"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length:\r\n", "plain number"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999999999\r\n", "plain number"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length : 5\r\n", "malformed"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n", "malformed"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity, chunked\r\n", "`chunked`"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n", "`chunked`"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", "two"),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", "HTTP/1.0"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n", "folded"),
        (b"POST / HTTP/1.1\r\n Host: x\r\n", "folded"),
        (b"POST / HTTP/1.1\nHost: x\r\n", "CR LF"),
        (b"POST / HTTP/1.1\r\nHost: x\nX: y\r\n", "CR LF"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX: a\rb\r\n", "malformed"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n", "malformed"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX: a\x0bb\r\n", "malformed"),
        (b"POST / HTTP/1.1\r\nHost: x\r\n: a\r\n", "malformed"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX\r\n", "malformed"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX y: a\r\n", "malformed"),
        (b"POST / HTTP/1.1\r\n", "host"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\n", "two `host`"),
        (b"POST / HTTP/1.1\r\nHost: a b\r\n", "host"),
        (b"POST / HTTP/1.1\r\nHost: a/b\r\n", "host"),
        (b"POST  / HTTP/1.1\r\nHost: x\r\n", "request line"),
        (b"POST /a b HTTP/1.1\r\nHost: x\r\n", "request line"),
        (b"POST /\xff HTTP/1.1\r\nHost: x\r\n", "request line"),
        (b"POST http://x/ HTTP/1.1\r\nHost: x\r\n", "request line"),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n", "request line"),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n", "request line"),
        (b"post / HTTP/1.1\r\nHost: x\r\n", "request line"),
        (b"POST / HTTP/2.0\r\nHost: x\r\n", "request line"),
        (b"POST / HTTP/1.2\r\nHost: x\r\n", "request line"),
        (b"POST /\r\n", "request line"),
        (b"\r\nPOST / HTTP/1.1\r\nHost: x\r\n", "request line"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nExpect: a-miracle\r\n", "100-continue"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: a\r\nAuthorization: b\r\n", "two"),
        (b"POST / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100, "100 headers"),
    ],
)
def test_an_ambiguous_head_is_refused_and_says_why(raw, words):
    with pytest.raises(RequestRefused) as refused:
        read_head(raw)
    assert refused.value.answer.status in (400, 417, 501)
    assert refused.value.answer.close
    assert words in refused.value.answer.body.decode()


@given(st.binary(max_size=200))
def test_no_bytes_make_the_head_reader_fail_in_another_way(noise):
    for raw in (noise, b"GET / HTTP/1.1\r\nHost: x\r\n" + noise + b"\r\n"):
        try:
            read_head(raw)
        except RequestRefused:
            pass


CHUNKED = b"5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nX-Trailer: 1\r\n\r\n"


@given(st.lists(st.integers(0, len(CHUNKED)), max_size=6))
def test_a_chunked_body_is_the_same_however_it_is_cut(cuts):
    body, data = ChunkedBody(100), CHUNKED + b"GET"
    edges = [0, *sorted(cuts), len(data)]
    rest = None
    for start, end in itertools.pairwise(edges):
        rest = body.feed(data[start:end]) if rest is None else rest + data[start:end]
    assert (bytes(body.body), rest) == (b"hello world", b"GET")


@pytest.mark.parametrize(
    "raw",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"-1\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"\r\nhello\r\n0\r\n\r\n",
        b"g\r\nhello\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"5" * 600,
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\n" + b"a: b\r\n" * 40 + b"\r\n",
    ],
)
def test_a_malformed_chunked_body_is_refused(raw):
    def feed(pieces: list[bytes]) -> None:
        body = ChunkedBody(100)
        for piece in pieces:
            body.feed(piece)

    for pieces in ([raw], [raw[i : i + 1] for i in range(len(raw))]):
        with pytest.raises(RequestRefused) as refused:
            feed(pieces)
        assert refused.value.answer.status == 400


def test_a_chunked_body_over_the_limit_is_refused_before_it_is_read():
    body = ChunkedBody(10)
    assert body.feed(b"8\r\n12345678\r\n") is None
    with pytest.raises(RequestRefused) as refused:
        body.feed(b"3\r\n")
    assert refused.value.answer.status == 413


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model":"m"} {}', "invalid_json"),
        (b'{"model":"m","x":NaN}', "invalid_json"),
        (b'{"x":' + b"[" * 100000 + b"]" * 100000 + b"}", "invalid_json"),
        (b"[]", "invalid_type"),
        (b'{"model":7}', "invalid_type"),
        (b'{"model":"m","stream":"yes"}', "invalid_type"),
        (b"{}", "missing_model"),
        (b'{"model":""}', "missing_model"),
        (b'{"model":null}', "missing_model"),
    ],
)
def test_a_body_without_a_usable_model_is_a_400(body, code):
    with pytest.raises(RequestRefused) as refused:
        read_asked(body)
    assert refused.value.answer.status == 400
    assert f'"code":"{code}"'.encode() in refused.value.answer.body
