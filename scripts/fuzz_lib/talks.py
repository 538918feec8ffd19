"""What a client does on one connection, made by dice: the same seed and number give the same bytes."""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass, field

ECHO = re.compile(rb"echo:c(\d+)-(\d+)-([0-9a-f]{12})")
NEVER = b"never-to-be-seen-by-a-client"
KEYS = {"full": "sk-full-0123456789abcdef", "few": "sk-few-0123456789abcdef", "old": "sk-old-0123456789abcdef"}
GOOD_ACTS = ("whole", "whole", "whole", "chunked", "stream", "stream", "usage-stream", "close", "error", "large")
BAD_ACTS = (
    "damaged", "damaged-chunked", "damaged-stream", "garbage", "surplus", "surplus-stream", "cut", "cut-stream",
    "reset", "hang", "drip", "huge-head", "busy", "redirect", "unauthorized", "empty", "informational",
    "endless-size", "both", "large", "protocol", "whole", "stream",
)  # fmt: skip


def mark(seed: int, number: int, nth: int) -> str:
    """What a request carries and the engine echoes. A damaged one is no valid mark of any other request."""
    return f"c{number}-{nth}-{hashlib.sha256(f'{seed}/{number}/{nth}'.encode()).hexdigest()[:12]}"


def is_mark(seed: int, found: re.Match[bytes]) -> bool:
    return found[0][5:].decode() == mark(seed, int(found[1]), int(found[2]))


@dataclass
class Talk:
    """One connection.

    Attributes:
        steps: `("send", bytes)`, `("wait", seconds)`, `("read", answers)`, `("eof",)`, `("reset",)`, `("slow",)`.
        methods: of the requests in their order, as they were before anything was damaged.
        plain: nothing is damaged, so each answer must be there and right: `marks` and `acts` say which.
        tls: over TLS; `raw` bytes on the TLS port without a handshake.
    """

    number: int
    kind: str
    tls: bool
    raw: bool = False
    plain: bool = False
    steps: list[tuple[str, object]] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)

    def sent(self) -> bytes:
        return b"".join(step[1] for step in self.steps if step[0] == "send" and isinstance(step[1], bytes))


def chunked(dice: random.Random, body: bytes, hostile: bool) -> bytes:
    out, pos = b"", 0
    while pos < len(body):
        size = dice.randint(1, len(body) - pos)
        digits = b"%x" % size
        if dice.random() < 0.2:
            digits = b"0" * dice.randint(1, 3) + digits.upper()
        extension = dice.choice([b";a=b", b';q="x;y"', b";" + b"e" * 200]) if dice.random() < 0.1 else b""
        if hostile and dice.random() < 0.15:
            digits = dice.choice([b"-1", b"0x5", b"ffffffffffffffff", b"", b" 5", b"5 ", b"+5", b"1_0", b"g"])
        end = dice.choice([b"\n", b"\r", b"", b"\r\r\n"]) if hostile and dice.random() < 0.05 else b"\r\n"
        out += digits + extension + b"\r\n" + body[pos : pos + size] + end
        pos += size
    trailers = dice.choice([b"x-trailer: 1\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"])
    return out + b"0\r\n" + (trailers if dice.random() < 0.1 else b"") + b"\r\n"


def form(dice: random.Random, asked: dict[str, object]) -> tuple[bytes, bytes]:
    boundary = b"b%x" % dice.getrandbits(64)
    file = bytes(dice.getrandbits(8) for _ in range(dice.randrange(3000)))
    parts = [
        b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n' + file,
        *(
            b'Content-Disposition: form-data; name="%b"\r\n\r\n%b' % (name.encode(), str(value).encode())
            for name, value in asked.items()
            if isinstance(value, str)
        ),
    ]
    dice.shuffle(parts)
    body = b"".join(b"--%b\r\n%b\r\n" % (boundary, part) for part in parts) + b"--%b--\r\n" % boundary
    return b"multipart/form-data; boundary=" + boundary, body


def hostile_lines(dice: random.Random) -> list[bytes]:
    return dice.sample(
        [
            b"Content-Length: 5", b"Content-Length: +5", b"Content-Length: 5, 5", b"Content-Length : 5",
            b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity, chunked", b"Transfer-Encoding:\tchunked",
            b"Transfer-Encoding : chunked", b"Transfer-Encoding: xchunked", b"Transfer_Encoding: chunked",
            b"Host: other", b"Expect: 100-continue", b"Expect: 200-maybe", b"Connection: close", b"Connection: upgrade",
            b"Upgrade: h2c", b"Connection: content-length", b" folded: yes", b"\tfolded", b"no-colon", b": empty",
            b"X-Long: " + b"x" * 9000, b"X-Null: a\x00b", b"X-High: \xff\xfe", b"X-Bare: a\nContent-Length: 7",
            b"X-Bare: a\rb", b"Authorization: Bearer nobody", b"Content-Length: 99999999999999999999",
        ],
        dice.choice([1, 1, 1, 2]),
    )  # fmt: skip


