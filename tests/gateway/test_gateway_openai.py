"""The public `openai` client works against the gateway as it is."""

from __future__ import annotations

import openai
import pytest
from gateway_fakes import Gateway, model, replica


@pytest.fixture
def client(plane: Gateway):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{plane.port}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_chat_stream_models_and_embeddings(plane: Gateway, client: openai.OpenAI):
    plane.routes(model(replica(plane.engine())))
    messages = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model="m", messages=messages, max_tokens=3)
    assert whole.choices[0].message.content == "t0 t1 t2 "
    with client.chat.completions.create(model="m", messages=messages, max_tokens=3, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "t0 t1 t2 "
    assert client.completions.create(model="m", prompt="p", max_tokens=1).choices[0].text == "t0 "
    assert [each.id for each in client.models.list()] == ["m"]
    assert client.models.retrieve("m").owned_by == "llama.cpp"
    assert len(client.embeddings.create(model="m", input=["a", "b"], encoding_format="float").data) == 2


def test_errors_become_the_clients_own_exceptions(plane: Gateway, client: openai.OpenAI):
    refusal = ("no node can run `r`", "node-a: out of memory")
    plane.routes(model(replica(plane.engine())), model(name="r", state="refused", words="", refusal=refusal))
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="none", messages=messages)
    assert missing.value.code == "model_not_found"
    assert "`m`" in missing.value.message
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model="r", messages=messages)
    assert refused.value.status_code == 503
    assert "node-a: out of memory" in refused.value.message


def test_a_refused_model_is_told_at_once_and_one_that_is_coming_is_asked_for_again(plane: Gateway):
    plane.routes(
        model(name="refused", state="refused", words="no node has room"),
        model(name="failed", state="failed", words="ended; next try in 2s"),
    )
    messages = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{plane.port}/v1", api_key="any", max_retries=1) as client:
        before = plane.metric("llmgw_requests_total")
        with pytest.raises(openai.InternalServerError, match="no node has room") as refused:
            client.chat.completions.create(model="refused", messages=messages)
        assert plane.metric("llmgw_requests_total") == before + 1
        assert refused.value.response.headers["retry-after"] == "30"
        with pytest.raises(openai.InternalServerError, match="next try") as failed:
            client.with_options(max_retries=0).chat.completions.create(model="failed", messages=messages)
    assert failed.value.response.headers["retry-after"] == "5"
    assert "x-should-retry" not in failed.value.response.headers


def test_an_engine_that_dies_in_a_stream_is_an_exception_not_an_end(plane: Gateway, client: openai.OpenAI):
    plane.routes(model(replica(plane.engine("--crash-after-tokens", "2", "--token-interval", "0.02"))))
    texts = []

    def read() -> None:
        with client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=9, stream=True
        ) as stream:
            texts.extend(chunk.choices[0].delta.content for chunk in stream)

    with pytest.raises(openai.APIError, match="broke off"):
        read()
    assert [text for text in texts if text] == ["t0 ", "t1 "]
