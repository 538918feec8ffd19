"""The public `openai` client against a real llama-server behind the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "say something"}]


@pytest.fixture
def client(front: Any) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{front[0].port}/v1"
    with openai.OpenAI(base_url=url, api_key="sk-llmgw-clients-0123456789abcdef", max_retries=0, timeout=60) as made:
        yield made


def test_a_whole_answer_by_name_and_by_alias(client: openai.OpenAI) -> None:
    for name in ("tiny", "gpt-4o"):
        got = client.chat.completions.with_raw_response.create(model=name, messages=MESSAGES, max_tokens=6)
        answer = got.parse()
        assert answer.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6
        assert got.headers["x-llmgw-node"] == "node-a"
        assert got.headers["x-llmgw-why"] == "only"
        assert got.headers["x-request-id"]


def test_a_stream_has_usage_only_when_it_was_asked_for(client: openai.OpenAI) -> None:
    def chunks(**more: Any) -> list[Any]:
        with client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=5, stream=True, **more
        ) as stream:
            return list(stream)

    plain = chunks()
    assert [chunk for chunk in plain if not chunk.choices] == []
    assert plain[-1].choices[0].finish_reason == "length"
    asked = chunks(stream_options={"include_usage": True})
    assert asked[-1].choices == []
    assert asked[-1].usage.completion_tokens == 5
    refused = chunks(stream_options={"include_usage": False})
    assert all(chunk.choices for chunk in refused)


def test_responses_pass_through(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hello", max_output_tokens=5)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    events = list(client.responses.create(model="tiny", input="hello", max_output_tokens=5, stream=True))
    assert events[-1].type == "response.completed"


def test_models_show_state_and_context(client: openai.OpenAI) -> None:
    listed = {each.id: each for each in client.models.list()}
    assert set(listed) == {"tiny", "other"}
    assert client.models.retrieve("tiny").model_extra["context"] == 4096  # type: ignore[index]


def test_errors_are_the_clients_own(client: openai.OpenAI, front: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="none", messages=MESSAGES)
    with pytest.raises(openai.InternalServerError, match="no node has room"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError, match=r"llama\.cpp"):
        client.responses.create(model="other", input="x")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 5000}])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_timeout_is_the_clients_and_frees_the_slot(client: openai.OpenAI, front: Any, until: Any) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=100_000, extra_body={"ignore_eos": True}
        )
    until(lambda: front[1].busy() == 0, 20, "the slot to be free")
