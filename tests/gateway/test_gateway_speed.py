"""What the gateway does to be fast is not to be noticed: what it remembers, holds back and shares."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateway_fakes import Gateway, ask, fetch, model, post, read_all, read_until, replica, wait_for

from llmgw.domain.routing import RouteKey
from llmgw.gateway.loop import new_loop
from llmgw.gateway.reply import AnswerBroken, Replies
from llmgw.gateway.shared import Shared


def key(name: str, value: str) -> RouteKey:
    return RouteKey(name, hashlib.sha256(value.encode()).hexdigest())


def answer(sock: socket.socket) -> tuple[bytes, bytes]:
    head, _, body = read_until(sock, b"\r\n\r\n").partition(b"\r\n\r\n")
    at = head.lower().find(b"content-length: ")
    length = int(head[at + 16 :].split(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return head, body


# -- what is remembered


def test_a_remembered_head_is_read_again_when_the_routes_change(plane: Gateway):
    engine = plane.engine()
    request = post("/v1/chat/completions", ask(), "Authorization: Bearer sk-one")
    plane.routes(model(replica(engine)), keys=(key("one", "sk-one"),), required=True)
    with plane.connect() as sock:
        for _ in range(3):
            sock.sendall(request)
            assert b" 200 " in answer(sock)[0]
        plane.routes(model(replica(engine)), keys=(key("two", "sk-two"),), required=True)
        sock.sendall(request)
        assert b" 401 " in answer(sock)[0]


def test_requests_with_a_remembered_head_go_to_the_model_that_each_one_names(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(engine)), model(replica(engine, "n#0"), name="n"))
    with plane.connect() as sock:
        for name in ("m", "n", "m", "n"):
            sock.sendall(post("/v1/chat/completions", ask(name)))
            assert b"x-llmgw-replica: %b#0" % name.encode() in answer(sock)[0]
        sock.sendall(post("/v1/chat/completions", ask("x")))
        assert b" 404 " in answer(sock)[0]


@pytest.mark.parametrize("cut", [1, 40, 100, 150, 180])
def test_a_remembered_head_that_comes_in_pieces_is_the_same_request(plane: Gateway, cut: int):
    engine = plane.engine()
    plane.routes(model(replica(engine)))
    request = post("/v1/chat/completions", ask())
    with plane.connect() as sock:
        for _ in range(2):
            sock.sendall(request)
            assert b" 200 " in answer(sock)[0]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(request[:cut])
        fetch(plane.port, "GET", "/healthz")
        sock.sendall(request[cut:] + request)
        assert b" 200 " in answer(sock)[0]


def test_a_length_that_is_no_number_is_refused_after_a_remembered_head(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(engine)))
    request = post("/v1/chat/completions", ask())
    for length in (b"+70", b"7 0", b"", b"0x46"):
        with plane.connect() as sock:
            for _ in range(2):
                sock.sendall(request)
                assert b" 200 " in answer(sock)[0]
            at = request.find(b"Content-Length: ") + 16
            sock.sendall(request[:at] + length + request[request.find(b"\r\n", at) :])
            got = read_all(sock)
            assert b" 400 " in got
            assert b"`content-length` is not a plain number" in got


@pytest.mark.parametrize(
    "written", [b"CONTENT-LENGTH: %d", b"Content-length: %d", b"Content-Length:%d", b"Content-Length: %d "]
)
def test_a_body_is_never_the_next_request_however_its_length_is_written(plane: Gateway, written: bytes):
    plane.routes(model(replica(plane.engine())))
    usual = post("/v1/chat/completions", ask(user="GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))
    head, _, body = usual.partition(b"\r\n\r\n")
    head = head[: head.find(b"Content-Length")] + written % len(body)
    with plane.connect() as sock:
        for _ in range(3):
            sock.sendall(head + b"\r\n\r\n" + body)
            assert b" 200 " in answer(sock)[0]


def test_an_answer_without_digits_in_its_length_is_broken_after_a_good_one_too():
    replies = Replies()
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y\r\n"
    assert replies.read(good)[1] == 5
    with pytest.raises(AnswerBroken):
        replies.read(good.replace(b" 5", b" "))


# -- what a batch holds back


def test_writes_of_one_batch_arrive_in_their_order_and_before_the_end() -> None:
    small, large = b"a" * 1000, bytearray(b"b" * 300_000)

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            write = self.transport.write  # type: ignore[attr-defined]
            for piece in (small, b"x", large, b"y", small * 100, b"z"):
                write(piece)
            (self.transport.write_eof if data == b"eof" else self.transport.close)()  # type: ignore[attr-defined]

    async def main() -> list[bytes]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Server, "127.0.0.1", 0)
        got = []
        async with server:
            for word in (b"close", b"eof"):
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
                writer.write(word)
                got.append(await asyncio.wait_for(reader.read(), 20))
                writer.close()
                await writer.wait_closed()
        return got

    with asyncio.Runner(loop_factory=new_loop) as runner:
        got = runner.run(main())
    assert got == [small + b"x" + large + b"y" + small * 100 + b"z"] * 2


# -- several processes


def test_processes_count_each_others_requests_and_forget_a_dead_ones(tmp_path: Path) -> None:
    served = model(replica(1, "m#0"), replica(2, "m#1"))
    mine = Shared(tmp_path / "counts", 2)
    there, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        other = Shared(tmp_path / "counts", 2)
        for _ in range(3):
            other.add("m#0", 1)
        other.add("m#1", 1)
        other.add("m#1", -1)
        os.write(there[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    try:
        assert os.read(there[0], 1) == b"x"
        mine.add("m#0", 1)
        mine.look_at_rows()
        assert mine.counts(served) == {"m#0": 4, "m#1": 0}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for end in (*there, *go_on):
            os.close(end)
    mine.look_at_rows()
    assert mine.counts(served) == {"m#0": 1, "m#1": 0}
    mine.close()


# -- others are not delayed


@contextlib.contextmanager
def endless() -> Iterator[int]:
    """An engine whose streams never end, as fast as they are taken: its port."""
    event = b"data: " + b'{"choices":[]}' * 300 + b"\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    frame = b"%x\r\n%b\r\n" % (len(event), event)
    loop = asyncio.new_event_loop()
    server: list[asyncio.Server] = []
    stop = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            while not stop.is_set():
                writer.write(frame)
                await writer.drain()
        writer.close()

    async def main() -> None:
        server.append(await asyncio.start_server(serve, "127.0.0.1", 0, backlog=512))
        await stop.wait()
        server[0].close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        wait_for(lambda: server, "the engine to listen")
        yield int(server[0].sockets[0].getsockname()[1])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.1))
        loop.close()


def test_slow_readers_and_a_stopped_engine_delay_nobody(start: Callable[..., Gateway]):
    made = start()
    quick, stopped = made.engine(), made.engine()
    with endless() as port, contextlib.ExitStack() as stack:
        made.routes(
            model(replica(quick)),
            model(replica(port, "slow#0", slots=500), name="slow"),
            model(replica(stopped, "still#0", slots=50), name="still"),
        )
        stopped.process.send_signal(signal.SIGSTOP)
        stack.callback(stopped.process.send_signal, signal.SIGCONT)
        still = [stack.enter_context(made.open_chat("still")) for _ in range(20)]
        slow = []
        for _ in range(200):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(20)
            sock.connect(("127.0.0.1", made.port))
            sock.sendall(post("/v1/chat/completions", ask("slow", stream=True)))
            slow.append(sock)
        for sock in slow:
            assert sock.recv(1)  # all stand
        took = []
        read_at = time.monotonic()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            if time.monotonic() - read_at >= 1:
                read_at = time.monotonic()
                for sock in slow:
                    assert sock.recv(1)
            began = time.monotonic()
            status, _, body = made.chat()
            took.append(time.monotonic() - began)
            assert status == 200
            assert json.loads(body)["choices"]
        took.sort()
        assert len(took) > 20
        assert took[len(took) // 2] < 0.25, took[len(took) // 2]
        assert made.process.poll() is None
        assert len(still) == 20
