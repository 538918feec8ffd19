"""A client that does what a talk says, and what is wrong with what it got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import struct

from fuzz_lib.engine import Engine
from fuzz_lib.judge import Answers, marks_of
from fuzz_lib.talks import ECHO, NEVER, Talk, is_mark

DEADLINE_S = 30.0
_PATIENCE_S = 0.5


class Client:
    """Runs one talk against `port`; `tls` for the one over TLS."""

    def __init__(self, talk: Talk, seed: int, port: int, tls: ssl.SSLContext | None, engine: Engine) -> None:
        self.talk, self.seed, self.port, self.engine = talk, seed, port, engine
        self.tls = tls if talk.tls and not talk.raw else None
        self.answers = Answers(talk.methods if talk.kind in ("plain", "hostile-engine", "unfinished") else ())
        self.sock = socket.socket()
        self.got = bytearray()
        self.ended = asyncio.Event()
        self.came = asyncio.Event()
        self.broken = ""

    async def run(self) -> str:
        """What is wrong, "" if nothing."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._talk()
        except TimeoutError:
            return f"not over after {DEADLINE_S:g} s; {len(self.answers.whole)} answers came"
        return self._judge()

    async def _talk(self) -> None:
        slow = ("slow", None) in self.talk.steps
        sock = self.sock
        sock.setblocking(False)
        if slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=self.tls, server_hostname="gateway" if self.tls else None, limit=65536
            )
        except (OSError, ssl.SSLError) as error:
            sock.close()
            self.broken = f"no connection: {error}"
            return
        reading = asyncio.get_running_loop().create_task(self._read(reader, slow))
        try:
            await self._steps(writer)
        except (OSError, ssl.SSLError):
            pass  # the gateway has hung up, as it may on bad bytes
        finally:
            if not self.ended.is_set():
                # the client is the one to close a connection that is kept alive
                writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await reading
            writer.transport.abort()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, slow: bool) -> None:
        try:
            while data := await reader.read(8000 if slow else 65536):
                self.got += data
                self.answers.feed(data)
                self.came.set()
                if slow:
                    await asyncio.sleep(0.001)
            self.answers.feed(b"")
        except (OSError, ssl.SSLError, AttributeError) as error:
            # AttributeError: asyncio's own, where a reader over TLS goes on after its connection was closed (3.11)
            self.broken = str(error) or type(error).__name__
        finally:
            self.ended.set()
            self.came.set()

    async def _steps(self, writer: asyncio.StreamWriter) -> None:
        for step, what in self.talk.steps:
            if step == "send":
                assert isinstance(what, bytes)
                writer.write(what)
                await writer.drain()
            elif step == "wait":
                assert isinstance(what, float)
                await asyncio.sleep(what)
            elif step == "read":
                assert isinstance(what, int)
                await self._answered(what)
            elif step == "eof":
                if writer.can_write_eof():
                    writer.write_eof()
                else:
                    writer.close()
                # a client's end is its leaving: the gateway has to hang up too
                await self.ended.wait()
            elif step == "reset":
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                self.broken = "reset by the client"

    async def _answered(self, count: int) -> None:
        """Wait for so many answers; a talk that is not plain may get fewer."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (DEADLINE_S if self.talk.plain else _PATIENCE_S)
        while len(self.answers.whole) < count and not self.ended.is_set() and loop.time() < until:
            self.came.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.came.wait(), max(0.001, until - loop.time()))

    def _judge(self) -> str:
        talk, answers = self.talk, self.answers
        if answers.problem:
            return answers.problem
        if NEVER in self.got:
            return "bytes after the end of an engine's answer reached the client"
        order = []
        for found in ECHO.finditer(bytes(self.got) + b"\n" + b"\n".join(body for _, body in answers.whole)):
            if is_mark(self.seed, found) and int(found[1]) != talk.number:
                return f"an answer to another connection came: {found[0]!r}"
        for _, body in answers.whole:
            order += [int(found[2]) for found in ECHO.finditer(body) if is_mark(self.seed, found)][:1]
        if order != sorted(order):
            return f"answers came in another order than their requests: {order}"
        if words := self._smuggled():
            return words
        return self._judge_plain() if talk.plain else ""

    def _smuggled(self) -> str:
        """What reached the engine must be a request as h11 reads this client's bytes."""
        seen = self.engine.seen
        prefix = f"c{self.talk.number}-"
        mine = [name for name in seen if name.startswith(prefix)]
        allowed = marks_of(self.talk.sent()) if mine else set()
        for name in mine:
            count, act = seen.pop(name), self.engine.acts.pop(name, "")
            if name not in allowed:
                return f"the engine got the request `{name}`, which h11 does not see in what the client sent"
            if count > 1 and act not in ("busy", "damaged") and self.talk.kind != "damaged":
                return f"the engine got the request `{name}` {count} times"
            if self.talk.plain and count != 1:
                return f"the engine got the request `{name}` {count} times"
        return ""

    def _judge_plain(self) -> str:
        talk, answers = self.talk, self.answers
        if self.broken or answers.cut or len(answers.whole) != len(talk.marks):
            return (
                f"{len(answers.whole)} of {len(talk.marks)} answers to good requests came"
                f"{', one cut' if answers.cut else ''}; {self.broken}; {bytes(self.got[-300:])!r}"
            )
        for (status, body), name, act, method in zip(answers.whole, talk.marks, talk.acts, talk.methods, strict=True):
            if act == "own":
                if status != 200 or (not body) != (method == "HEAD"):
                    return f"a question to the gateway itself was answered {status}: {body[:300]!r}"
            elif (status != 200) != (act == "error") or b"echo:%b" % name.encode() not in body:
                return f"`{name}` ({act}) was answered {status}: {body[:300]!r}"
            elif "stream" in act and (words := _stream_problem(body, act)):
                return f"`{name}` ({act}): {words}: {body[:300]!r}"
            elif act in ("whole", "chunked", "large", "close"):
                json.loads(body)
        return ""


def _stream_problem(body: bytes, act: str) -> str:
    numbers = [int(number) for number in re.findall(rb'"t(\d+)"', body)]
    if numbers != list(range(len(numbers))):
        return f"tokens are missing or doubled: {numbers}"
    if not body.endswith(b"data: [DONE]\n\n"):
        return "it does not end in [DONE]"
    return "" if (b'"usage"' in body) == (act == "usage-stream") else "usage where none was asked for, or none"
