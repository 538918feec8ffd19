"""The public `anthropic` client against a real llama-server behind the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

MESSAGES: Any = [{"role": "user", "content": "say something"}]


@pytest.fixture
def client(front: Any) -> Iterator[anthropic.Anthropic]:
    url = f"http://127.0.0.1:{front[0].port}"
    key = "sk-llmgw-clients-0123456789abcdef"
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=60) as made:
        yield made


def test_a_whole_answer(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="tiny", messages=MESSAGES, max_tokens=6)
    assert answer.usage.output_tokens == 6
    assert answer.stop_reason == "max_tokens"


def test_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="tiny", messages=MESSAGES, max_tokens=6) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text
    assert final.usage.output_tokens == 6


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens > 0


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="none", messages=MESSAGES, max_tokens=1)
    with pytest.raises(anthropic.NotFoundError, match=r"llama\.cpp"):
        client.messages.create(model="other", messages=MESSAGES, max_tokens=1)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model="tiny", messages=MESSAGES, max_tokens=1)


def test_a_timeout_frees_the_slot(client: anthropic.Anthropic, front: Any, until: Any) -> None:
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.2).messages.create(model="tiny", messages=MESSAGES, max_tokens=100_000)
    until(lambda: front[1].busy() == 0, 20, "the slot to be free")
