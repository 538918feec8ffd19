"""What a client gets: answers of engines as they are, and the gateway's own with all their words."""

from __future__ import annotations

import hashlib
import json
import socket
import threading

import psutil
import pytest
from gateway_fakes import (
    Gateway,
    ask,
    dechunk,
    model,
    post,
    read_all,
    read_until,
    replica,
    wait_for,
)

from llmgw.domain.routing import RouteKey


def error(body: bytes) -> dict:
    return json.loads(body)["error"]


def test_a_whole_answer_passes_unchanged_and_says_who_gave_it(plane: Gateway):
    engine = plane.engine(key="replica-secret")
    plane.routes(model(replica(engine, "m#0", "node-7"), aliases=("other",)))
    status, headers, body = plane.fetch(
        "POST", "/v1/chat/completions", ask("other", max_tokens=3), {"X-Request-Id": "my-id", "Cookie": "c=1"}
    )
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == "t0 t1 t2 "
    assert headers["x-llmgw-replica"] == "m#0"
    assert headers["x-llmgw-node"] == "node-7"
    assert headers["x-request-id"] == "my-id"
    assert int(headers["x-llmgw-queue-ms"]) < 1000


def test_the_engine_gets_the_replicas_key_and_nothing_of_the_clients_head(plane: Gateway):
    engine = plane.engine(key="replica-secret")
    plane.routes(model(replica(engine)))
    sent = {"Authorization": "Bearer client-secret", "Cookie": "c=1", "X-Forwarded-For": "1.2.3.4", "Accept": "a/b"}
    assert plane.fetch("POST", "/v1/completions?x=1", {"model": "m", "prompt": "p"}, sent)[0] == 200
    last = engine.stats()["last"]
    assert last["path"] == "/v1/completions"
    assert last["headers"]["Authorization"] == "Bearer replica-secret"
    assert last["headers"]["Host"] == f"127.0.0.1:{engine.port}"
    assert set(last["headers"]) == {
        "Host",
        "Authorization",
        "Content-Type",
        "Accept",
        "X-Request-Id",
        "Content-Length",
    }


def test_a_stream_passes_byte_for_byte(plane: Gateway):
    body = b"".join(b'data: {"n":%d,"x":"\xc3\xa9\xe2\x80\xa8"}\n\n' % i for i in range(500)) + b"data: [DONE]\n\n"
    pieces = [body[i : i + 37] for i in range(0, len(body), 37)]

    def act(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"Set-Cookie: a=b\r\nServer: secret-engine\r\nCache-Control: no-cache\r\n\r\n"
        )
        for piece in pieces:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")

    plane.routes(model(replica(plane.scripted(act))))
    status, headers, got = plane.chat(stream=True)
    assert (status, got) == (200, body)
    assert headers["x-accel-buffering"] == "no"
    assert headers["cache-control"] == "no-cache"
    assert not {"set-cookie", "server"} & set(headers)


def test_the_first_token_is_there_before_the_last_is_made(plane: Gateway):
    first_was_read, made = threading.Event(), []

    def act(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"d\r\ndata: first\n\n\r\n")
        assert first_was_read.wait(10)
        made.append("last")
        connection.sendall(b"c\r\ndata: last\n\n\r\n0\r\n\r\n")

    plane.routes(model(replica(plane.scripted(act))))
    with plane.open_chat(stream=True) as sock:
        read_until(sock, b"data: first\n\n")
        assert not made
        first_was_read.set()
        assert b"data: last" in read_until(sock, b"0\r\n\r\n")


def test_embeddings_and_a_passed_through_path(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(engine), endpoints=("/v1/embeddings", "/v1/rerank")))
    status, _, body = plane.fetch("POST", "/v1/embeddings", {"model": "m", "input": ["a", "bc"]})
    assert status == 200
    assert len(json.loads(body)["data"]) == 2
    assert plane.fetch("POST", "/v1/rerank", {"model": "m"})[0] == 404
    assert engine.stats()["requests"]["/v1/rerank"] == 1


def test_an_endpoint_the_engine_lacks_is_a_404_that_says_so(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(engine), endpoints=("/v1/embeddings",)))
    status, _, body = plane.chat()
    assert (status, error(body)["code"]) == (404, "endpoint_not_supported")
    assert "llama.cpp" in error(body)["message"]
    assert "/v1/embeddings" in error(body)["message"]


def test_a_large_body_and_a_large_answer_pass(plane: Gateway):
    big = b"x" * 3_000_000

    def act(connection: socket.socket, request: bytes) -> None:
        answer = b'{"length": %d, "pad": "%b"}' % (len(request), big)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(answer), answer))

    plane.routes(model(replica(plane.scripted(act))))
    status, _, body = plane.chat(pad="y" * 2_000_000)
    assert status == 200
    assert json.loads(body)["length"] > 2_000_000
    assert json.loads(body)["pad"] == big.decode()


