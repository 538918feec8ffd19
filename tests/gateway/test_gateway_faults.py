"""What happens when something goes away, breaks, is slow or is not there yet."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable

import pytest
import trustme
from gateway_fakes import (
    Engine,
    FakeControl,
    Gateway,
    ask,
    dechunk,
    free_port,
    model,
    post,
    read_all,
    read_until,
    replica,
    wait_for,
)

from llmgw.domain.routing import RouteTable

SLOW = ("--token-interval", "0.05", "--tokens", "2000")
LOADING_503 = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 43\r\n\r\n"
    b'{"error":{"message":"Loading model","c":0}}'
)


def error(body: bytes) -> dict:
    return json.loads(body)["error"]


# -- the client goes


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_a_client_that_goes_frees_the_engine_within_a_second(plane: Gateway, stream: bool, how: str):
    engine = plane.engine(*SLOW)
    plane.routes(model(replica(engine)))
    with plane.open_chat(stream=stream) as sock:
        wait_for(lambda: engine.stats()["in_flight"] == 1, "the request at the engine")
        if how == "half-close":
            sock.shutdown(socket.SHUT_WR)
        elif how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            sock.close()
        else:
            sock.close()
        began = time.monotonic()
        wait_for(lambda: engine.stats()["client_disconnects"] == 1, "the engine to notice")
        assert time.monotonic() - began < 1
    wait_for(lambda: plane.metric("llmgw_in_flight") == 0, "the slot to be free")


def test_a_client_that_goes_while_queued_never_reaches_the_engine(plane: Gateway):
    engine = plane.engine(*SLOW, slots=1)
    plane.routes(model(replica(engine)))
    with plane.open_chat(stream=True) as first:
        read_until(first, b"t0")
        queued = plane.open_chat(stream=True)
        wait_for(lambda: plane.metric("llmgw_queued") == 1, "the second to wait")
        queued.close()
        wait_for(lambda: plane.metric("llmgw_queued") == 0, "the queue to be empty")
    wait_for(lambda: engine.stats()["in_flight"] == 0, "the engine to be idle")
    assert engine.stats()["requests"]["/v1/chat/completions"] == 1


# -- the engine goes


def test_an_engine_killed_in_a_stream_ends_it_with_an_error_event_and_no_done(plane: Gateway):
    engine = plane.engine(*SLOW)
    plane.routes(model(replica(engine, "m#0", "node-a")))
    with plane.open_chat(stream=True) as sock:
        head = read_until(sock, b"t2 ")
        engine.kill()
        body, ended = dechunk((head + read_all(sock)).partition(b"\r\n\r\n")[2])
    events = body.decode().strip().split("\n\n")
    last = json.loads(events[-1].removeprefix("data: "))
    assert ended
    assert "[DONE]" not in body.decode()
    assert "replica `m#0` on node `node-a` of the model `m` broke off" in last["error"]["message"]
    assert [json.loads(e[6:])["choices"][0]["delta"]["content"] for e in events[1:4]] == ["t0 ", "t1 ", "t2 "]


def test_an_engine_killed_in_the_middle_of_an_event_leaves_the_error_readable(plane: Gateway):
    def act(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b'40\r\ndata: {"half')

    plane.routes(model(replica(plane.scripted(act))))
    with plane.open_chat(stream=True) as sock:
        body, ended = dechunk(read_all(sock).partition(b"\r\n\r\n")[2])
    assert ended
    assert json.loads(body.decode().split("\n\n")[-2][6:])["error"]["code"] == "upstream_failed"


def test_an_engine_killed_before_a_whole_answer_is_a_502(plane: Gateway):
    engine = plane.engine(*SLOW)
    plane.routes(model(replica(engine)))
    with plane.open_chat() as sock:
        wait_for(lambda: engine.stats()["in_flight"] == 1, "the request at the engine")
        engine.kill()
        got = read_until(sock, b"}}")
    assert got.startswith(b"HTTP/1.1 502 ")
    assert b"upstream_failed" in got


# -- retry


def test_a_refused_connection_is_tried_on_another_replica(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(free_port(), "m#0"), replica(engine, "m#1", "node-b")))
    answers = [plane.chat() for _ in range(4)]
    assert {(status, headers["x-llmgw-replica"]) for status, headers, _ in answers} == {(200, "m#1")}
    assert "replica `m#0` is passed over" in plane.log()


def test_an_engine_that_still_loads_is_passed_over_for_another(plane: Gateway):
    loading = plane.scripted(lambda connection, _request: connection.sendall(LOADING_503))
    engine = plane.engine()
    plane.routes(model(replica(loading, "m#0"), replica(engine, "m#1")))
    assert {plane.chat()[1]["x-llmgw-replica"] for _ in range(4)} == {"m#1"}
    assert len(loading.requests) == 1


def test_when_no_replica_can_begin_it_says_what_each_said_last(plane: Gateway):
    loading = plane.scripted(lambda connection, _request: connection.sendall(LOADING_503))
    plane.routes(model(replica(loading, "m#0", "node-a")))
    status, headers, body = plane.chat()
    assert (status, error(body)["code"]) == (503, "no_replica")
    assert "replica `m#0` on node `node-a`: it answered 503: Loading model" in error(body)["message"]
    assert int(headers["retry-after"]) > 0
    assert len(loading.requests) == 1


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"])
def test_a_request_an_engine_may_have_begun_is_never_sent_twice(plane: Gateway, sent: bytes):
    one = plane.scripted(lambda connection, _request: connection.sendall(sent))
    two = plane.scripted(lambda connection, _request: connection.sendall(sent))
    plane.routes(model(replica(one, "m#0"), replica(two, "m#1")))
    assert plane.chat()[0] == 502
    assert len(one.requests) + len(two.requests) == 1


def test_a_pooled_connection_the_engine_has_closed_is_not_used(plane: Gateway):
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    upstream = plane.scripted(lambda connection, _request: connection.sendall(answer))
    plane.routes(model(replica(upstream)))
    with plane.connect() as sock:
        for _ in range(20):
            upstream.ended.clear()
            sock.sendall(post("/v1/chat/completions", ask()))
            assert read_until(sock, b"{}").startswith(b"HTTP/1.1 200 ")
            assert upstream.ended.wait(5)
    assert len(upstream.requests) == 20


def test_a_replica_that_is_back_is_used_again(start: Callable[..., Gateway]):
    made = start()
    port = free_port()
    with contextlib.closing(Engine(made.work)) as other:
        made.routes(model(replica(port, "m#0"), replica(other, "m#1", slots=1)))
        assert made.chat()[1]["x-llmgw-replica"] == "m#1"
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        with socket.create_server(("127.0.0.1", port)) as server:

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        peer, _ = server.accept()
                        with peer:
                            peer.recv(65536)
                            peer.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            wait_for(lambda: made.chat()[1]["x-llmgw-replica"] == "m#0", "the replica to be back")
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)


# -- balance and queue


def test_the_least_loaded_replica_gets_the_next_request(plane: Gateway):
    engines = [plane.engine(*SLOW, slots=slots) for slots in (6, 2)]
    plane.routes(model(*(replica(engine, f"m#{i}") for i, engine in enumerate(engines))))
    with contextlib.ExitStack() as open_ones:
        for _ in range(4):
            read_until(open_ones.enter_context(plane.open_chat(stream=True)), b"t0")
        assert [engine.stats()["in_flight"] for engine in engines] == [3, 1]
        for _ in range(4):
            read_until(open_ones.enter_context(plane.open_chat(stream=True)), b"t0")
        assert [engine.stats()["in_flight"] for engine in engines] == [6, 2]


def test_a_free_slot_goes_to_who_has_waited_longest_and_the_engine_never_gets_more_than_its_slots(plane: Gateway):
    engine = plane.engine(slots=2)
    plane.routes(model(replica(engine)))
    with contextlib.ExitStack() as open_ones:
        socks = [open_ones.enter_context(plane.open_chat(stream=True, max_tokens=5)) for _ in range(20)]
        assert all(b"[DONE]" in read_until(sock, b"[DONE]") for sock in socks)
    wait_for(lambda: engine.stats()["finished"] == 20, "the engine to have ended them all")
    assert engine.stats()["max_in_flight"] <= 2


def test_a_full_queue_is_a_429_and_a_late_one_a_503(start: Callable[..., Gateway]):
    made = start("--queue", "1", "--queue-timeout", "1s")
    engine = made.engine(*SLOW, slots=1)
    made.routes(model(replica(engine)))
    with made.open_chat(stream=True) as first:
        read_until(first, b"t0")
        with made.open_chat(stream=True) as second:
            wait_for(lambda: made.metric("llmgw_queued") == 1, "the second to wait")
            status, headers, body = made.chat()
            assert (status, error(body)["code"]) == (429, "queue_full")
            assert headers["retry-after"] == "1"
            late = read_until(second, b"}").decode()
            assert late.startswith("HTTP/1.1 503 ")
            assert "no slot of 1 came free within 1 s" in late


def test_a_request_waits_for_a_replica_that_is_loading(plane: Gateway):
    engine = plane.engine()
    coming = replica(engine, ready=False)
    plane.routes(model(coming, state="loading", words="loading on node-a"))
    with plane.open_chat() as sock:
        wait_for(lambda: plane.metric("llmgw_queued") == 1, "the request to wait")
        plane.routes(model(replica(engine)))
        assert read_until(sock, b"t7 ").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("ending", ["refused", "removed", "late"])
def test_waiting_for_a_loading_replica_ends_with_words(start: Callable[..., Gateway], ending: str):
    made = start("--queue-timeout", "1s" if ending == "late" else "60s")
    made.routes(model(state="loading", words="m#0 on node-a: loading, 3.1 of 8.2 GB"))
    with made.open_chat() as sock:
        wait_for(lambda: made.metric("llmgw_queued") == 1, "the request to wait")
        if ending == "refused":
            made.routes(model(state="refused", words="", refusal=("no node", "node-a: lost")))
        elif ending == "removed":
            made.routes(model(name="other"))
        head, _, body = read_until(sock, b'"}').partition(b"\r\n\r\n")
        made.routes()
    status, words = {
        "refused": (b"503", "no node\nnode-a: lost"),
        "removed": (b"404", "the model `m` does not exist; there are: `other`"),
        "late": (b"503", "m#0 on node-a: loading, 3.1 of 8.2 GB (waited 1 s)"),
    }[ending]
    assert head.startswith(b"HTTP/1.1 " + status)
    assert json.dumps(words)[1:-1] in body.decode()


# -- deadlines and slow readers


def test_a_stream_without_tokens_is_ended_by_its_deadlines(start: Callable[..., Gateway]):
    made = start("--first-token-timeout", "500ms", "--token-gap-timeout", "500ms")
    stop = threading.Event()

    def act(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if b"one-token" in request:
            connection.sendall(b"b\r\ndata: one\n\n\r\n")
        while not stop.wait(0.05):
            connection.sendall(b"3\r\n:\n\n\r\n")

    made.routes(model(replica(made.scripted(act))))
    for more, words in (({}, b"sent no token within 0.5 s"), ({"user": "one-token"}, b"sent no token for 0.5 s")):
        with made.open_chat(stream=True, **more) as sock:
            assert words in read_all(sock)
    stop.set()


def test_a_whole_answer_has_a_deadline_too(start: Callable[..., Gateway]):
    made = start("--total-timeout", "500ms")
    engine = made.engine(*SLOW)
    made.routes(model(replica(engine)))
    status, _, body = made.chat()
    assert (status, error(body)["code"]) == (504, "deadline_exceeded")
    wait_for(lambda: engine.stats()["client_disconnects"] == 1, "the engine to notice")


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_a_client_that_does_not_read_costs_little_and_delays_nobody(start: Callable[..., Gateway], secure: bool):
    made = start("--token-gap-timeout", "1500ms", secure=secure)
    event = b"data: " + b"x" * 2000 + b"\n\n"
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    sent = [0]

    def act(connection: socket.socket, request: bytes) -> None:
        if b"flood" not in request:
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
            return
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(chunk)
            sent[0] += len(chunk)

    made.routes(model(replica(made.scripted(act), slots=100)))
    with contextlib.ExitStack() as open_ones:
        for _ in range(3):
            raw = open_ones.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            raw.connect(("127.0.0.1", made.port))
            sock = open_ones.enter_context(made.wrapped(raw))
            sock.sendall(post("/v1/chat/completions", ask(stream=True, user="flood")))
        wait_for(lambda: sent[0], "the flood")
        times = []
        for _ in range(20):
            began = time.monotonic()
            assert made.chat()[0] == 200
            times.append(time.monotonic() - began)
        assert sorted(times)[10] < 0.1
        wait_for(lambda: made.metric("llmgw_in_flight") == 0, "the clients that do not read to be cut off")
    assert sent[0] < 3 * 16_000_000


def test_a_connection_that_was_held_up_by_a_slow_client_serves_the_next_one(plane: Gateway):
    body = b'"' + b"x" * 250_000 + b'"'
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    connections = []

    def act(connection: socket.socket, _request: bytes) -> None:
        connections.append(connection)
        connection.sendall(answer)
        while b"}" in connection.recv(65536):
            connection.sendall(answer)

    plane.routes(model(replica(plane.scripted(act))))
    done = 'llmgw_requests_total{model="m",code="200"}'
    before = plane.metric(done)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", plane.port))
        slow.sendall(post("/v1/chat/completions", ask()))
        wait_for(lambda: plane.metric(done) > before, "the answer to be complete")
        assert plane.chat(timeout=5)[2] == body
        assert len(connections) == 1


# -- the control process goes; the gateway ends


def test_without_the_control_process_streams_and_new_requests_go_on(start: Callable[..., Gateway]):
    made = start()
    engine = made.engine("--token-interval", "0.02", "--tokens", "100")
    made.routes(model(replica(engine)))
    with made.open_chat(stream=True) as sock:
        got = read_until(sock, b"t3 ")
        made.control.close()
        wait_for(lambda: made.ready()["control"] == "away", "the gateway to notice")
        assert made.chat(max_tokens=2)[0] == 200
        assert b"t99 " in got + read_until(sock, b"[DONE]")
    ready = made.ready()
    assert ready["ready"] is True
    assert "last routing snapshot" in ready["words"]
    made.control = FakeControl(made.control_path)
    wait_for(lambda: made.control.hellos, "the gateway to come back")
    assert made.control.hellos[0]["pid"] == made.process.pid
    made.routes(model(replica(engine), name="new"))
    assert made.chat("new", max_tokens=1)[0] == 200


def test_a_gateway_may_start_before_the_control_process(start: Callable[..., Gateway]):
    port = free_port()
    made = start("--listen", f"127.0.0.1:{port}", control=False)
    made.port = port
    wait_for(lambda: "listening" in made.log(), "the gateway to listen")
    assert made.fetch("GET", "/readyz")[0] == 503
    status, _, body = made.chat()
    assert (status, error(body)["code"]) == (503, "no_routes")
    made.control = FakeControl(made.control_path)
    made.routes(model(replica(made.engine())))
    assert made.chat()[0] == 200


def test_nonsense_from_the_control_process_is_ignored_and_logged(start: Callable[..., Gateway]):
    made = start()
    made.routes(model(replica(made.engine())))
    for line in (
        b"nonsense\n",
        b"[]\n",
        b'{"type":"routes","seq":"x"}\n',
        b'{"type":"future"}\n',
        b"[" * 99999 + b"\n",
    ):
        made.control.send(line)
    made.routes(model(replica(made.engine())))
    assert made.chat()[0] == 200
    assert made.log().count("cannot be read and is ignored") >= 3


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "drain message"])
def test_draining_finishes_open_answers_and_takes_no_new_ones(start: Callable[..., Gateway], how: str):
    made = start()
    engine = made.engine("--token-interval", "0.02", "--tokens", "40")
    made.routes(model(replica(engine)))
    with made.connect() as idle, made.open_chat(stream=True) as sock:
        got = read_until(sock, b"t1 ")
        if how == "drain message":
            made.control.send({"type": "drain"})
        else:
            made.process.send_signal(getattr(signal, how))
        assert read_all(idle) == b""
        wait_for(lambda: "draining" in made.log(), "draining")
        with pytest.raises(OSError), made.connect() as late:  # noqa: PT012
            late.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert late.recv(10)
            raise OSError("no answer")
        assert made.process.poll() is None
        assert b"[DONE]" in got + read_all(sock)
    assert made.process.wait(5) == 0


def test_draining_has_a_deadline_and_then_says_so_to_the_client(start: Callable[..., Gateway]):
    made = start("--drain-timeout", "300ms")
    made.routes(model(replica(made.engine(*SLOW))))
    with made.open_chat(stream=True) as sock:
        read_until(sock, b"t1 ")
        made.terminate()
        rest = read_all(sock)
    assert b"shutting_down" in rest
    assert b"[DONE]" not in rest
    assert made.process.wait(5) == 0


def test_two_gateways_share_an_address_and_a_strangers_address_is_one_line_and_exit_1(start: Callable[..., Gateway]):
    first = start()
    second = start("--listen", f"127.0.0.1:{first.port}", "--index", "1")
    assert second.control.hellos[0]["index"] == 1
    assert second.port == first.port
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        third = start("--listen", f"127.0.0.1:{port}", control=False)
        assert third.process.wait(10) == 1
        errors = [line for line in third.log().splitlines() if line.startswith("error:")]
        assert errors == [f"error: `127.0.0.1:{port}` is taken by another program"]


def test_tls_for_clients(start: Callable[..., Gateway], tmp_path):
    ca = trustme.CA()
    cert = ca.issue_cert("localhost")
    chain, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.private_key_pem.write_to_path(private)
    for blob in cert.cert_chain_pems:
        blob.write_to_path(chain, append=True)
    made = start("--tls-cert", str(chain), "--tls-key", str(private))
    engine = made.engine(*SLOW)
    context = ssl.create_default_context()
    ca.configure_trust(context)
    made.control.publish(RouteTable(1, (model(replica(engine)),)))
    wait_for(lambda: "routing snapshot 1" in made.log(), "the snapshot")
    with context.wrap_socket(made.connect(), server_hostname="localhost") as sock:
        sock.sendall(post("/v1/chat/completions", ask(stream=True)))
        assert b"t2 " in read_until(sock, b"t2 ")
    wait_for(lambda: engine.stats()["client_disconnects"] == 1, "the engine to notice")
