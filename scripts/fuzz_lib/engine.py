"""An engine that echoes the mark of each request, and misbehaves as the request asks it to."""

from __future__ import annotations

import asyncio
import contextlib
import email.parser
import email.policy
import json
import random
import socket
import struct
from collections import Counter

import h11

from fuzz_lib.talks import NEVER, damage

KEY = "engine-key-0123456789"
_JSON = b"Content-Type: application/json\r\n"
_EVENTS = b"Content-Type: text/event-stream\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_LIMIT = 4 << 20


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def fields_of(content_type: str, body: bytes) -> dict[str, str]:
    """`model`, `user` and `act` of a request, read by other parsers than the gateway's."""
    if not content_type.startswith("multipart/"):
        # a gateway need not look into texts it does not read
        said = json.loads((body or b"{}").decode("utf-8", "replace"))
        return {name: str(value) for name, value in said.items()} if isinstance(said, dict) else {}
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    parts = {part.get_param("name", header="content-disposition"): part for part in message.iter_parts()}
    return {
        str(name): part.get_payload(decode=True).decode("utf-8", "replace")
        for name, part in parts.items()
        if part.get_filename() is None
    }


class Engine:
    """Serves on two TCP ports, so that what it does on one is not felt on the other, and on unix sockets.

    Attributes:
        seen: how often each mark came, and with which act. problems: what no gateway may send. open: connections.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.acts: dict[str, str] = {}
        self.problems: list[str] = []
        self.open: set[asyncio.StreamWriter] = set()
        self.requests = 0
        self.port = self.bad_port = 0
        self._servers: list[asyncio.Server] = []

    async def start(self, admin: list[str]) -> None:
        for _ in range(2):
            server = await asyncio.start_server(self._engine, "127.0.0.1", 0, limit=1 << 20, backlog=512)
            self._servers.append(server)
        self.port, self.bad_port = (int(server.sockets[0].getsockname()[1]) for server in self._servers)
        self._servers += [await asyncio.start_unix_server(self._admin, path, backlog=512) for path in admin]

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for writer in list(self.open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _engine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._serve(reader, writer, False)

    async def _admin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._serve(reader, writer, True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admin: bool) -> None:
        self.open.add(writer)
        try:
            judge = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
            while (asked := await self._read(reader, judge)) is not None:
                request, body = asked
                self.requests += 1
                if not await self._answer(request, body, reader, writer, admin):
                    return
                # only the reading side of the judge is used: what is answered is not always HTTP
                rest = judge.trailing_data[0]
                judge = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
                if rest:
                    self.problems.append(f"the gateway sent more than one request at once: {rest[:200]!r}")
                    return
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, judge: h11.Connection) -> tuple[h11.Request, bytes] | None:
        request, body = None, b""
        while True:
            try:
                event = judge.next_event()
            except h11.RemoteProtocolError as error:
                if not judge.trailing_data[1] or request is None:
                    self.problems.append(f"what the gateway sends is not HTTP: {error}")
                return None
            if event is h11.NEED_DATA:
                judge.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                return request, body
            else:
                return None

    async def _answer(
        self,
        request: h11.Request,
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        admin: bool,
    ) -> bool:
        """False when the connection is not to be used again."""
        head = {name.decode().lower(): value.decode("latin-1") for name, value in request.headers}
        if not admin and (head.get("authorization") != f"Bearer {KEY}" or "cookie" in head or "x-api-key" in head):
            self.problems.append(f"the gateway sent a wrong head: {request}")
        try:
            said = fields_of(head.get("content-type", ""), body)
        except (ValueError, RecursionError, AttributeError, LookupError) as error:
            if not admin:
                self.problems.append(f"the gateway sent a body that cannot be read ({error}): {body[:300]!r}")
            said = {}
        name, act = said.get("user", ""), said.get("act", "whole")
        self.seen[name] += 1
        self.acts[name] = act
        return await self._act(act, name, random.Random(f"{name}/{act}"), reader, writer)

    async def _act(
        self, act: str, name: str, dice: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        whole, parts, stream = whole_answer(name, dice), chunked_answer(name, dice), stream_answer(name, dice, False)
        answer = {
            "whole": whole,
            "chunked": parts,
            "stream": stream,
            "usage-stream": stream_answer(name, dice, True),
            "error": whole_answer(name, dice, dice.choice([400, 404, 422, 500])),
            "large": whole_answer(name, dice, 200, "x" * dice.choice([150_000, 600_000])),
            "close": b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + _JSON + b"\r\n" + _body(name),
            "damaged": damage(dice, whole),
            "damaged-chunked": damage(dice, parts),
            "damaged-stream": damage(dice, stream),
            "garbage": dice.randbytes(dice.randrange(1, 3000)),
            "surplus": whole + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(NEVER), NEVER),
            "surplus-stream": stream + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(NEVER), NEVER),
            "cut": whole[: dice.randrange(len(whole))],
            "cut-stream": stream[: dice.randrange(len(stream))],
            "reset": dice.choice([whole, stream])[: dice.randrange(len(whole) // 2)],
            "hang": b"",
            "drip": dice.choice([whole, parts, stream]),
            "huge-head": b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"x" * 80_000,
            "busy": whole_answer(name, dice, 503),
            "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
            "unauthorized": b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%b" % (len(NEVER), NEVER),
            "empty": b"HTTP/1.1 204 No Content\r\n\r\n",
            "informational": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + whole,
            "endless-size": b"HTTP/1.1 200 OK\r\n" + _CHUNKED + b"\r\n" + b"0" * 5000,
            "both": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n" + _CHUNKED + b"\r\n" + chunk(NEVER) + b"0\r\n\r\n",
            "protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n" + NEVER,
        }.get(act, whole)  # fmt: skip
        # what comes after an answer comes with it: any proxy takes what comes later for the next answer
        pieces = (
            1
            if act in ("large", "garbage", "surplus", "surplus-stream")
            else 40
            if act == "drip"
            else dice.choice([1, 1, 2, 5])
        )
        points = sorted(dice.randrange(len(answer) + 1) for _ in range(pieces - 1))
        for start, end in zip([0, *points], [*points, len(answer)], strict=True):
            writer.write(answer[start:end])
            await writer.drain()
            if end < len(answer):
                await asyncio.sleep(dice.choice([0, 0, 0.001, 0.01]))
        if act == "hang":
            await reader.read(1)
            return False
        if act == "reset":
            sock: socket.socket | None = writer.get_extra_info("socket")
            if sock is not None and sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        if act in ("damaged", "damaged-chunked", "damaged-stream", "endless-size", "huge-head", "protocol", "both"):
            # the gateway may well wait for more: it has deadlines for that
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), dice.choice([0.05, 0.5, 30]))
            return False
        return act not in ("close", "cut", "cut-stream", "garbage")


def _body(name: str, more: str = "") -> bytes:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": more}}
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    return json.dumps({"id": f"echo:{name}", "choices": [choice], "usage": usage}).encode()


def whole_answer(name: str, dice: random.Random, status: int = 200, more: str = "") -> bytes:
    body = _body(name, more or "word " * dice.randrange(100))
    length = dice.choice([b"Content-Length: %d\r\n", b"content-length:%d\r\n"]) % len(body)
    return b"HTTP/1.1 %d Words\r\n%b%b\r\n%b" % (status, _JSON, length, body)


def chunked_answer(name: str, dice: random.Random) -> bytes:
    body = _body(name, "word " * dice.randrange(100))
    points = sorted(dice.randrange(1, len(body)) for _ in range(dice.randrange(6)))
    parts = [body[a:b] for a, b in zip([0, *points], [*points, len(body)], strict=True) if a < b]
    return b"HTTP/1.1 200 OK\r\n%b%b\r\n" % (_JSON, _CHUNKED) + b"".join(map(chunk, parts)) + b"0\r\n\r\n"


def stream_answer(name: str, dice: random.Random, usage: bool) -> bytes:
    events = [
        b'data: {"id":"echo:%b","choices":[{"index":0,"delta":{"content":"t%d"}}]}\n\n' % (name.encode(), number)
        for number in range(dice.randrange(1, 30))
    ]
    if usage:
        events.append(b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}\n\n')
    events.append(b"data: [DONE]\n\n")
    if dice.random() < 0.3:
        events.insert(1, b": ping\n\n")
    if dice.random() < 0.3:
        # chunks that are not events
        text = b"".join(events)
        points = sorted(dice.randrange(1, len(text)) for _ in range(5))
        events = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True) if a < b]
    return b"HTTP/1.1 200 OK\r\n%b%b\r\n" % (_EVENTS, _CHUNKED) + b"".join(map(chunk, events)) + b"0\r\n\r\n"
