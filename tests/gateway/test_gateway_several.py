"""Requests for several choices or of several prompts: all tokens count; where an engine tells a part, that is said."""

from __future__ import annotations

import json
import random
import socket
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from gateway_fakes import Gateway, ask, dechunk, model, post, read_until, replica, wait_for

from llmgw.domain.routing import RouteKey
from llmgw.gateway.bodies import Asked, read_asked
from llmgw.gateway.usage import ManyTokens, passed_on

TIMINGS = '"timings":{"cache_n":0,"prompt_n":21,"predicted_n":%d}'


def event(words: str, index: int, rest: str = "") -> bytes:
    choice = {"index": index, "delta": {"content": words}, "finish_reason": None}
    return b'data: {"choices":[%b]%b}\n\n' % (json.dumps(choice).encode(), rest.encode())


def usage(prompt: int, completion: int, timings: bool = True) -> str:
    said = f'"usage":{{"completion_tokens":{completion},"prompt_tokens":{prompt},"total_tokens":{prompt + completion}}}'
    return f",{said},{TIMINGS % completion}" if timings else f",{said}"


def last(prompt: int, completion: int, timings: bool = True) -> bytes:
    return b'data: {"choices":[]%b}\n\n' % usage(prompt, completion, timings).encode()


# as llama-server sends them: a usage event as each choice ends (chat), or usage in the last event of each (completions)
CHAT = event("a", 0) + event("b", 1) + event("c", 0) + last(21, 2) + event("d", 1) + event("e", 1) + last(21, 3)
PROMPTS = event("a", 1) + event("b", 0) + event("", 1, usage(12, 6)) + event("c", 0) + event("", 0, usage(3, 4))
# as vLLM does: all together at the end, with or without a count so far in each event
TOGETHER = event("a", 0) + event("b", 1) + last(21, 9, timings=False)
AS_IT_GOES = event("a", 0, usage(21, 1, False)) + event("b", 1, usage(21, 2, False)) + last(21, 9, timings=False)
NO_LAST = event("a", 0, usage(21, 1, False)) + event("b", 1, usage(21, 2, False))


@pytest.mark.parametrize(
    ("choices", "stream", "expected"),
    [
        (2, CHAT, (21, 5)),
        (1, PROMPTS, (15, 10)),
        (2, TOGETHER, (21, 9)),
        (3, AS_IT_GOES, (21, 9)),
        (3, NO_LAST, (21, 2)),
        (2, event("a", 0), (None, None)),
        (2, b'data: {"choices":[],"usage":{"completion_tokens":4}}\n\n', (None, 4)),
    ],
)
def test_the_tokens_of_all_choices_count_wherever_a_stream_is_cut(
    choices: int, stream: bytes, expected: tuple[int | None, int | None]
) -> None:
    chance = random.Random(5)
    for _ in range(50):
        tokens, rest = ManyTokens(choices, stream=True), stream
        while rest:
            size = chance.randrange(1, 200)
            tokens.read(rest[:size])
            rest = rest[size:]
        assert (tokens.prompt, tokens.completion, tokens.of) == (*expected, 1)


def test_one_that_breaks_off_after_its_first_choice_has_what_was_passed_on() -> None:
    tokens = ManyTokens(2, stream=True)
    tokens.read(CHAT[: CHAT.find(event("d", 1))])
    assert tokens.completion == 2
    assert passed_on("/v1/chat/completions", 9, tokens) == 8


@pytest.mark.parametrize(
    ("body", "several"),
    [
        ({"n": 3}, 3),
        ({"n": 1}, 0),
        ({"n": None}, 0),
        ({"n": "3"}, 0),
        ({"n": -3}, 0),
        ({"n": 10**30}, 0),
        ({"prompt": "one, [two, three]"}, 0),
        ({"prompt": ["one"]}, 0),
        ({"prompt": ["one", "two"]}, 1),
        ({"prompt": ['o"n]e\\', "two"], "n": 2}, 2),
        ({"prompt": [1, 2, 3]}, 0),
        ({"prompt": [[1, 2, 3]]}, 0),
        ({"prompt": [[1, 2], [3]]}, 1),
        ({"prompt": {}}, 0),
    ],
)
def test_what_has_several_answers_is_known_by_its_request(body: dict[str, Any], several: int) -> None:
    for indent in (None, 1):
        assert read_asked(json.dumps({"model": "m", **body}, indent=indent).encode()).several() == several


@pytest.mark.parametrize("piece", [b"a", b"\\n", b'\\"'])
def test_a_huge_prompt_costs_no_memory_to_look_at(piece: bytes) -> None:
    asked = Asked(prompt=msgspec.Raw(b'["' + piece * 1_000_000 + b'"]'))
    tracemalloc.start()
    try:
        assert asked.several() == 0
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("asked", [True, False], ids=["usage asked for", "not"])
def test_a_stream_of_several_choices_is_counted_whole_and_arrives_as_it_was(plane: Gateway, asked: bool) -> None:
    pieces = [piece + b"\n\n" for piece in CHAT.split(b"\n\n")[:-1]]

    def act(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (*pieces, b"data: [DONE]\n\n"):
            time.sleep(0.005)  # mostly in reads of their own; in which does not matter
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")

    name = f"several-{asked}"
    plane.routes(model(replica(plane.scripted(act)), name=name))
    with plane.open_chat(name, stream=True, n=2, stream_options={"include_usage": asked}) as sock:
        body, whole = dechunk(read_until(sock, b"\r\n0\r\n\r\n").partition(b"\r\n\r\n")[2])
    assert whole
    assert body == b"".join(p for p in pieces if asked or b'"usage"' not in p) + b"data: [DONE]\n\n"
    wait_for(lambda: plane.control.usage("completion", model=name) == 5, "the usage to be told")
    assert plane.control.usage("prompt", model=name) == 21
    assert plane.control.usage("unknown_requests", model=name) == 0


def test_where_an_engine_tells_one_choice_of_several_the_rest_is_unknown_and_the_key_pays_for_all(
    start: Callable[..., Gateway],
) -> None:
    made = start()
    choices = [{"index": i, "message": {"content": "x"}, "finish_reason": "length"} for i in range(3)]
    said = b'{"choices":%b%b}' % (json.dumps(choices).encode(), usage(20, 100).encode())

    def act(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said)
        )

    digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of `secret`
    made.routes(model(replica(made.scripted(act))), keys=(RouteKey("ann", digest, (), tpm=300),), required=True)
    with made.connect() as sock:
        sock.sendall(post("/v1/chat/completions", ask(n=3), "Authorization: Bearer secret"))
        assert b" 200 " in read_until(sock, said[-20:])
        # 320 tokens of 300 a minute, of which the engine has told 120
        sock.sendall(post("/v1/chat/completions", ask(), "Authorization: Bearer secret"))
        assert b" 429 " in read_until(sock, b"}")
    wait_for(lambda: made.control.usage("requests") == 1, "the usage to be told")
    assert made.control.usage("completion") == 100
    assert made.control.usage("unknown_requests") == 1
