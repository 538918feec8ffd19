"""The fake engine does what its docstring says: other tests build on it."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervise_fakes import ask

from llmgw.testing.fake_provider import PROGRAM


class Engine:
    def __init__(self, root: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = root / "log"
        with self.log.open("w") as log:
            argv = [sys.executable, "-I", "-S", PROGRAM, "--port", str(self.port), *flags]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)
        self.wait(lambda: "listening" in self.log.read_text() or self.process.poll() is not None)

    def wait(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def stats(self) -> dict[str, object]:
        return ask(self.port, "/fake/stats", key="")

    def open(self, body: object) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        return connection, connection.getresponse()

    def status(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(*flags: str) -> Engine:
        made.append(Engine(tmp_path, *flags))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.process.wait()


def events(text: str) -> list[object]:
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in found]


def test_a_stream_has_numbered_tokens_usage_and_an_end(engine: Callable[..., Engine]) -> None:
    body = {
        "stream": True,
        "max_tokens": 3,
        "stream_options": {"include_usage": True},
        "messages": [{"content": "a b"}],
    }
    connection, answer = engine().open(body)
    *chunks, usage, done = events(answer.read().decode())
    connection.close()
    assert answer.getheader("Content-Type") == "text/event-stream"
    assert [each["choices"][0]["delta"].get("content") for each in chunks] == [None, "t0 ", "t1 ", "t2 ", None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert done == "[DONE]"


def test_it_crashes_in_the_middle_of_an_answer(engine: Callable[..., Engine]) -> None:
    made = engine("--crash-after-tokens", "2", "--crash-code", "-11")
    connection, answer = made.open({"stream": True, "max_tokens": 5})
    with pytest.raises(http.client.IncompleteRead) as cut:
        answer.read()
    connection.close()
    assert b"t1 " in cut.value.partial
    assert b"t2 " not in cut.value.partial
    assert made.process.wait(5) == -signal.SIGSEGV


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_counted_and_its_slot_freed(engine: Callable[..., Engine], stream: bool) -> None:
    made = engine("--token-interval", "0.05", "--slots", "1")
    with socket.create_connection(("127.0.0.1", made.port)) as client:
        body = json.dumps({"stream": stream, "max_tokens": 1000}).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        made.wait(lambda: made.stats()["tokens"] > 0)
    made.wait(lambda: made.stats()["client_disconnects"] == 1)
    assert ask(made.port, "/v1/completions", {"max_tokens": 2})["choices"][0]["text"] == "t0 t1 "
    assert made.stats()["in_flight"] == 0


def test_loading_answers_503_until_it_is_over(engine: Callable[..., Engine]) -> None:
    made = engine("--load-seconds", "0.5")
    assert made.status("/health") == 503
    assert made.status("/props") == 503
    made.wait(lambda: made.status("/health") == 200)
    ask(made.port, "/fake/set", {"loading": True}, key="")
    assert made.status("/health") == 503


def test_it_fails_requests_on_demand(engine: Callable[..., Engine]) -> None:
    made = engine("--answer-status", "429")
    connection, answer = made.open({})
    assert answer.status == 429
    assert json.loads(answer.read())["error"]["message"] == "failing as told"
    connection.close()


def test_embeddings_and_models(engine: Callable[..., Engine]) -> None:
    made = engine("--alias", "org/emb")
    assert ask(made.port, "/v1/models")["data"][0]["id"] == "org/emb"
    answer = ask(made.port, "/v1/embeddings", {"input": ["a b", "c"]})
    assert [len(each["embedding"]) for each in answer["data"]] == [8, 8]
    assert answer["usage"]["prompt_tokens"] == 3
    assert made.stats()["last"]["body"] == {"input": ["a b", "c"]}


def test_a_port_in_use_ends_it_with_words(engine: Callable[..., Engine]) -> None:
    first = engine()
    second = subprocess.run(
        [sys.executable, "-I", "-S", PROGRAM, "--port", str(first.port)], capture_output=True, text=True, timeout=10
    )
    assert second.returncode == 1
    assert f"port: {first.port}: Address already in use" in second.stderr
