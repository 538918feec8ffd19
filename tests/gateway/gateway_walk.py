"""A seeded random walk: clients of every temper, engines that misbehave, routes that change at any moment.

Run by hand for longer, with `tests` and `tests/gateway` on the path: `python tests/gateway/gateway_walk.py SEED SECONDS
PROCESSES tls|plain`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway_fakes import FakeControl, Gateway, wait_for

from llmgw.domain.routing import RouteKey, RouteModel, RouteReplica, RouteTable

FLAGS = (
    *("--queue", "12", "--queue-timeout", "2s", "--first-token-timeout", "5s", "--token-gap-timeout", "3s"),
    *("--total-timeout", "30s", "--head-timeout", "5s", "--connect-timeout", "1s"),
)
RESET = struct.pack("ii", 1, 0)
# what a client that behaves may be told when engines, routes and keys come and go
TOLD = {
    "invalid_api_key", "model_not_found", "endpoint_not_supported", "queue_full", "queue_timeout", "model_loading",
    "model_not_ready", "no_replica", "upstream_failed", "deadline_exceeded",
}  # fmt: skip
KINDS = (
    *("whole",) * 4, *("stream",) * 6, "chunked", "eof", "interim", "slow", "busy", "busy", "500", "204", "hasty",
    "reset", "garbage", "cut-off", "broken-stream", "broken-chunk",
)  # fmt: skip
MODELS = ("m", "n")


class Engine:
    """One engine that does what each request's plan says. It dies and comes back at another port."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name, self.rng = name, rng
        self.port = 0
        self.busy: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.open: set[asyncio.StreamWriter] = set()
        self.go_on = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 25)
        self.port = self._server.sockets[0].getsockname()[1]

    def die(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self.open):
            hard_close(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while await self._one(reader, writer):
                pass
        self.open.discard(writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"X-Plan: " in head:
            raise AssertionError("a client's header reached an engine")
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])  # type: ignore[index]
        start = await reader.readexactly(min(length, 200))
        if b"hasty" in start:
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 10\r\n\r\n" + b'{"no":413}')
            await writer.drain()
            return False
        body = json.loads(start + await reader.readexactly(length - len(start)))
        return await self._answer(writer, json.loads(body["user"]), "stream_options" in body)

    async def _answer(self, writer: asyncio.StreamWriter, plan: dict[str, Any], asked: bool) -> bool:
        rng, kind, mark = self.rng, plan["kind"], plan["mark"]
        self.seen[mark] += 1
        usage = {"prompt_tokens": plan["prompt"], "completion_tokens": plan["made"]}
        body = json.dumps({"mark": mark, "pad": "x" * plan["pad"], "usage": usage}).encode()
        if kind == "busy" and self.busy[mark] < 1 and rng.random() < 0.7:
            self.busy[mark] += 1
            self.seen[mark] -= 1
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}")
            return True
        if kind == "reset":
            hard_close(writer)
            return False
        if kind == "garbage":
            writer.write(rng.choice((b"HTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n", b"\x00" * 70000)))
            return False
        if kind == "500":
            writer.write(b'HTTP/1.1 500 No\r\nContent-Length: 24\r\n\r\n{"error":{"message":"no"}')
            return True
        if kind == "204":
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            return True
        if kind == "slow":
            await asyncio.sleep(rng.uniform(0, 0.3))
        if kind == "interim":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n")
        if "stream" in kind or kind == "broken-chunk":
            return await self._stream(writer, plan, asked)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        if kind == "cut-off":
            writer.write(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body[: len(body) // 2]))
            return False
        if kind == "eof":
            await self._write(writer, head + b"Connection: close\r\n\r\n" + body)
        elif kind == "chunked":
            await self._write(writer, head + b"Transfer-Encoding: chunked\r\n\r\n" + cut(body, rng) + b"0\r\n\r\n")
        else:
            more = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil" if rng.random() < 0.1 else b""
            await self._write(writer, head + b"Content-Length: %d\r\n\r\n" % len(body) + body + more)
        return kind != "eof" and rng.random() < 0.8

    async def _stream(self, writer: asyncio.StreamWriter, plan: dict[str, Any], asked: bool) -> bool:
        rng, kind, mark = self.rng, plan["kind"], plan["mark"]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(plan["made"]):
            if plan.get("held") and number == 1:
                await self.go_on.wait()
            if kind != "stream" and number == plan["breaks"]:
                if kind == "broken-chunk":
                    writer.write(b"zz\r\n")
                elif rng.random() < 0.5:
                    hard_close(writer)
                return False
            event = b'data: {"mark":"%b","i":%d,"pad":"%b"}\n\n' % (mark.encode(), number, b"y" * plan["pad"])
            await self._write(writer, cut(event, rng) if rng.random() < 0.1 else b"%x\r\n%b\r\n" % (len(event), event))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.uniform(0, 0.01))
        usage = {"prompt_tokens": plan["prompt"], "completion_tokens": plan["made"]}
        if asked:
            last = b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
            await self._write(writer, b"%x\r\n%b\r\n" % (len(last), last))
        await self._write(writer, b"e\r\ndata: [DONE]\n\n\r\n")
        await self._write(writer, b"0\r\n\r\n")
        return rng.random() < 0.8

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self.rng.random() < 0.2:
            at = self.rng.randrange(len(data) + 1)
            writer.write(data[:at])
            await writer.drain()
            await asyncio.sleep(0)
            data = data[at:]
        writer.write(data)
        await writer.drain()


def hard_close(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


def cut(data: bytes, rng: random.Random) -> bytes:
    """In chunks of random sizes."""
    out, at = b"", 0
    while at < len(data):
        size = rng.choice((1, 7, 100, 5000, 100_000))
        piece = data[at : at + size]
        out += b"%x\r\n%b\r\n" % (len(piece), piece)
        at += size
    return out


class Answer:
    """What a client read: status, whether the body is whole, the body."""

    def __init__(self, status: int, headers: dict[bytes, bytes], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body
        self.closes = headers.get(b"connection") == b"close"


class Walk:
    """The walk of one seed."""

    def __init__(self, made: Gateway, seed: int, clients: int, processes: int) -> None:
        self.made, self.seed, self.count, self.processes = made, seed, clients, processes
        self.rng = random.Random(seed)
        self.engines = [Engine(name, self.rng) for name in ("m#0", "m#1", "n#0", "n#1")]
        self.ends = 0.0
        self.told: Counter[str] = Counter()
        self.told_by_kind: Counter[str] = Counter()
        self.right: dict[str, tuple[str, int, int]] = {}
        self.marks = 0
        self.slots = {engine.name: 2 for engine in self.engines}
        self.known = {engine.name: 0 for engine in self.engines}
        self.seq = 1000

    # -- what changes

    def routes(self, calm: bool = False) -> None:
        """Publish a snapshot: at calm times all is well, else anything goes."""
        rng, control = self.rng, self.made.control
        models = []
        for name in MODELS:
            replicas = []
            for engine in self.engines:
                if engine.name[0] != name or (not calm and rng.random() < 0.1):
                    continue
                if calm or rng.random() < 0.8:
                    self.known[engine.name] = engine.port
                slots = 2 if calm else rng.choice((1, 2, 4, 4))
                ready = calm or rng.random() < 0.85
                replicas.append(
                    RouteReplica(engine.name, "node", "127.0.0.1", self.known[engine.name] or engine.port, slots, ready)
                )
            if not calm and rng.random() < 0.05:
                continue
            aliases = ("both",) if name == ("m" if calm else rng.choice("mn")) else ()
            state = "ready" if any(each.ready for each in replicas) else rng.choice(("loading", "refused"))
            paths = ("/v1/chat/completions",) if calm or rng.random() < 0.95 else ("/v1/embeddings",)
            models.append(RouteModel(name, aliases, "fake", state, "words", 4096, paths, tuple(replicas)))
        if not calm and len(models) == 2:
            # an alias is one model's only
            first, second = models
            if first.aliases and second.aliases:
                models[1] = RouteModel(*(getattr(second, x) for x in ("name",)), (), *fields_after_aliases(second))
        names = ("steady", "rude") if calm or rng.random() < 0.9 else ("steady",)
        keys = tuple(RouteKey(each, hashlib.sha256(each.encode()).hexdigest()) for each in names)
        self.seq += 1
        if control is not None:
            control.publish(RouteTable(self.seq, tuple(models), keys, True))

    async def disturb(self) -> None:
        """Engines, routes and the control process come and go."""
        rng = self.rng
        while time.monotonic() < self.ends:
            await asyncio.sleep(rng.uniform(0.02, 0.3))
            what = rng.random()
            if what < 0.6:
                self.routes()
            elif what < 0.8:
                engine = rng.choice(self.engines)
                engine.die()
                await asyncio.sleep(rng.uniform(0, 0.2))
                await engine.start()
                if rng.random() < 0.7:
                    self.routes()
            elif what < 0.9 and self.made.control is not None:
                away, self.made.control = self.made.control, None
                await asyncio.to_thread(away.close)
                await asyncio.sleep(rng.uniform(0, 0.3))
                control = FakeControl(self.made.control_path)
                control.batches.update(away.batches)
                self.made.control = control
                self.routes()

    # -- clients

    def plan(self) -> tuple[dict[str, Any], bytes]:
        """What to ask for; the request's body."""
        rng = self.rng
        self.marks += 1
        kind = rng.choice(KINDS)
        plan = {
            "kind": kind,
            "mark": f"k{self.seed}-{self.marks}",
            "pad": rng.choice((0, 0, 10, 1000, 70_000 if "stream" in kind else 400_000)),
            "prompt": rng.randrange(1, 1000),
            "made": rng.randrange(1, 40),
        }
        plan["breaks"] = rng.randrange(plan["made"])
        asked: dict[str, Any] = {"user": json.dumps(plan), "model": rng.choice((*MODELS, "both"))}
        asked["messages"] = [{"role": "user", "content": "z" * rng.choice((0, 50, 5000, 100_000))}]
        if kind == "hasty":
            asked["messages"][0]["content"] = "z" * 3_000_000
        if "stream" in kind or kind == "broken-chunk":
            asked["stream"] = True
            if rng.random() < 0.3:
                asked["stream_options"] = {"include_usage": True}
                plan["asked"] = True
        return plan, json.dumps(asked).encode()

    def request(self, key: str, body: bytes) -> bytes:
        rng = self.rng
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "X-Plan: none"]
        chunked = rng.random() < 0.2
        name = rng.choice(("Content-Length: ", "content-length: ", "Content-length:"))
        lines.append("Transfer-Encoding: chunked" if chunked else f"{name}{len(body)}")
        head = "\r\n".join([*lines, "", ""]).encode()
        return head + (cut(body, rng) + b"0\r\n\r\n" if chunked else body)

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self.rng.random() < 0.2:
            at = self.rng.randrange(len(data) + 1)
            writer.write(data[:at])
            await asyncio.sleep(self.rng.uniform(0, 0.02))
            data = data[at:]
        writer.write(data)

    async def connect(self, small: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        sock.setblocking(False)
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.made.port))
        context = self.made.context
        more = {"ssl": context, "server_hostname": "gateway"} if context is not None else {}
        return await asyncio.open_connection(sock=sock, limit=4096 if small else 1 << 16, **more)

    async def steady(self) -> None:
        """A client that reads every answer to its end, however slowly, and asks several times on a connection."""
        rng = self.rng
        while time.monotonic() < self.ends:
            slow = rng.random() < 0.15
            reader, writer = await self.connect(slow)
            try:
                for _ in range(rng.randrange(1, 8)):
                    first = self.plan()
                    asked = [(first[0], self.request("steady", first[1]))]
                    if rng.random() < 0.15:
                        second = self.plan()
                        ahead = self.request("steady", second[1])
                        if len(ahead) < 20_000:  # more sent ahead costs the connection
                            asked.append((second[0], ahead))
                    await self.send(writer, b"".join(data for _, data in asked))
                    closes = False
                    for at, (plan, _) in enumerate(asked):
                        answer = await self.read(reader, slow, plan)
                        self.judge(plan, answer)
                        closes = answer.closes
                        if closes:
                            assert at == len(asked) - 1 or not await reader.read(1)
                            break
                    if closes or time.monotonic() > self.ends:
                        break
                if closes:
                    assert not await reader.read(1), "bytes after an answer"
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def rude(self) -> None:
        """A client that goes at any moment."""
        rng = self.rng
        while time.monotonic() < self.ends:
            reader, writer = await self.connect(rng.random() < 0.2)
            with contextlib.suppress(OSError):
                for _ in range(rng.randrange(1, 4)):
                    _, body = self.plan()
                    data = self.request("rude", body)
                    if rng.random() < 0.2:
                        data = data[: rng.randrange(len(data) + 1)]
                    await self.send(writer, data)
                    if rng.random() < 0.3:
                        await self.send(writer, rng.choice((data[: rng.randrange(len(data) + 1)], b"x" * 50_000)))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(rng.choice((0, 0.001, 0.01, 0.05, 0.3))):
                            while await reader.read(rng.choice((100, 65536))):
                                pass
                    await asyncio.sleep(rng.choice((0, 0, 0.01)))
            how = rng.random()
            if how < 0.4:
                hard_close(writer)
            elif how < 0.6 and writer.can_write_eof():
                with contextlib.suppress(OSError):
                    writer.write_eof()
                await asyncio.sleep(0.01)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def read(self, reader: asyncio.StreamReader, slow: bool, plan: dict[str, Any]) -> Answer:
        """Exactly one answer."""
        async with asyncio.timeout(40):
            try:
                return await self._read(reader, slow)
            except (asyncio.IncompleteReadError, ConnectionResetError) as error:
                broken = error
        # an answer that had begun and cannot be completed is cut off
        assert plan["kind"] in ("cut-off", "whole", "chunked", "eof", "slow", "interim", "busy"), (plan, broken)
        assert plan["pad"] > 200_000, (plan, broken)
        self.told["cut off"] += 1
        return Answer(0, {b"connection": b"close"}, b"")

    async def _read(self, reader: asyncio.StreamReader, slow: bool) -> Answer:
        async def exactly(count: int) -> bytes:
            data = b""
            while len(data) < count:
                part = await reader.readexactly(min(count - len(data), 2000 if slow else count))
                data += part
                if slow and self.rng.random() < 0.02:
                    await asyncio.sleep(self.rng.uniform(0, 0.2))
            return data

        head = await reader.readuntil(b"\r\n\r\n")
        first, *rest = head[:-4].split(b"\r\n")
        assert re.fullmatch(rb"HTTP/1.1 [1-5]\d\d [^\r\n]*", first), head
        headers = dict(line.lower().split(b": ", 1) for line in rest)
        status = int(first.split(b" ")[1])
        if b"content-length" in headers:
            return Answer(status, headers, await exactly(int(headers[b"content-length"])))
        if status == 204:
            return Answer(status, headers, b"")
        assert headers[b"transfer-encoding"] == b"chunked"
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await exactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
        return Answer(status, headers, body)

    def judge(self, plan: dict[str, Any], answer: Answer) -> None:
        """Is this the answer to that request, or one clear error?"""
        kind, mark = plan["kind"], plan["mark"]
        where = (plan, answer.status, answer.headers, answer.body[:300])
        if answer.status == 0:
            return
        if answer.headers.get(b"content-type") == b"text/event-stream":
            self._judge_events(plan, answer, where)
            return
        if answer.status == 204:
            assert kind == "204", where
            return
        said = json.loads(answer.body) if answer.body[-1:] == b"}" and answer.body[:9] != b'{"error":' else {}
        if answer.status == 200:
            assert said["mark"] == mark, where
            assert len(said["pad"]) == plan["pad"], where
            self.right[mark] = ("steady", plan["prompt"], plan["made"])
        elif answer.status == 413:
            assert kind == "hasty", where
            assert said == {"no": 413}, where
        elif answer.status == 500:
            assert kind == "500", where
        else:
            code = json.loads(answer.body)["error"]["code"]
            assert code in TOLD, where
            self.told[code] += 1
            self.told_by_kind[kind] += 1

    def _judge_events(self, plan: dict[str, Any], answer: Answer, where: Any) -> None:
        events = answer.body.split(b"\n\n")
        assert events.pop() == b"", where
        done = events[-1] == b"data: [DONE]"
        if not done and len(events) > 1 and not events[-2].endswith(b"}"):
            del events[-2]  # half an event, when the engine went
        data = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
        tokens = [each for each in data if "mark" in each]
        assert [each["i"] for each in tokens] == list(range(len(tokens))), where
        assert {each["mark"] for each in tokens} <= {plan["mark"]}, where
        assert any("usage" in each for each in data) <= bool(plan.get("asked")), where
        if done:
            assert plan["kind"] == "stream", where
            assert len(tokens) == plan["made"], where
            self.right[plan["mark"]] = ("steady", plan["prompt"], plan["made"])
        else:
            answer.closes = True
            assert data[-1]["error"]["code"] in TOLD, where
            self.told[data[-1]["error"]["code"]] += 1
            self.told_by_kind[plan["kind"]] += 1

    # -- the whole

    async def run(self, seconds: float) -> None:
        for engine in self.engines:
            await engine.start()
        self.routes(calm=True)
        self.ends = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self.disturb())
            for number in range(self.count):
                group.create_task(self.rude() if number % 3 == 0 else self.steady())
        self.routes(calm=True)
        await self.calm()
        for engine in self.engines:
            engine.die()
        while any(engine.open for engine in self.engines):
            await asyncio.sleep(0.01)

    async def calm(self) -> None:
        """All is well again: nothing is left of what was, and every slot can be had."""
        made = self.made
        looks = range(8 * self.processes)  # each may find another process

        async def until(what: str, condition: Callable[[], bool]) -> None:
            await asyncio.to_thread(wait_for, lambda: all(condition() for _ in looks), what, 20)

        await until("the last snapshot", lambda: made.ready()["routes_seq"] == self.seq)
        await until("nothing to be in flight", lambda: made.metric("llmgw_in_flight") == 0)
        await until("nobody to wait", lambda: made.metric("llmgw_queued") == 0)
        await until("all clients to be gone", lambda: made.metric("llmgw_clients") == 1)
        for name in MODELS:
            await self.fill(name)
        told = made.control.stats
        seen = len(told)
        await asyncio.to_thread(wait_for, lambda: len(told) > seen + 2 * self.processes, "fresh statistics")
        for last in told[-self.processes :]:
            assert last["in_flight"] == last["replicas"] == last["queued"] == {}, last
        self.check_usage()

    async def fill(self, name: str) -> None:
        """As many streams at once as there are slots, and each begins: none has to wait for another."""
        plans = []
        for engine in self.engines:
            engine.go_on.clear()
        async with asyncio.timeout(20):
            held = []
            for _ in range(4):
                self.marks += 1
                plan = {"kind": "stream", "mark": f"k{self.seed}-{self.marks}", "pad": 0, "prompt": 1, "made": 3}
                plan["held"] = True
                plans.append(plan)
                asked = {"user": json.dumps(plan), "model": name, "messages": [], "stream": True}
                reader, writer = await self.connect(False)
                writer.write(self.request("steady", json.dumps(asked).encode()))
                held.append((reader, writer))
            for reader, _ in held:
                assert b" 200 OK" in await reader.readuntil(b'"i":0')
            for engine in self.engines:
                engine.go_on.set()
            for plan, (reader, writer) in zip(plans, held, strict=True):
                await reader.readuntil(b"[DONE]")
                self.right[plan["mark"]] = ("steady", plan["prompt"], plan["made"])
                writer.close()

    def check_usage(self) -> None:
        """Every request is counted once: the log has each, and the sums told are those of the log."""
        control = self.made.control
        wait_for(lambda: control.usage("requests") == len(self.counted()), "all usage to be told", 10)
        counted = self.counted()
        steady = [row for row in counted if row["key"] == "steady" and not row["partial"]]
        mine = sum(row["prompt"] or 0 for row in steady), sum(row["completion"] or 0 for row in steady)
        wanted = sum(each[1] for each in self.right.values()), sum(each[2] for each in self.right.values())
        assert mine == wanted, (mine, wanted)
        for name in ("prompt", "completion"):
            told = control.usage(name) + (control.usage("partial_completion") if name == "completion" else 0)
            assert told == sum(row[name] or 0 for row in counted), name
        assert control.usage("partial_requests") == sum(row["partial"] for row in counted)

    def counted(self) -> list[dict[str, Any]]:
        lines = (self.made.work / "access.log").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert max(Counter(row["id"] for row in rows).values()) == 1, "a request has two lines"
        return [row for row in rows if row["status"] == 200 or row["partial"]]

    def begun_twice(self) -> list[str]:
        """Requests that more than one engine may have worked for."""
        seen: Counter[str] = Counter()
        for engine in self.engines:
            seen.update(engine.seen)
        return [mark for mark, count in seen.items() if count > 1]


