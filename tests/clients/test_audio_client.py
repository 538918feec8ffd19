"""The `openai` client's audio calls against a real llama-server, through the gateway."""

from __future__ import annotations

import io
import json
import os

import openai
import pytest
from gateway_fakes import Gateway
from real_engines import Llama

KEY = "sk-llmgw-clients-0123456789abcdef"


def test_a_form_reaches_a_real_engine_and_its_own_words_come_back(front: tuple[Gateway, Llama]) -> None:
    made, _ = front
    with openai.OpenAI(base_url=f"http://127.0.0.1:{made.port}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="does not support audio input") as refused:
            client.audio.transcriptions.create(model="gpt-4o", file=("a.wav", io.BytesIO(os.urandom(200_000))))
        assert refused.value.status_code == 501
        assert refused.value.response.headers["x-llmgw-replica"] == "m#0"
        with pytest.raises(openai.NotFoundError, match="there is no POST /v1/audio/speech"):
            client.audio.speech.create(model="gpt-4o", voice="alloy", input="hello")
        answer = client.models.retrieve("gpt-4o")
    assert "/v1/audio/transcriptions" in json.loads(answer.model_dump_json())["endpoints"]