def framings(dice: random.Random, length: int) -> list[bytes]:
    """What stands for Transfer-Encoding or Content-Length in a request against the grammar."""
    return [
        dice.choice(
            [
                b"Transfer-Encoding: xchunked", b"Transfer-Encoding: identity, chunked", b"Transfer-Encoding: chunkedx",
                b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: chunked;q=1",
                b"Transfer-Encoding:\tCHUNKED", b"Transfer-Encoding: \x0bchunked", b'Transfer-Encoding: "chunked"',
                b"Transfer-Encoding:", b"Transfer-Encoding : chunked", b"Transfer-Encoding: gzip, chunked",
                b"Transfer-Encoding: chunked\x00",
                b"X: y\nTransfer-Encoding: chunked", b"X: y\rTransfer-Encoding: chunked", b"Transfer_Encoding: chunked",
                b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
                b"Transfer-Encoding: chunked\r\nContent-Length: %d",
                b"Content-Length: %d\r\nTransfer-Encoding: chunked",
                b"Content-Length: +%d", b"Content-Length: 0x%x", b"Content-Length: %d, %d", b"Content-Length: 0%d",
                b"Content-Length: %d\x0b", b"Content-Length: -%d", b"Content-Length: %d.0", b"Content-Length: %d_0",
                b"Content-Length: %d\r\nContent-Length: 0", b"Content-Length: 0\r\nContent-Length: %d",
                b"Content-Length : %d", b"Content-Length:\r\n %d", b"Content-Length: %d\r\nContent-Length: %d",
                b"Content-Length: 0", b"X-Nothing: %d",
            ]
        ).replace(b"%d", b"%d" % length).replace(b"%x", b"%x" % length)
    ]  # fmt: skip