def fields_after_aliases(model: RouteModel) -> tuple[Any, ...]:
    return model.engine, model.state, model.words, model.context, model.endpoints, model.replicas


def walk(work: Path, seed: int, seconds: float, processes: int = 1, secure: bool = False) -> Walk:
    """Walk, and demand what must hold afterwards. `secure`: clients come over TLS."""
    flags = (*FLAGS, "--workers", str(processes), "--access-log", str(work / "access.log"))
    with contextlib.ExitStack() as stack:
        made = Gateway(work, *flags, secure=secure)
        stack.callback(made.close)
        more = ("--tls-cert", str(work / "cert.pem"), "--tls-key", str(work / "key.pem")) if secure else ()
        for index in range(1, processes):
            address = ("--index", str(index), "--listen", f"127.0.0.1:{made.port}")
            stack.callback(Gateway(work, *flags, *more, *address, control=False).close)
        assert made.control is not None
        wait_for(lambda: made.control and len(made.control.hellos) == processes, "all processes", 40)
        one = Walk(made, seed, 24, processes)
        asyncio.run(one.run(seconds))
        assert not one.begun_twice()
        assert "Traceback" not in made.log(), made.log()
        assert "could not be" not in made.log(), made.log()
    return one


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        done = walk(Path(directory), int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "tls")
    print(f"seed {done.seed}: {done.marks} requests, {len(done.right)} answered to a steady client, {dict(done.told)}")
