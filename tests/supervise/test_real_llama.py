"""The supervisor with a real llama-server: ready and chatting, and its own words when a model is missing or cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from supervise_fakes import Bench, ask, spec, status_of, wait_for

from llmgw.agent.health import read_context
from llmgw.agent.supervisor import Supervisor, SupervisorSettings
from llmgw.agent.weights import Weights
from llmgw.domain.engines import InstalledEngine
from llmgw.domain.replicas import ReplicaState
from llmgw.providers.llamacpp import LlamaCpp


@pytest.fixture
def again(bench: Bench, real_engine_dir: Path) -> Callable[[], Supervisor]:
    """An agent starting, with llama-server for an engine."""
    installed = InstalledEngine("llama.cpp", "b1", "cpu", str(real_engine_dir), str(real_engine_dir / "llama-server"))

    def make() -> Supervisor:
        made = Supervisor(
            SupervisorSettings(bench.work_dir, "127.0.0.1", health_interval_s=0.2, stop_timeout_s=10.0),
            {"llama.cpp": LlamaCpp()},
            lambda name, version: installed,
            lambda name: "not asked",
            Weights((str(bench.root),), lambda *_: bench.root, bench.clock),
            bench.http,
            bench.clock,
        )
        made.start()
        bench.supervisors.append(made)
        return made

    return make


@pytest.fixture
def llama(again: Callable[[], Supervisor]) -> Supervisor:
    return again()


def test_a_real_engine_answers_its_key_is_adopted_and_stops(
    bench: Bench, llama: Supervisor, again: Callable[[], Supervisor], tiny_gguf: Path
) -> None:
    llama.set_desired([spec(bench, engine="llama.cpp", engine_version="b1", model=str(tiny_gguf), context=256)], 1)
    ready = wait_for(llama, ReplicaState.READY, timeout_s=30)
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    answer = ask(ready.port, "/v1/chat/completions", body, timeout_s=20)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["model"] == "m"
    llama.detach()
    second = again()
    adopted = status_of(second)
    assert (adopted.state, adopted.pid, adopted.words) == (ReplicaState.READY, ready.pid, ready.words)
    second.set_desired([], 1)
    assert wait_for(second, ReplicaState.STOPPED).words == "stopped (exited 0): no longer wanted here"
    assert bench.engine_pids() == []


def test_less_context_than_was_asked_for_is_told_also_after_adoption(
    bench: Bench, llama: Supervisor, again: Callable[[], Supervisor], tiny_gguf: Path
) -> None:
    llama.set_desired([spec(bench, engine="llama.cpp", engine_version="b1", model=str(tiny_gguf), context=8192)], 1)
    ready = wait_for(llama, ReplicaState.READY, timeout_s=30)
    assert ready.context == 2048
    assert "; a request gets 2048 tokens of context, not the 8192 of the profile: " in ready.words
    llama.detach()
    adopted = wait_for(again(), ReplicaState.READY, timeout_s=30)
    assert (adopted.pid, adopted.context, adopted.words) == (ready.pid, 2048, ready.words)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"a":[{"b":2048}]}', 2048),
        (b'{"a":[{"b":0}]}', None),
        (b'{"a":[{"b":true}]}', None),
        (b'{"a":[{"b":"2048"}]}', None),
        (b'{"a":[]}', None),
        (b'{"a":{"0":7}}', None),
        (b'{"a":3}', None),
        (b"[" * 100_000, None),
        (b"\xff", None),
    ],
)
def test_context_is_read_where_an_engine_tells_it(body: bytes, found: int | None) -> None:
    assert read_context(body, "/a/0/b") == found
    assert read_context(body, "") is None


def test_a_missing_model_is_told_in_the_engines_own_words(bench: Bench, llama: Supervisor) -> None:
    missing = bench.root / "no-such-model.gguf"
    llama.set_desired([spec(bench, engine="llama.cpp", model=str(missing))], 1)
    failed = wait_for(llama, ReplicaState.FAILED, timeout_s=30)
    assert failed.words.startswith("exited 1: gguf_init_from_file: failed to open GGUF file")
    assert f"'{missing}' (No such file or directory)" in failed.words
    assert "next try in" in failed.words
    assert failed.exit_words == "exited 1"
    assert any("exiting due to model loading error" in line for line in failed.last_log)


def test_a_cut_model_is_told_in_the_engines_own_words(bench: Bench, llama: Supervisor, tiny_gguf: Path) -> None:
    cut = bench.root / "cut.gguf"
    data = tiny_gguf.read_bytes()
    cut.write_bytes(data[: len(data) * 2 // 3])
    llama.set_desired([spec(bench, engine="llama.cpp", model="cut.gguf")], 1)
    failed = wait_for(llama, ReplicaState.FAILED, timeout_s=30)
    assert failed.words.startswith("exited 1: ")
    assert "data is not within the file bounds, model is corrupted or incomplete" in failed.words