class Maker:
    """Makes talks: `Maker(seed).make(number)`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def make(self, number: int) -> Talk:
        dice = random.Random(f"{self.seed}/{number}")
        kind = dice.choices(
            ("plain", "hostile-engine", "grammar", "damaged", "noise", "unfinished"), (34, 24, 18, 14, 4, 6)
        )[0]
        talk = Talk(number, kind, dice.random() < 0.25, plain=kind == "plain")
        if kind == "noise":
            talk.raw = talk.tls
            talk.steps.append(("send", self._noise(dice)))
            talk.steps.append((dice.choice(["eof", "reset", "read"]), 1))
            return talk
        raws = [self._request(dice, talk, nth) for nth in range(dice.choice([1, 1, 1, 2, 3, 6]))]
        if kind == "damaged":
            raws = [damage(dice, raw) if dice.random() < 0.8 else raw for raw in raws]
        self._order(dice, talk, raws)
        return talk

    def _request(self, dice: random.Random, talk: Talk, nth: int) -> bytes:
        name = mark(self.seed, talk.number, nth)
        bad = talk.kind == "hostile-engine" or (talk.kind != "plain" and dice.random() < 0.3)
        act = dice.choice(BAD_ACTS if bad else GOOD_ACTS)
        asked: dict[str, object] = {"model": "bad" if bad else "good", "user": name, "act": act}
        if "stream" in act:
            asked["stream"] = True
        if act == "usage-stream":
            asked["stream_options"] = {"include_usage": True}
        where = dice.random()
        path, content_type = "/v1/chat/completions", b"application/json"
        if where < 0.12 and "stream" not in act:
            path = "/v1/audio/transcriptions"
            content_type, body = form(dice, asked)
        else:
            path = dice.choice(["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"])
            asked["messages"] = [{"role": "user", "content": "word " * dice.randrange(400) + self._inner(dice, talk)}]
            items = list(asked.items())
            dice.shuffle(items)
            body = json.dumps(dict(items), ensure_ascii=dice.random() < 0.5).encode("utf-8", "replace")
        method = "POST"
        if where > 0.93:
            # the gateway's own answers, and the way to the control process
            method = dice.choice(["GET", "GET", "OPTIONS"] if not talk.plain else ["GET", "HEAD"])
            path = dice.choice(["/v1/models", "/healthz", "/readyz", "/metrics", "/v1/models/good"])
            body, act, name = b"", "own", ""
        elif where > 0.88:
            path, act = "/api/v1/thing", act if act in ("whole", "chunked", "close", "large") else "whole"
            body = json.dumps({**asked, "act": act, "stream": False}).encode()
        talk.methods.append(method)
        talk.marks.append(name)
        talk.acts.append(act)
        return self._head(dice, talk, method, path, content_type, body)

    def _head(self, dice: random.Random, talk: Talk, method: str, path: str, content_type: bytes, body: bytes) -> bytes:
        key = KEYS["full"] if talk.plain or dice.random() < 0.8 else dice.choice([*KEYS.values(), "sk-nobody", ""])
        lines = [b"Host: gateway", b"Content-Type: " + content_type]
        lines.append(
            b"x-api-key: %b" % key.encode() if dice.random() < 0.2 else b"Authorization: Bearer %b" % key.encode()
        )
        hostile = talk.kind == "grammar"
        framing = hostile and method == "POST" and dice.random() < 0.5
        if method != "POST":
            raw = b""
        elif framing:
            lines += framings(dice, len(body))
            raw = chunked(dice, body, False) if dice.random() < 0.6 else body
        elif dice.random() < 0.6:
            length = len(body)
            if hostile and dice.random() < 0.2:
                length = max(0, length + dice.choice([-40, -1, 1, 40]))
            lines.append(b"Content-Length: %d" % length)
            raw = body
        else:
            lines.append(b"Transfer-Encoding: chunked")
            raw = chunked(dice, body, hostile)
        if dice.random() < 0.3:
            lines += dice.sample([b"Accept: */*", b"User-Agent: x", b"Cookie: a=b", b"X-Request-Id: mine"], 2)
        if method == "POST" and dice.random() < 0.05:
            lines.append(b"Expect: 100-continue")
        version, line_end = b"HTTP/1.1", b"\r\n"
        if hostile and not framing:
            lines += hostile_lines(dice) if dice.random() < 0.5 else []
            version = dice.choices(
                [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"http/1.1", b"HTTP/1.1 "], (70, 10, 5, 5, 5)
            )[0]
            line_end = dice.choices([b"\r\n", b"\n", b"\r"], (94, 3, 3))[0]
            if dice.random() < 0.1:
                path = dice.choice(
                    ["http://gateway" + path, path + "?a=b", "//" + path, path + "\x00", "*", path + "/.."]
                )
        dice.shuffle(lines)
        first = b"%b %b %b" % (method.encode(), path.encode("latin-1"), version)
        return first + line_end + line_end.join(lines) + line_end + line_end + raw

    def _inner(self, dice: random.Random, talk: Talk) -> str:
        """A whole request inside a text: a gateway that misjudges a length would send it on."""
        if dice.random() > 0.15:
            return ""
        body = json.dumps({"model": "good", "user": mark(self.seed, talk.number, 900), "act": "whole"})
        return (
            "\r\n0\r\n\r\nPOST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
            f"Authorization: Bearer {KEYS['full']}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        )

    def _noise(self, dice: random.Random) -> bytes:
        return dice.choice(
            [
                b"", b"\r\n" * 50, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(200),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + dice.randbytes(60), dice.randbytes(dice.randrange(1, 5000)),
                b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 8000, b"G" * 70_000, b"GET /" + b"a" * 40_000,
                b"\x80\x2e\x01\x00\x02" + dice.randbytes(40), b"CONNECT x:1 HTTP/1.1\r\nHost: x:1\r\n\r\n",
            ]
        )  # fmt: skip

    def _order(self, dice: random.Random, talk: Talk, raws: list[bytes]) -> None:
        """Pipelined or one after the other, cut anywhere, and how it ends."""
        steps = talk.steps
        if talk.kind in ("plain", "hostile-engine") and dice.random() < 0.1:
            steps.append(("slow", None))
        if dice.random() < 0.35:
            self._cut(dice, talk, b"".join(raws))
            steps.append(("read", len(raws)))
        else:
            for count, raw in enumerate(raws, 1):
                self._cut(dice, talk, raw)
                steps.append(("read", count))
        if talk.kind == "unfinished":
            # gone in the middle of a request or of its answer
            del steps[dice.randrange(1, len(steps)) :]
            if dice.random() < 0.5 and steps[-1][0] == "send":
                data = steps[-1][1]
                assert isinstance(data, bytes)
                steps[-1] = ("send", data[: dice.randrange(1, len(data) + 1)])
            steps.append(("wait", dice.choice([0.0, 0.002, 0.05])))
            steps.append((dice.choice(["eof", "reset"]), None))
        elif not talk.plain:
            steps.append((dice.choice(["eof", "eof", "reset"]), None))

    def _cut(self, dice: random.Random, talk: Talk, raw: bytes) -> None:
        pieces = dice.choice([1, 1, 1, 2, 4, 12])
        points = sorted(dice.randrange(len(raw) + 1) for _ in range(pieces - 1))
        for start, end in zip([0, *points], [*points, len(raw)], strict=True):
            if start < end:
                talk.steps.append(("send", raw[start:end]))
                if end < len(raw):
                    talk.steps.append(("wait", dice.choice([0.0, 0.001, 0.01])))


def damage(dice: random.Random, raw: bytes) -> bytes:
    """Bytes changed, put in, taken out, doubled; a line end broken."""
    data = bytearray(raw)
    for _ in range(dice.randint(1, 4)):
        # heads are short beside bodies and more worth it
        at = dice.randrange(min(len(data), 300) if dice.random() < 0.7 else len(data)) if data else 0
        kind = dice.randrange(5)
        if kind == 0 and data:
            data[at : at + 1] = bytes([dice.randrange(256)])
        elif kind == 1:
            data[at:at] = dice.choice(
                [b"\r", b"\n", b" ", b"\x00", b":", b"Content-Length: 5\r\n", b"0\r\n\r\n", b"\t", b"\r\n\r\n"]
            )
        elif kind == 2:
            del data[at : at + dice.randint(1, 9)]
        elif kind == 3:
            data[at:at] = data[at : at + dice.randint(1, 40)]
        else:
            data[at : at + 2] = b"\n"
    return bytes(data)