def test_models_lists_state_context_and_words(plane: Gateway):
    plane.routes(
        model(replica(1, ready=True), name="a", context=8192, aliases=("aa",)),
        model(name="b", state="refused", words="no node", refusal=("no node", "n1: too small"), context=None),
    )
    status, _, body = plane.fetch("GET", "/v1/models")
    first, second = json.loads(body)["data"]
    assert status == 200
    assert (first["id"], first["state"], first["context"], first["replicas_ready"]) == ("a", "ready", 8192, 1)
    assert (first["object"], first["owned_by"], first["created"]) == ("model", "llama.cpp", 1700000000)
    assert (second["state"], second["context"], second["words"]) == ("refused", None, "no node\nn1: too small")
    assert json.loads(plane.fetch("GET", "/v1/models/aa")[2])["id"] == "a"
    assert plane.fetch("HEAD", "/v1/models")[2] == b""
    assert plane.fetch("GET", "/v1/models/none")[0] == 404


def test_an_unknown_model_is_a_404_that_names_the_models_there_are(plane: Gateway):
    plane.routes(model(name="a"), model(name="b"))
    status, _, body = plane.chat("c")
    assert status == 404
    assert error(body) == {
        "message": "the model `c` does not exist; there are: `a`, `b`",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, "invalid_json"),
        ("POST", "/v1/chat/completions", b"", 400, "invalid_json"),
        ("POST", "/v1/chat/completions", b"{}", 400, "missing_model"),
        ("POST", "/v1/chat/completions", b'{"model": 1}', 400, "invalid_type"),
        ("GET", "/v1/chat/completions", None, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", None, 405, "method_not_allowed"),
        ("POST", "/healthz", b"{}", 405, "method_not_allowed"),
        ("POST", "/v1/nonsense", b"{}", 404, "unknown_path"),
        ("GET", "/v1", None, 404, "unknown_path"),
        ("GET", "/v1/../api/v1/status", None, 404, "unknown_path"),
    ],
)
def test_errors_have_openais_shape(plane: Gateway, method, path, body, status, code):
    got, headers, answer = plane.fetch(method, path, body)
    assert (got, error(answer)["code"]) == (status, code)
    assert set(error(answer)) == {"message", "type", "param", "code"}
    assert headers["x-request-id"]
    assert ("allow" in headers) == (status == 405)


REFUSAL = (
    "no node can run `m`: 2 nodes were asked",
    "node-a: libgomp.so.1 cannot be installed: E: Unable to locate package libgomp1",
    'node-b: needs 4.1 GB, has 2.0 GB “free” at <tag> & "quote"',
)


@pytest.mark.parametrize("words", ["\n".join(REFUSAL), REFUSAL[0], ""])
def test_a_refusal_reaches_the_client_letter_for_letter(plane: Gateway, words):
    plane.routes(model(state="refused", words=words, refusal=REFUSAL))
    status, headers, body = plane.chat()
    assert status == 503
    assert error(body)["message"] == "\n".join(REFUSAL)
    assert error(body)["code"] == "model_not_ready"
    assert json.loads(body)["state"] == "refused"
    assert json.loads(body)["refusal"] == list(REFUSAL)
    assert int(headers["retry-after"]) > 0


def test_a_failed_model_is_a_503_with_its_words(plane: Gateway):
    plane.routes(model(replica(1, ready=False), state="failed", words="replica m#0 ends at start: exit code 1"))
    status, _, body = plane.chat()
    assert (status, error(body)["message"]) == (503, "replica m#0 ends at start: exit code 1")


def test_an_engines_own_error_passes(plane: Gateway):
    engine = plane.engine("--answer-status", "400")
    plane.routes(model(replica(engine)))
    status, headers, body = plane.chat()
    assert (status, error(body)["message"]) == (400, "failing as told")
    assert headers["x-llmgw-replica"] == "m#0"


def test_an_engine_that_refuses_our_key_is_our_error_not_the_clients(plane: Gateway):
    engine = plane.engine(key="right")
    engine.key = "wrong"
    plane.routes(model(replica(engine, "m#0", "node-a")))
    status, _, body = plane.chat()
    assert status == 502
    assert "`m#0` on node `node-a`" in error(body)["message"]
    assert "wrong" not in body.decode()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"",
    ],
)
def test_a_strange_or_broken_answer_is_a_502_and_not_passed_on(plane: Gateway, answer):
    upstream = plane.scripted(lambda connection, _request: connection.sendall(answer))
    plane.routes(model(replica(upstream)))
    status, headers, body = plane.chat()
    assert (status, error(body)["code"]) == (502, "upstream_failed")
    assert "location" not in headers
    assert len(upstream.requests) == 1


def test_bytes_after_an_answer_are_not_taken_for_the_next_one(plane: Gateway):
    good = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    poison = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"
    plane.routes(model(replica(plane.scripted(lambda connection, _request: connection.sendall(good + poison)))))
    assert [plane.chat()[2] for _ in range(3)] == [b"{}"] * 3


def test_header_values_of_nodes_cannot_break_the_answers_head(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(engine, "m#0\r\nEvil: 1", "n\x00\x1b[31m\u202e" + "x" * 500)))
    status, headers, _ = plane.chat()
    assert status == 200
    assert "evil" not in headers
    assert headers["x-llmgw-replica"] == "m#0??Evil:?1"
    assert len(headers["x-llmgw-node"]) <= 128


