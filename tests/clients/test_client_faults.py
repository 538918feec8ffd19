"""Limits and dying engines, as the public clients meet them."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from attrs import frozen
from gateway_fakes import Gateway, gateway, model, post, read_until, replica, wait_for
from real_engines import Llama, end, start_llama

from llmgw.domain.routing import RouteKey
from llmgw.providers.llamacpp import LlamaCpp

ASKED: Any = [{"role": "user", "content": "say something"}]
KEY = "sk-llmgw-limited-0123456789abcdef"
PATHS = LlamaCpp.capabilities.endpoints


@frozen
class Bench:
    """A gateway and the engine of its model `slow`, which a test may kill."""

    made: Gateway
    engine: Llama
    process: subprocess.Popen[bytes]

    def openai(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.made.port}/v1", timeout=60, **more)

    def anthropic(self, **more: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=f"http://127.0.0.1:{self.made.port}", timeout=60, **more)


@pytest.fixture
def bench(real_engine_dir: Path, slow_gguf: Path, tmp_path: Path) -> Iterator[Bench]:
    process, engine = start_llama(real_engine_dir, slow_gguf, tmp_path / "log", "-c", "4096", "-np", "2", "--jinja")
    try:
        with gateway(tmp_path / "gateway") as made:
            made.routes(model(replica(engine.port), name="slow", endpoints=PATHS))
            yield Bench(made, engine, process)
    finally:
        end([process])


def test_a_stream_whose_engine_dies_is_an_error_to_both_clients(bench: Bench) -> None:
    text: list[str] = []
    with bench.openai(api_key="none") as one, bench.anthropic(api_key="none") as two:
        streamed = one.chat.completions.create(model="slow", messages=ASKED, max_tokens=3000, stream=True)
        other = two.messages.create(model="slow", messages=ASKED, max_tokens=3000, stream=True)
        with streamed, other:
            for chunk in streamed:
                text.append(chunk.choices[0].delta.content or "")
                if len(text) > 3:
                    break
            kinds = [event.type for event, _ in zip(other, range(4), strict=False)]
            bench.process.kill()
            with pytest.raises(openai.APIError, match="of the model `slow` broke off"):
                for _ in streamed:
                    pass
            with pytest.raises(anthropic.APIError, match="of the model `slow` broke off"):
                for _ in other:
                    pass
    assert "".join(text)
    assert kinds[0] == "message_start"


def test_an_answer_whose_engine_dies_before_a_word_is_a_502(bench: Bench) -> None:
    with bench.made.connect() as sock:
        sock.sendall(post("/v1/chat/completions", {"model": "slow", "messages": ASKED, "max_tokens": 3000}))
        wait_for(bench.engine.busy, "the engine to work")
        bench.process.kill()
        head = read_until(sock, b"}}")
    assert head.startswith(b"HTTP/1.1 502 ")
    with bench.openai(api_key="none", max_retries=0) as one, pytest.raises(openai.InternalServerError) as refused:
        one.chat.completions.create(model="slow", messages=ASKED)
    assert refused.value.status_code == 503
    with bench.anthropic(api_key="none", max_retries=0) as two, pytest.raises(anthropic.InternalServerError):
        two.messages.create(model="slow", messages=ASKED, max_tokens=5)


@pytest.fixture
def limited(front: Any, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway whose only key has one request a second, and has used up what it had saved."""
    key = RouteKey("limited", hashlib.sha256(KEY.encode()).hexdigest(), rpm=60)
    with gateway(tmp_path) as made:
        tiny = model(replica(front[1].port), name="tiny", endpoints=PATHS)
        made.routes(tiny, keys=(key,), required=True)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        body = {"model": "tiny", "messages": ASKED, "max_tokens": 1}
        while (answer := made.fetch("POST", "/v1/chat/completions", body, headers))[0] == 200:
            pass
        assert (answer[0], answer[1]["retry-after"]) == (429, "1")
        yield made


def had_to_wait(made: Gateway, ask: Callable[[], int]) -> bool:
    """Whether this request was sent more than once; on a busy machine a second may have passed before."""
    before = made.metric("llmgw_requests_total")
    assert ask() == 3
    return made.metric("llmgw_requests_total") >= before + 2


def test_openai_waits_as_it_is_told_when_it_is_over_its_limit(limited: Gateway) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{limited.port}/v1", api_key=KEY, max_retries=3) as client:

        def ask() -> int:
            said = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=3)
            return said.usage.completion_tokens if said.usage is not None else 0

        wait_for(lambda: had_to_wait(limited, ask), "a request that came too early and was sent again", 60)


def test_anthropic_waits_as_it_is_told_when_it_is_over_its_limit(limited: Gateway) -> None:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{limited.port}", api_key=KEY, max_retries=3) as client:

        def ask() -> int:
            return client.messages.create(model="tiny", messages=ASKED, max_tokens=3).usage.output_tokens

        wait_for(lambda: had_to_wait(limited, ask), "a request that came too early and was sent again", 60)
