"""Tool calls of a real engine, whole and in streams, as the public clients put them together.

The model is random: a grammar made from the tools holds it to a call, and a bias lets it begin with one at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from gateway_fakes import Gateway, fetch, gateway, model, replica
from real_engines import Llama

from llmgw.providers.llamacpp import LlamaCpp

TEMPLATE = Path(__file__).resolve().parent / "tools_template.jinja"
ASKED: Any = [{"role": "user", "content": "what will it be like"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"town": {"type": "string", "enum": ["rain", "hill"]}},
    "required": ["town"],
    "additionalProperties": False,
}
OPENAI_TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": SCHEMA}}
]
ANTHROPIC_TOOLS: Any = [{"name": "weather", "description": "of a town", "input_schema": SCHEMA}]
ONE_BY_OPENAI: Any = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
SOME_BY_ANTHROPIC: Any = {"tool_choice": {"type": "any"}, "max_tokens": 1000}  # one or more
ARGUMENTS = ({"town": "rain"}, {"town": "hill"})


@pytest.fixture(scope="module")
def made(
    front: tuple[Gateway, Llama],
    llama: Callable[..., Llama],
    tiny_gguf: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gateway]:
    pieces = json.loads(fetch(front[1].port, "POST", "/tokenize", {"content": "{"})[2])["tokens"]
    flags = ("--chat-template-file", str(TEMPLATE), "--logit-bias", f"{pieces[-1]}+100", "-np", "1")
    engine = llama(tiny_gguf, *flags)
    with gateway(tmp_path_factory.mktemp("tools")) as made:
        made.routes(model(replica(engine.port), name="tools", endpoints=LlamaCpp.capabilities.endpoints))
        yield made


@pytest.fixture
def by_openai(made: Gateway) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{made.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def by_anthropic(made: Gateway) -> Iterator[anthropic.Anthropic]:
    url = f"http://127.0.0.1:{made.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_openai_gets_a_call_and_gives_its_result_back(by_openai: openai.OpenAI) -> None:
    answer = by_openai.chat.completions.create(model="tools", messages=ASKED, tools=OPENAI_TOOLS, **ONE_BY_OPENAI)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) in ARGUMENTS
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
    messages = [*ASKED, answer.choices[0].message.model_dump(exclude_none=True), result]
    more = by_openai.chat.completions.create(model="tools", messages=messages, tools=OPENAI_TOOLS, **ONE_BY_OPENAI)
    assert more.usage is not None
    assert answer.usage is not None
    assert more.usage.prompt_tokens > answer.usage.prompt_tokens


def test_openai_puts_a_streamed_call_together(by_openai: openai.OpenAI) -> None:
    with by_openai.chat.completions.stream(
        model="tools", messages=ASKED, tools=OPENAI_TOOLS, **ONE_BY_OPENAI
    ) as stream:
        parts = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        [call] = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert len(parts) > 3
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) in ARGUMENTS


def test_anthropic_gets_a_call_and_gives_its_result_back(by_anthropic: anthropic.Anthropic) -> None:
    answer = by_anthropic.messages.create(model="tools", messages=ASKED, tools=ANTHROPIC_TOOLS, **SOME_BY_ANTHROPIC)
    assert answer.stop_reason == "tool_use"
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls
    assert all(call.name == "weather" and call.input in ARGUMENTS for call in calls)
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "wet"} for call in calls]
    said: Any = [call.model_dump() for call in calls]
    given: Any = [{"role": "assistant", "content": said}, {"role": "user", "content": results}]
    more = by_anthropic.messages.create(
        model="tools", messages=[*ASKED, *given], tools=ANTHROPIC_TOOLS, **SOME_BY_ANTHROPIC
    )
    assert more.stop_reason == "tool_use"
    assert read(more.usage) > read(answer.usage)


def read(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_anthropic_puts_a_streamed_call_together(by_anthropic: anthropic.Anthropic) -> None:
    with by_anthropic.messages.stream(
        model="tools", messages=ASKED, tools=ANTHROPIC_TOOLS, **SOME_BY_ANTHROPIC
    ) as stream:
        parts = [event for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(parts) > 3
    calls = [block for block in final.content if block.type == "tool_use"]
    assert calls
    assert all(call.input in ARGUMENTS for call in calls)
