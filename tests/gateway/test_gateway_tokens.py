"""Tokens as engines say them, wherever their words are cut; and connections of engines that close after a stream."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from gateway_fakes import PATHS, Gateway, ask, dechunk, model, post, read_all, read_request, replica, wait_for

from llmgw.gateway.usage import Tokens, passed_on

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = (
    b'"usage":{"completion_tokens":7,"prompt_tokens":38,"total_tokens":45,"prompt_tokens_details":{"cached_tokens":37}}'
)


def read(*pieces: bytes) -> tuple[int | None, int | None]:
    tokens = Tokens()
    for piece in pieces:
        tokens.read(piece)
    return tokens.prompt, tokens.completion


def test_a_cached_prompt_counts_whole_in_every_dialect() -> None:
    assert read(b"{" + USAGE + b"}") == (38, 7)
    anthropic = b'{"usage":{"cache_read_input_tokens":37,"input_tokens":1,"output_tokens":7}}'
    assert read(anthropic) == (38, 7)
    cached = b'"cache_read_input_tokens":30,"cache_creation_input_tokens":7'
    start = b'{"message":{"usage":{%b,"input_tokens":1,"output_tokens":0}}}' % cached
    assert read(start, b'{"usage":{"output_tokens":7}}') == (38, 7)
    responses = b'{"usage":{"input_tokens":38,"output_tokens":7,"input_tokens_details":{"cached_tokens":37}}}'
    assert read(responses) == (38, 7)
    assert read(b'{"timings":{"cache_n":37,"prompt_n":1,"predicted_n":7}}') == (38, 7)


def test_words_of_a_model_are_no_usage() -> None:
    assert read(json.dumps({"content": '"usage":{"prompt_tokens":1,"completion_tokens":1}'}).encode()) == (None, None)


def test_an_answer_broken_off_has_the_events_that_carry_a_token() -> None:
    assert passed_on("/v1/chat/completions", 4, None) == 3
    assert passed_on("/v1/completions", 4, None) == 4
    assert passed_on("/v1/messages", 4, Tokens()) == 2
    assert passed_on("/v1/responses", 3, None) == 0
    said = Tokens()
    said.read(USAGE.join((b"{", b"}")))
    assert passed_on("/v1/chat/completions", 12, said) == 7


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(words: bytes) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % words


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("cut", [12, 30, 60, 100, 150])
def test_usage_is_read_and_stripped_wherever_it_is_cut_in_two(
    plane: Gateway, asked: bool, framed: bool, cut: int
) -> None:
    last = b'data: {"choices":[],' + USAGE + b"}\n\n"

    def act(connection: socket.socket, request: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wrap = chunk if framed else bytes
        head = HEAD if framed else HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
        for piece in (head, wrap(event(b"one")), wrap(event(b"two")), wrap(last)[:cut]):
            connection.sendall(piece)
            taken.wait(0.02)
        connection.sendall(wrap(last)[cut:] + wrap(b"data: [DONE]\n\n") + (b"0\r\n\r\n" if framed else b""))

    taken = threading.Event()  # never set: the pieces come in reads of their own
    plane.routes(model(replica(plane.scripted(act)), name="cut"))
    before = (plane.metric('llmgw_tokens_total{model="cut",kind="prompt"}'), told(plane, "completion"))
    more = {"stream_options": {"include_usage": True}} if asked else {}
    body = plane.chat("cut", stream=True, **more)[2]
    assert body == event(b"one") + event(b"two") + (last if asked else b"") + b"data: [DONE]\n\n"
    wait_for(lambda: told(plane, "completion") == before[1] + 7, "seven tokens in the metrics")
    assert plane.metric('llmgw_tokens_total{model="cut",kind="prompt"}') == before[0] + 38


def told(plane: Gateway, kind: str) -> float:
    return plane.metric(f'llmgw_tokens_total{{model="cut",kind="{kind}"}}')


def test_an_engine_that_closes_after_each_stream_costs_nobody_an_answer(plane: Gateway) -> None:
    """llama-server announces keep-alive and closes all the same: whoever waits must not be sent into the closing."""

    def act(connection: socket.socket, request: bytes) -> None:
        connection.sendall(HEAD + chunk(event(b"one")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    upstream = plane.scripted(act)
    plane.routes(model(replica(upstream, slots=1)))
    request = post("/v1/chat/completions", ask(stream=True), "Connection: close")
    for _ in range(10):
        waiting = [plane.connect() for _ in range(8)]
        for sock in waiting:
            sock.sendall(request)
        for sock in waiting:
            with sock:
                head, _, body = read_all(sock).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 "), head
                assert dechunk(body) == (event(b"one") + b"data: [DONE]\n\n", True)
    assert len(upstream.requests) == 80


def test_connections_that_outlive_a_stream_are_used_again(plane: Gateway) -> None:
    def act(connection: socket.socket, request: bytes) -> None:
        while request:
            connection.sendall(HEAD + chunk(event(b"one")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            request = read_request(connection)

    upstream = plane.scripted(act)
    plane.routes(model(replica(upstream), endpoints=PATHS))

    def again() -> bool:
        """Whether ten answers needed no new connection."""
        before = len(upstream.requests)
        for _ in range(10):
            assert plane.chat(stream=True)[0] == 200
        return len(upstream.requests) == before

    assert not again()
    wait_for(again, "the address to be known as steady")
