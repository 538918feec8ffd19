#!/usr/bin/env python3
"""The two ends of the gateway's benchmark: an engine that costs nothing, and clients.

    gateway_traffic.py upstream PORT
    gateway_traffic.py load requests|streams|idle PORT CONNECTIONS COUNT [tls]      prints one line of JSON

`requests`: COUNT whole answers over CONNECTIONS connections, each asking again at once.
`streams`: CONNECTIONS streams at a time until COUNT have ended; each answer has CHUNKS tokens, one per TICK.
`idle`: CONNECTIONS streams that get their head and one token and then nothing; prints when all stand, ends on EOF.
"""

from __future__ import annotations

# ruff: noqa: ARG002, RUF012, UP031, E501
import asyncio
import json
import random
import resource
import ssl
import sys
import time
from typing import Any

CHUNKS = 40
TICK = 0.02
MODEL = "bench-model"
KEY = "sk-llmgw-bench-0123456789abcdefghijklmnopqrstuvwxyz"
_ID = '"id":"chatcmpl-0123456789","created":1700000000,"model":"bench-model"'
_WHOLE = (
    '{"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant","content":"%s"}}],%s,'
    '"object":"chat.completion","usage":{"completion_tokens":60,"prompt_tokens":20,"total_tokens":80}}'
    % ("word " * 60, _ID)
).encode()
_EVENT = b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" word"}}],%b,"object":"x"}\n\n' % (
    _ID.encode()
)
_USAGE = (
    b'data: {"choices":[],%b,"object":"x","usage":{"completion_tokens":%d,"prompt_tokens":20,"total_tokens":60}}\n\n'
    % (_ID.encode(), CHUNKS)
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
WHOLE = HEAD + b"Content-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n" % len(_WHOLE) + _WHOLE
STREAM = HEAD + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(_EVENT)
TOKEN = chunk(_EVENT)
END = chunk(_USAGE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """Answers at once; streams get one token per tick of one clock that all share."""

    open: dict[Engine, int] = {}

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.buf = b""

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.buf += data
        while (end := self.buf.find(b"\r\n\r\n")) >= 0:
            head = self.buf[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n")[0]) if at >= 0 else 0
            if b"transfer-encoding: chunked" in head:
                done = self.buf.find(b"0\r\n\r\n", end + 4)
                if done < 0:
                    return
                size = done + 5 - end - 4
            if len(self.buf) < end + 4 + size:
                return
            body, self.buf = self.buf[end + 4 : end + 4 + size], self.buf[end + 4 + size :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get "):
            said = b'{"data":[{"id":"bench-model"}],"model_path":"bench-model","status":"ok"}'
            self.transport.write(
                HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(said) + said
            )
        elif b'"stream": true' in body or b'"stream":true' in body:
            self.transport.write(STREAM)
            if b'"idle"' not in body:
                self.open[self] = 1
        else:
            self.transport.write(WHOLE)


async def tick() -> None:
    due = time.monotonic()
    while True:
        due = max(due + TICK, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        for engine, count in list(Engine.open.items()):
            if count >= CHUNKS:
                Engine.open.pop(engine, None)
                engine.transport.write(END)
            else:
                Engine.open[engine] = count + 1
                engine.transport.write(TOKEN)


def request(stream: bool, idle: bool = False) -> bytes:
    words = "idle" if idle else "Write a short story about a lighthouse keeper who collects clocks. " * 4
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": words}],
            "max_tokens": 64,
            **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
        }
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nUser-Agent: OpenAI/Python\r\nAccept: application/json\r\n"
        b"Authorization: Bearer %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (KEY.encode(), len(body), body)
    )


class Client(asyncio.Protocol):
    """Asks until nothing is left to ask."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.busy = False
        if not self.load.stream:
            self.ask()
        elif self.load.idle:
            asyncio.get_running_loop().call_later(random.uniform(0, 0.001 * self.load.connections), self.ask)
        else:
            asyncio.get_running_loop().call_later(random.uniform(0, CHUNKS * TICK), self.ask)

    def ask(self) -> None:
        if self.load.left <= 0:
            self.transport.close()
            return
        self.load.left -= 1
        self.first = self.busy = True
        self.need = -1
        self.tail = b""
        self.sent = time.perf_counter()
        self.transport.write(self.load.request)

    def data_received(self, data: bytes) -> None:
        load = self.load
        if self.first:
            load.first.append(time.perf_counter() - self.sent)
            self.first = False
            if not data.startswith(b"HTTP/1.1 200"):
                load.errors += 1
                load.words = data[:300].decode("latin-1")
            elif load.idle:
                load.standing += 1
                if load.standing == load.connections:
                    load.done.set()
        if load.stream:
            load.events += data.count(b'"delta"')
            self.tail = (self.tail + data)[-7:]
            if self.tail.endswith(b"0\r\n\r\n"):
                self.finish()
            return
        if self.need < 0:
            head, _, rest = data.partition(b"\r\n\r\n")
            at = head.lower().find(b"content-length:")
            self.need = int(head[at + 15 :].split(b"\r\n")[0]) if at >= 0 else 0
            self.need -= len(rest)
        else:
            self.need -= len(data)
        if self.need <= 0:
            self.finish()

    def finish(self) -> None:
        self.busy = False
        self.load.finished += 1
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        load = self.load
        load.errors += self.busy and not load.closing
        load.connected -= 1
        if load.connected == 0:
            load.done.set()


class Load:
    def __init__(self, mode: str, port: int, connections: int, count: int, tls: bool = False) -> None:
        self.stream, self.idle = mode != "requests", mode == "idle"
        self.port, self.connections, self.connected, self.left = port, connections, connections, count
        self.request = request(self.stream, self.idle)
        self.context = ssl.create_default_context() if tls else None
        if self.context is not None:
            self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE
        self.errors = self.finished = self.events = self.standing = 0
        self.closing = False
        self.words = ""
        self.first: list[float] = []

    async def run(self) -> None:
        self.done = asyncio.Event()
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        transports = []
        for at in range(0, self.connections, 100):
            some = range(min(100, self.connections - at))
            made = await asyncio.gather(
                *(loop.create_connection(lambda: Client(self), "127.0.0.1", self.port, ssl=self.context) for _ in some)
            )
            transports += [each[0] for each in made]
        await asyncio.wait_for(self.done.wait(), 300)
        self.report(time.perf_counter() - began)
        if self.idle:
            await loop.run_in_executor(None, sys.stdin.read)
        self.closing = True
        for transport in transports:
            transport.close()

    def report(self, took: float) -> None:
        times = sorted(self.first) or [0.0]
        print(
            json.dumps(
                {
                    "finished": self.finished,
                    "errors": self.errors,
                    "words": self.words,
                    "events": self.events,
                    "seconds": took,
                    "p50_ms": times[len(times) // 2] * 1000,
                    "p99_ms": times[min(len(times) - 1, len(times) * 99 // 100)] * 1000,
                }
            ),
            flush=True,
        )


async def upstream(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    async with server:
        await tick()


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if sys.argv[1] == "upstream":
        asyncio.run(upstream(int(sys.argv[2])))
    else:
        mode, port, connections, count = sys.argv[2:6]
        asyncio.run(Load(mode, int(port), int(connections), int(count), "tls" in sys.argv[6:]).run())


if __name__ == "__main__":
    main()
