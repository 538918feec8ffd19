"""Bytes a hostile peer might send: made by hypothesis, and by damaging what real peers said."""

from __future__ import annotations

import json
import random
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

DATA = Path(__file__).resolve().parents[2] / "tests" / "wire" / "data"

_NASTY = [
    b"", b"{", b"[" * 70_000, b'{"a":' * 40 + b"1" + b"}" * 40, b'{"type":"hello"}', b'{"type":1}', b'{"type":null}',
    b'{"type":"report","report":{"seq":1e400}}', b'{"type":"answer","id":"\\ud800"}', b'{"type":"ack","seq":NaN}',
    b'{"type":"ack","seq":' + b"9" * 5000 + b"}", b'{"type":"hello","type":"ack"}', b"\xff\xfe{\x00}\x00",
    b"\x00" * 100, b"null", b"[]", b'"x"', b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01",
    b'{"type":"join","protocol":1}',
    b'{"type":"enroll","token":"t","node_id":"n","csr":"x"}', b'{"type":"renew","csr":"-----BEGIN"}', b"x" * 70_000,
    b'{"type":"join","protocol":1,"version":"0"}', b'{"type":"issued"}', b"\xe2\x80\xa8" * 50, b"{}" * 2000,
    b'{"type":"hello","protocol":1,"node_id":"../../x","version":"","boot_id":"","instance_id":"","clock":0,'
    b'"heartbeat_interval_s":-1}',
]  # fmt: skip
_WORDS = ["type", "seq", "report", "id", "what", "args", "csr", "token", "node_id", "facts", "engines", "protocol"]
_TYPES = [
    "hello", "welcome", "refused", "report", "ack", "desired", "ask", "answer", "join", "authority", "enroll", "renew",
    "issued", "later",
]  # fmt: skip


def hello(name: str) -> bytes:
    """A good hello, so that what follows is said by an admitted agent."""
    said = json.loads((DATA / "agent-0.1.0.jsonl").read_bytes().splitlines()[0])
    return json.dumps(said | {"node_id": name}).encode() + b"\n"


def corpus() -> list[bytes]:
    """Recorded lines of both ends, and inventions."""
    recorded = [
        line for name in ("agent", "server") for line in (DATA / f"{name}-0.1.0.jsonl").read_bytes().splitlines()
    ]
    return [*recorded, *_NASTY]


def damaged(rng: random.Random, source: list[bytes]) -> bytes:
    """One of `source` with some bytes changed, cut out, doubled or spliced with another."""
    line = bytearray(rng.choice(source))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(line) + 1)
        kind = rng.randrange(5)
        if kind == 0 and line:
            line[at % len(line)] = rng.randrange(256)
        elif kind == 1:
            del line[at : at + rng.randint(1, 30)]
        elif kind == 2:
            line[at:at] = line[at : at + rng.randint(1, 200)]
        elif kind == 3:
            other = rng.choice(source)
            line[at:] = other[rng.randrange(len(other) + 1) :]
        else:
            line[at:at] = rng.choice([b"{", b"]", b'"', b"\\u", b"1e999", b"null", b"\x00", b"\xf0\x9f", b"-" * 9])
    return bytes(line[:200_000])


def _values() -> st.SearchStrategy[object]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.sampled_from(_TYPES)
    keys = st.sampled_from(_WORDS) | st.text(max_size=8)
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5))


def invented(count: int, use: Callable[[bytes], None]) -> None:
    """Hand `count` lines of hypothesis to `use`: messages of known types with values of every shape, and raw bytes."""
    fields = st.dictionaries(st.sampled_from(_WORDS), _values(), max_size=6)
    messages = st.builds(lambda kind, rest: {**rest, "type": kind}, st.sampled_from(_TYPES), fields)
    text = (messages | _values()).map(lambda value: json.dumps(value).encode())
    lines = text | st.binary(max_size=300)
    made = 0

    @settings(
        max_examples=max(1, count // 20), database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(lines, min_size=10, max_size=20))
    def run(batch: list[bytes]) -> None:
        nonlocal made
        for line in batch:
            if made < count:
                made += 1
                use(line)

    while made < count:
        run()


def handshakes(rng: random.Random) -> Iterator[bytes]:
    """Endless first flights for a TLS server: none is a whole honest one."""
    context = ssl._create_unverified_context()
    honest = []
    for alpn in ([], ["llmgw-join/1"], ["h2", "llmgw-join/1"]):
        if alpn:
            context.set_alpn_protocols(alpn)
        out = ssl.MemoryBIO()
        tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="127.0.0.1")
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            honest.append(out.read())
    others = [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x80\x2e\x01\x00\x02",
        b"\x16\x03\x01\xff\xff",
        b"\x15\x03\x03\x00\x02\x02\x28",
    ]
    while True:
        kind = rng.randrange(4)
        if kind == 0:
            yield rng.randbytes(rng.randrange(600))
        elif kind == 1:
            whole = rng.choice(honest)
            yield whole[: rng.randrange(len(whole))]
        else:
            yield damaged(rng, [*honest, *others] if kind == 2 else honest)