def key(name: str, text: str, *models: str) -> RouteKey:
    return RouteKey(name, hashlib.sha256(text.encode()).hexdigest(), models)


def test_keys_decide_who_may_ask_and_for_what(plane: Gateway):
    engine = plane.engine()
    models = model(replica(engine, "m#0"), name="m"), model(replica(engine, "n#0"), name="n")
    plane.routes(*models, keys=(key("all", "k-all"), key("one", "k-one", "n")), required=True)

    def code(headers: dict[str, str], name: str = "m") -> tuple[int, str | None]:
        status, _, body = plane.fetch("POST", "/v1/chat/completions", ask(name), headers)
        return status, error(body)["code"] if status != 200 else None

    assert code({}) == (401, "missing_api_key")
    assert code({"Authorization": "Bearer nope"}) == (401, "invalid_api_key")
    assert code({"Authorization": "Basic k-all"}) == (401, "missing_api_key")
    assert code({"Authorization": "Bearer k-all"}) == (200, None)
    assert code({"Authorization": "bearer k-one"}, "n") == (200, None)
    assert code({"x-api-key": "k-all"}) == (200, None)
    assert code({"Authorization": "Bearer k-one"}) == (403, "model_not_allowed")
    assert plane.fetch("GET", "/v1/models")[0] == 401
    seen = plane.fetch("GET", "/v1/models", headers={"Authorization": "Bearer k-one"})[2]
    assert [each["id"] for each in json.loads(seen)["data"]] == ["n"]
    assert plane.fetch("GET", "/v1/models/m", headers={"Authorization": "Bearer k-one"})[0] == 404
    assert plane.fetch("GET", "/healthz")[0] == 200
    assert "k-all" not in plane.log()


def test_without_required_keys_a_known_key_keeps_its_limits_and_a_wrong_one_is_refused(plane: Gateway):
    plane.routes(model(replica(plane.engine())), keys=(key("one", "k-one", "n"),))
    assert plane.chat()[0] == 200
    assert plane.fetch("POST", "/v1/chat/completions", ask(), {"Authorization": "Bearer k-one"})[0] == 403
    assert plane.fetch("POST", "/v1/chat/completions", ask(), {"Authorization": "Bearer other"})[0] == 401


def test_where_there_are_no_keys_a_clients_key_is_ignored(plane: Gateway):
    plane.routes(model(replica(plane.engine())))
    assert plane.fetch("POST", "/v1/chat/completions", ask(), {"Authorization": "Bearer dummy"})[0] == 200


def test_connections_to_engines_are_used_again(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(engine)))
    assert {plane.chat()[0] for _ in range(5)} == {200}
    connections = psutil.Process(plane.process.pid).net_connections("tcp")
    assert [c.raddr.port for c in connections if c.raddr].count(engine.port) == 1


def test_pipelined_requests_are_answered_in_order(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(engine)))
    with plane.connect() as sock:
        first = post("/v1/chat/completions", ask(max_tokens=1, stream=True))
        second = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        third = post("/v1/completions", {"model": "none"}, "Connection: close")
        sock.sendall(first + second + third)
        got = read_all(sock)
    assert got.count(b"HTTP/1.1 ") == 3
    assert got.index(b"[DONE]") < got.index(b'"object":"list"') < got.index(b"model_not_found")


def test_an_http_1_0_client_gets_an_unchunked_stream_and_a_close(plane: Gateway):
    plane.routes(model(replica(plane.engine())))
    data = json.dumps(ask(stream=True, max_tokens=2)).encode()
    with plane.connect() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_health_readiness_and_metrics(plane: Gateway):
    engine = plane.engine()
    plane.routes(model(replica(engine), name="metric-model"))
    assert plane.chat("metric-model")[0] == 200
    assert json.loads(plane.fetch("GET", "/healthz")[2]) == {"status": "ok"}
    assert plane.ready()["ready"] is True
    assert plane.ready()["control"] == "connected"
    assert plane.metric('llmgw_requests_total{model="metric-model",code="200"}') == 1
    assert plane.metric('llmgw_in_flight{model="metric-model"}') == 0


def test_the_control_process_is_told_what_is_in_flight_each_second(plane: Gateway):
    engine = plane.engine("--token-interval", "0.05", "--tokens", "1000")
    plane.routes(model(replica(engine)))
    with plane.open_chat(stream=True):
        told = wait_for(lambda: [s for s in plane.control.stats if s["in_flight"] == {"m": 1}], "stats")
    assert told[0]["type"] == "stats"
    assert told[0]["requests"] > 0
    wait_for(lambda: plane.control.stats[-1]["in_flight"] == {}, "stats without it")


def test_an_unframed_stream_without_its_end_is_an_error_event(plane: Gateway):
    def act(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: one\n\n")

    plane.routes(model(replica(plane.scripted(act))))
    with plane.open_chat(stream=True) as sock:
        _, _, raw = read_all(sock).partition(b"\r\n\r\n")
    body, ended = dechunk(raw)
    assert ended
    assert body.startswith(b'data: one\n\ndata: {"error":')
    assert b"[DONE]" not in body
