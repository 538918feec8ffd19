"""Anthropic's API and OpenAI's newer one: errors in their shapes, request ids under their names."""

from __future__ import annotations

import hashlib
import json
import socket
from typing import Any

import anthropic
import openai
import pytest
from gateway_fakes import Gateway, ask, dechunk, fetch, model, post, read_all, replica

from llmgw.domain.routing import RouteKey
from llmgw.gateway.dialects import anthropic_error

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
JSON = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
BROKEN = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'23\r\nevent: ping\ndata: {"type":"ping"}\n\n\r\n'
)


def answering(made: Gateway, status: int, body: bytes, name: str = "m") -> None:
    def act(sock: socket.socket, _: bytes) -> None:
        sock.sendall(JSON % (status, len(body), body))

    made.routes(model(replica(made.scripted(act)), name=name, endpoints=PATHS))


def test_an_error_of_the_gateway_has_anthropics_shape_on_its_paths(plane: Gateway) -> None:
    answering(plane, 200, b"{}")
    for path in ("/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"):
        status, headers, body = plane.fetch("POST", path, ask("none", max_tokens=1))
        said = json.loads(body)
        assert status == 404
        assert (said["type"], said["error"]["type"]) == ("error", "not_found_error")
        assert said["error"]["details"] == {"error_code": "model_not_found"}
        assert "`m`" in said["error"]["message"]
        assert said["request_id"] == headers["request-id"] == headers["x-request-id"]
    status, headers, body = plane.chat("none")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert "request-id" not in headers


def test_the_anthropic_client_sees_type_code_words_and_request_id(plane: Gateway) -> None:
    refused = model(name="r", state="refused", refusal=("node-a: out of memory",), endpoints=PATHS)
    plane.routes(refused)
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{plane.port}", api_key="any") as client:
        with pytest.raises(anthropic.APIStatusError, match="out of memory") as error:
            client.messages.create(model="r", messages=[{"role": "user", "content": "x"}], max_tokens=1)
        listed = client.models.list()
    assert (error.value.type, error.value.status_code) == ("overloaded_error", 503)
    assert error.value.request_id
    assert [(each.id, each.display_name, each.type) for each in listed] == [("r", "r", "model")]
    assert listed.data[0].created_at.year == 2023


def test_who_would_have_to_wait_for_long_is_told_so_at_once(plane: Gateway) -> None:
    key = RouteKey("ann", hashlib.sha256(b"secret").hexdigest(), tpm=10)
    plane.routes(model(replica(plane.engine())), keys=(key,), required=True)
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    assert plane.fetch("POST", "/v1/chat/completions", ask(max_tokens=50), headers)[0] == 200
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{plane.port}/v1", api_key="secret", timeout=20) as client,
        pytest.raises(openai.RateLimitError, match="10 tokens a minute") as over,
    ):
        client.chat.completions.create(model="m", messages=[])
    assert float(over.value.response.headers["retry-after"]) > 120
    assert over.value.response.headers["x-should-retry"] == "false"


def test_an_answer_and_an_engines_error_carry_the_request_id_and_the_right_shape(plane: Gateway) -> None:
    answering(plane, 200, b'{"type":"message"}')
    status, headers, body = plane.fetch("POST", "/v1/messages", ask(max_tokens=1))
    assert (status, body) == (200, b'{"type":"message"}')
    assert headers["request-id"] == headers["x-request-id"]
    answering(plane, 400, b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error","n_ctx":9}}')
    status, headers, body = plane.fetch("POST", "/v1/messages", ask(max_tokens=1))
    said = json.loads(body)
    assert (status, said["type"], said["request_id"]) == (400, "error", headers["request-id"])
    assert said["error"] == {
        "code": 400,
        "message": "too long",
        "type": "invalid_request_error",
        "n_ctx": 9,
        "details": {"error_code": "exceed_context_size_error"},
    }
    status, _, body = plane.chat()
    assert (status, json.loads(body)["error"]["type"]) == (400, "exceed_context_size_error")


@pytest.mark.parametrize(
    "body", [b"", b"oops", b"[]", b'{"error":7}', b'{"type":"error","error":{"type":"x"}}', b"[" * 100_000]
)
def test_what_is_no_error_object_of_openais_stays_as_it_is(body: bytes) -> None:
    assert anthropic_error(500, body, b"id") == body


@pytest.mark.parametrize(("status", "kind"), [(401, "authentication_error"), (502, "api_error"), (418, None)])
def test_the_status_decides_on_anthropics_type(status: int, kind: str | None) -> None:
    said = json.loads(anthropic_error(status, b'{"error":"words"}', b"id"))
    assert said["error"]["type"] == (kind or "invalid_request_error")
    assert said["error"]["message"] == "words"


def test_a_stream_that_breaks_off_ends_with_the_error_event_of_its_api(plane: Gateway) -> None:
    plane.routes(model(replica(plane.scripted(lambda sock, _: sock.sendall(BROKEN))), endpoints=PATHS))

    def last_event(path: str) -> tuple[bytes, Any]:
        with plane.connect() as sock:
            sock.sendall(post(path, ask(stream=True)))
            text = dechunk(read_all(sock).partition(b"\r\n\r\n")[2])[0]
        name, _, data = text.split(b"\n\n")[-2].rpartition(b"data: ")
        return name.strip(), json.loads(data)

    name, said = last_event("/v1/messages")
    assert (name, said["type"], said["error"]["type"]) == (b"event: error", "error", "api_error")
    name, said = last_event("/v1/responses")
    assert (name, said["type"], said["code"]) == (b"event: error", "error", "upstream_failed")
    assert said["message"] == said["error"]["message"]
    name, said = last_event("/v1/chat/completions")
    assert (name, said["error"]["code"]) == (b"", "upstream_failed")
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{plane.port}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.APIError, match="broke off"),
    ):
        list(client.responses.create(model="m", input="x", stream=True))


def test_no_proxy_is_to_keep_or_hold_back_a_stream(plane: Gateway) -> None:
    plane.routes(model(replica(plane.engine())))
    headers = plane.chat(stream=True, max_tokens=1)[1]
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "cache-control" not in plane.chat(max_tokens=1)[1]


def test_the_way_to_the_models_is_the_same_for_both(plane: Gateway) -> None:
    plane.routes(model(replica(1)), model(name="org/m:latest"))
    listed = json.loads(fetch(plane.port, "GET", "/v1/models?limit=1000")[2])
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == ("m", "org/m:latest")
    for path in ("/v1/models/org/m:latest", "/v1/models/org%2Fm%3Alatest"):
        assert json.loads(fetch(plane.port, "GET", path)[2])["id"] == "org/m:latest"
