"""The short way of a token (`gateway.pump`): nobody can tell it from the long one, whatever an engine sends."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from gateway_fakes import Gateway, Scripted, ask, dechunk, gateway, model, post, read_until, replica, wait_for

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), secure=request.param) as made:
        yield made


@pytest.fixture
def plane(either: Gateway) -> Iterator[Gateway]:
    yield either
    either.forget()


def event(number: int, size: int = 0) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"t%d%b"}}]}\n\n' % (number, b"x" * size)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def paced(*writes: bytes, end: bytes = END) -> Scripted:
    """An engine whose stream leaves in these writes, with time between them to be read one by one."""

    def act(connection: socket.socket, _request: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(HEAD + chunk(event(0)))
        for write in writes:
            time.sleep(0.01)
            connection.sendall(write)
        connection.sendall(end)

    return Scripted(act)


def stream(plane: Gateway, engine: Scripted, **more: object) -> bytes:
    plane.routes(model(replica(engine)))
    with plane.open_chat(stream=True, **more) as sock:
        raw = read_until(sock, b"\r\n0\r\n\r\n")
    body, whole = dechunk(raw.partition(b"\r\n\r\n")[2])
    assert whole
    return body


def halves(data: bytes, at: int) -> tuple[bytes, bytes]:
    return data[:at], data[at:]


WRITES = {
    "one event per chunk": [chunk(event(n)) for n in range(1, 9)],
    "two events in one chunk": [chunk(event(1)), chunk(event(2) + event(3)), chunk(event(4))],
    "two chunks in one write": [chunk(event(1)), chunk(event(2)) + chunk(event(3)), chunk(event(4))],
    "an event over two chunks": [chunk(event(1)), *map(chunk, halves(event(2), 20)), chunk(event(3))],
    "cut in the size": [chunk(event(1)), *halves(chunk(event(2)), 1), chunk(event(3))],
    "cut in the event": [chunk(event(1)), *halves(chunk(event(2)), 20), chunk(event(3))],
    "cut before the last byte": [chunk(event(1)), *halves(chunk(event(2)), -1), chunk(event(3))],
    "a comment between": [chunk(event(1)), chunk(b": ping\n\n"), chunk(event(2)), chunk(event(3))],
    "an event with a name": [chunk(event(1)), chunk(b"event: x\n" + event(2)), chunk(event(3))],
    "lines of CRLF": [chunk(event(1)), chunk(b'data: {"a":1}\r\n\r\n'), chunk(event(2))],
    "larger and larger": [chunk(event(n, 3**n)) for n in range(1, 11)] + [chunk(event(11))],
    "just what one read takes": [chunk(event(n, 420 + n)) for n in range(1, 30)],
    "the ends in the text": [chunk(b'data: {"a":"\\n\\n\\r\\ndata: {"}\n\n'), chunk(event(1)), chunk(event(2))],
    "lengths with leading zeros": [b"000" + chunk(event(1)), chunk(event(2))],
    "chunk extensions": [chunk(event(1)), chunk(event(2)).replace(b"\r\n", b";a=b\r\n", 1), chunk(event(3))],
}


@pytest.mark.parametrize("writes", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("asked", [True, False], ids=["usage asked for", "not"])
def test_what_an_engine_sends_arrives_however_it_is_cut(plane: Gateway, writes: list[bytes], asked: bool):
    engine = paced(*writes, chunk(USAGE), chunk(DONE))
    sent, whole = dechunk(chunk(event(0)) + b"".join(writes).replace(b";a=b", b"") + END)
    assert whole
    options = {"stream_options": {"include_usage": True}} if asked else {}
    assert stream(plane, engine, **options) == sent + (USAGE if asked else b"") + DONE
    engine.close()


@pytest.mark.parametrize("cut", [3, 20, 40, 60, -3])
def test_usage_is_read_where_it_comes_in_two_parts(plane: Gateway, cut: int):
    for asked in (True, False):
        name = f"m{cut}{asked}"
        engine = paced(chunk(event(1)), *halves(chunk(USAGE), cut), chunk(DONE))
        plane.routes(model(replica(engine), name=name))
        with plane.open_chat(name, stream=True, stream_options={"include_usage": asked}) as sock:
            assert (b'"usage"' in read_until(sock, b"\r\n0\r\n\r\n")) is asked
        engine.close()
        wait_for(lambda name=name: plane.control.usage("completion", model=name) == 5, "the usage to be told")


def test_random_streams_arrive_as_they_were_sent_however_they_are_cut(plane: Gateway):
    chance = random.Random(7)
    for _ in range(8):
        events = b"".join(event(n, chance.choice((0, 1, 400, 430, 9000))) for n in range(1, 30))
        framed, rest = b"", events
        while rest:
            size = chance.choice((rest.find(b"\n\n") + 2, rest.find(b"\n\n") + 2, chance.randrange(1, 600)))
            framed, rest = framed + chunk(rest[:size]), rest[size:]
        writes = []
        while framed:
            size = chance.choice((framed.find(b"\n\n\r\n") + 4, chance.randrange(1, 600)))
            writes.append(framed[:size])
            framed = framed[size:]
        engine = paced(*[write for write in writes if write], chunk(DONE))
        assert stream(plane, engine) == event(0) + events + DONE
        engine.close()


class InTurn(Scripted):
    """An engine that sends each piece when its client has seen all before: no two come in one read, on any machine."""

    def __init__(self, *pieces: bytes) -> None:
        seen = self.seen = threading.Semaphore(1)

        def act(connection: socket.socket, _request: bytes) -> None:
            for piece in pieces:
                assert seen.acquire(timeout=20)
                connection.sendall(piece)

        super().__init__(act)


@pytest.mark.parametrize("junk", [b"zz\r\n", b"5\r\nabcdefg\r\n", b"\r\n\r\n", b"-5\r\n"])
def test_a_broken_stream_ends_in_an_error_event(plane: Gateway, junk: bytes):
    engine = InTurn(HEAD + chunk(event(0)), chunk(event(1)), chunk(event(2)), junk)
    plane.routes(model(replica(engine)))
    with plane.open_chat(stream=True) as sock:
        raw = b""
        for number in range(3):
            raw += read_until(sock, b't%d"}}]}\n\n\r\n' % number)
            engine.seen.release()
        raw += read_until(sock, b"\r\n0\r\n\r\n")
    engine.close()
    body, whole = dechunk(raw.partition(b"\r\n\r\n")[2])
    assert whole
    begun, error, _ = body.partition(b'data: {"error"')
    assert error
    assert begun == event(0) + event(1) + event(2)


def test_events_are_counted_however_they_came_and_gaps_between_them(plane: Gateway):
    engine = InTurn(HEAD + chunk(event(0)), *[chunk(event(n)) for n in range(1, 10)], chunk(event(10) + event(11)))
    plane.routes(model(replica(engine), name="counted"))
    with plane.open_chat("counted", stream=True) as sock:
        for number in range(10):
            assert b"t%d" % number in read_until(sock, b'"t%d"' % number)
            engine.seen.release()
        assert b'"error"' in read_until(sock, b"\r\n0\r\n\r\n")
    engine.close()
    wait_for(
        lambda: plane.control.usage("partial_completion", model="counted") == 11,
        "the events of the broken stream to be told",
    )
    text = plane.fetch("GET", "/metrics")[2].decode()
    count = next(
        line for line in text.splitlines() if line.startswith('llmgw_inter_token_seconds_count{model="counted"')
    )
    assert int(count.split()[-1]) == 10  # the last two came in one read


def numbers(raw: bytes) -> list[int]:
    body, whole = dechunk(raw.partition(b"\r\n\r\n")[2])
    assert whole
    return [int(json.loads(line[6:])["choices"][0]["delta"]["content"][1:]) for line in body.split(b"\n\n")[:-2]]


def test_a_client_that_falls_behind_and_comes_back_gets_every_event_once(plane: Gateway):
    many = 20_000

    def act(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(HEAD)
        for number in range(many):
            connection.sendall(chunk(event(number)))
        connection.sendall(chunk(DONE) + END)

    assert numbers(read_slowly(plane, Scripted(act), 200_000)) == list(range(many))


def test_short_and_long_ways_do_not_overtake_each_other_where_the_client_is_slow(plane: Gateway):
    many, chance = 60_000, random.Random(3)

    def act(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(HEAD)
        number = 0
        while number < many:
            count = chance.choice((1, 1, 1, 1, 100, 400))
            connection.sendall(chunk(b"".join(event(each) for each in range(number, min(many, number + count)))))
            number += count
            time.sleep(0.0003)
        connection.sendall(chunk(DONE) + END)

    assert numbers(read_slowly(plane, Scripted(act), 1 << 30)) == list(range(many))


def read_slowly(plane: Gateway, engine: Scripted, until: int) -> bytes:
    """A stream's answer, read in small pieces with pauses up to so many bytes."""
    plane.routes(model(replica(engine)))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(30)
        sock.connect(("127.0.0.1", plane.port))
        with plane.wrapped(sock) as client:
            client.sendall(post("/v1/chat/completions", ask(stream=True), "Connection: close"))
            raw = bytearray()
            while more := client.recv(4096):
                raw += more
                if len(raw) < until:
                    time.sleep(0.0002)
    engine.close()
    return bytes(raw)


def test_the_engines_connection_is_used_again_after_a_stream(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(engine)))
    with plane.connect() as sock:
        for _ in range(5):
            sock.sendall(post("/v1/chat/completions", ask(stream=True, max_tokens=6)))
            assert b"t5" in read_until(sock, b"\r\n0\r\n\r\n")
            sock.sendall(post("/v1/chat/completions", ask(max_tokens=3)))
            assert b"t2" in read_until(sock, b"t2")
