"""The owner of a node's engines: it installs, re-checks, repairs and removes by itself, and says so at every moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from install_fakes import Shelf, facts
from install_small import NoPackages, Small, pipeline, release

from llmgw.agent.converge import Converge
from llmgw.domain.drift import COLLECT_AFTER_S, RECHECK_S
from llmgw.domain.engines import EngineSpec, EngineState, EngineStatus, NamedEngine, NamedProbe, Progress
from llmgw.domain.facts import Finding, NodeFacts, NvidiaFacts, Truth
from llmgw.errors import NotPublished
from llmgw.install.named import Seen, see_named
from llmgw.install.prove import Prover
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.providers.registry import ProviderProblem, Registry
from llmgw.system.clock import RealClock
from llmgw.system.commands import RealRunner
from llmgw.system.http import Http

SPEC = EngineSpec("small", "b1", sources=("shelf",))
Until = Callable[..., object]


class ShiftedClock(RealClock):
    """The real clock, moved forward by a test."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


class Bench:
    """A converge over a real pipeline, with everything a test turns."""

    def __init__(self, tmp_path: Path, http: Http) -> None:
        release(tmp_path / "release")
        self.root = tmp_path / "engines"
        self.shelf = Shelf(tmp_path / "release")
        self.clock = ShiftedClock()
        self.prover = Prover(RealRunner(), http, self.clock)
        self.facts: NodeFacts | None = facts()
        self.in_use: set[tuple[str, str]] = set()
        self.small = Small()
        self.changed = threading.Event()
        self.problems: tuple[ProviderProblem, ...] = ()
        self.running: list[Converge] = []

    def start(self, *named: NamedEngine) -> Converge:
        def see(probe: NamedProbe, *, quick: bool) -> Seen:
            return see_named(self.prover, probe, quick=quick)

        made = Converge(
            named,
            Registry({"small": self.small, "llama.cpp": LlamaCpp()}, self.problems),  # type: ignore[dict-item]
            pipeline(self.root, self.shelf, self.prover, NoPackages(), self.clock),
            see,
            lambda: self.facts,
            lambda: frozenset(self.in_use),
            self.clock,
            self.changed.set,
            jitter=lambda: 1.0,
        )
        made.start()
        self.running.append(made)
        return made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Http() as http:
        made = Bench(tmp_path, http)
        yield made
        for each in made.running:
            each.stop()


def status(converge: Converge, name: str = "small", version: str | None = "b1") -> EngineStatus:
    return next(each for each in converge.statuses() if (each.name, each.version) in ((name, version), (name, None)))


def is_state(converge: Converge, state: EngineState) -> Callable[[], bool]:
    return lambda: bool(converge.statuses()) and converge.statuses()[0].state is state


def seen_unused(converge: Converge) -> bool:
    return any(held.unused_since is not None for held in converge._held.values())


def test_nothing_is_said_to_be_absent_before_it_was_looked_at(bench: Bench) -> None:
    made = Converge(
        (NamedEngine("llama.cpp", {"bin": "/x"}),), Registry({}), None, None, lambda: None,  # type: ignore[arg-type]
        frozenset, bench.clock, lambda: None,
    )  # fmt: skip
    made.set_desired((SPEC,))
    assert [(each.name, each.state) for each in made.statuses()] == [
        ("llama.cpp", EngineState.UNPROBED),
        ("small", EngineState.UNPROBED),
    ]
    assert made.engine("small", "b1") is None


def test_a_wanted_engine_is_installed_and_can_be_launched(bench: Bench, until: Until) -> None:
    converge = bench.start()
    assert converge.statuses() == ()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.READY), what="ready")
    found = status(converge)
    assert (found.build, found.usable, found.words) == ("cpu", True, "ready: CPU build, seen to run")
    engine = converge.engine("small", "b1")
    assert engine is not None
    assert engine.dir == str(bench.root / "small/b1-cpu")
    assert converge.engine("small", "b2") is None
    assert bench.changed.is_set()


def test_an_installed_engine_is_ready_after_a_restart_only_when_seen_again(bench: Bench, until: Until) -> None:
    first = bench.start()
    first.set_desired((SPEC,))
    until(is_state(first, EngineState.READY), what="ready")
    first.stop()
    again = bench.start()
    until(is_state(again, EngineState.READY), what="ready without a server")
    assert len(bench.shelf.fetched) == 1
    again.stop()
    (bench.root / "small/b1-cpu/libx.so.0.1").unlink()
    broken = bench.start()
    until(is_state(broken, EngineState.BROKEN), what="broken")
    assert "`libx.so.0.1` is gone from" in status(broken).words
    assert broken.engine("small", "b1") is None


def test_an_engine_that_breaks_is_noticed_and_repaired(bench: Bench, until: Until) -> None:
    converge = bench.start()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.READY), what="ready")
    (bench.root / "small/b1-cpu/libx.so.0.1").unlink()
    assert status(converge).state is EngineState.READY
    bench.shelf.directory.joinpath("engine-b1.tar.gz").rename(bench.root / "away")
    bench.clock.ahead += RECHECK_S
    converge.wake()
    until(is_state(converge, EngineState.BROKEN), what="broken")
    until(lambda: status(converge).next_try, what="a failed repair")
    assert status(converge).words.startswith("broken: small b1 has no build there; next try at ")
    (bench.root / "away").rename(bench.shelf.directory / "engine-b1.tar.gz")
    bench.clock.ahead += 60
    converge.wake()
    until(is_state(converge, EngineState.READY), what="repaired")


def test_bytes_changed_behind_size_and_time_are_found_at_the_second_look(bench: Bench, until: Until) -> None:
    first = bench.start()
    first.set_desired((SPEC,))
    until(is_state(first, EngineState.READY), what="ready")
    first.stop()
    path = bench.root / "small/b1-cpu/libx.so.0.1"
    before = path.stat()
    path.write_bytes(b"LIBRARY")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = bench.start()
    until(is_state(again, EngineState.READY), what="ready: the first look reads no whole files")
    bench.clock.ahead += RECHECK_S
    again.wake()
    until(is_state(again, EngineState.BROKEN), what="broken")
    assert status(again).words.endswith("has changed since it was proven: its content is another")


def test_a_failure_is_told_with_its_next_try_and_tried_again(bench: Bench, until: Until) -> None:
    bench.small.says = "^version: 7"
    converge = bench.start()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.FAILED), what="failed")
    found = status(converge)
    assert found.words.startswith("failed: --version did not answer as this build must: it said 'env (")
    assert found.next_try is not None
    assert 0 < found.next_try - bench.clock.now() <= 10
    bench.small.says = r"^env \("
    bench.clock.ahead += 10
    converge.wake()
    until(is_state(converge, EngineState.READY), what="ready at the second try")


def test_a_source_that_says_when_to_come_back_is_not_asked_before(bench: Bench, until: Until) -> None:
    class Limited(Shelf):
        def assets(self, origin, spec, arch):  # type: ignore[no-untyped-def]
            raise NotPublished("b1 is not published yet", retry_after_s=1000.0)

    bench.shelf = Limited(bench.shelf.directory)
    converge = bench.start()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.FAILED), what="failed")
    assert (status(converge).next_try or 0) - bench.clock.now() > 900


def test_recheck_now_tries_at_once(bench: Bench, until: Until) -> None:
    bench.small.says = "^version: 7"
    converge = bench.start()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.FAILED), what="failed")
    bench.small.says = r"^env \("
    converge.recheck_now()
    until(is_state(converge, EngineState.READY), what="ready")


def test_unknown_facts_are_waited_for_in_words(bench: Bench, until: Until) -> None:
    bench.facts = None
    converge = bench.start()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.ABSENT), what="absent")
    assert "waits until" in status(converge).words
    bench.facts = facts()
    converge.wake()
    until(is_state(converge, EngineState.READY), what="ready")


def test_an_engine_nothing_wants_is_collected_after_a_while_but_never_in_use(bench: Bench, until: Until) -> None:
    converge = bench.start()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.READY), what="ready")
    bench.in_use = {("small", "b1")}
    converge.set_desired(())
    bench.clock.ahead += 3 * COLLECT_AFTER_S
    converge.recheck_now()
    until(is_state(converge, EngineState.READY), what="still there")
    bench.in_use = set()
    converge.wake()
    until(lambda: not bench.in_use and seen_unused(converge), what="unused")
    assert (bench.root / "small/b1-cpu").exists()
    bench.clock.ahead += COLLECT_AFTER_S
    converge.wake()
    until(lambda: converge.statuses() == (), what="collected")
    assert not (bench.root / "small/b1-cpu").exists()
    assert converge.engine("small", "b1") is None


def test_a_version_change_keeps_the_old_engine_until_its_replicas_have_moved(bench: Bench, until: Until) -> None:
    release(bench.shelf.directory, "b2")
    converge = bench.start()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.READY), what="ready")
    bench.in_use = {("small", "b1")}
    converge.set_desired((attrs.evolve(SPEC, version="b2"),))
    until(lambda: converge.engine("small", "b2"), what="the new version")
    bench.clock.ahead += 3 * COLLECT_AFTER_S
    converge.wake()
    until(lambda: converge.engine("small", "b1"), what="the old version can still be launched")
    assert (bench.root / "small/b1-cpu").exists()
    bench.in_use = {("small", "b2")}
    converge.wake()
    until(lambda: seen_unused(converge), what="unused")
    bench.clock.ahead += COLLECT_AFTER_S
    converge.wake()
    until(lambda: not (bench.root / "small/b1-cpu").exists(), what="collected")
    until(lambda: converge.engine("small", "b2"), what="the new version stays")


def test_a_running_installation_that_is_no_longer_wanted_is_ended(bench: Bench, until: Until) -> None:
    entered, release_it = threading.Event(), threading.Event()

    class Slow(Shelf):
        def fetch(self, asset, dest_dir, *, progress, stop):  # type: ignore[no-untyped-def]
            progress(1, 100)
            entered.set()
            assert stop.wait(15)
            release_it.set()
            return super().fetch(asset, dest_dir, progress=progress, stop=stop)

    bench.shelf = Slow(bench.shelf.directory)
    converge = bench.start()
    converge.set_desired((SPEC,))
    assert entered.wait(15)
    until(lambda: status(converge).progress == Progress(1, 100) or status(converge).progress, what="progress")
    assert status(converge).state is EngineState.INSTALLING
    converge.set_desired(())
    assert release_it.wait(15)
    until(lambda: converge.statuses() == (), what="nothing wanted")
    assert not (bench.root / "small").exists()


def test_a_provider_that_is_not_there_is_told(bench: Bench, until: Until) -> None:
    bench.problems = (ProviderProblem("tgi", "llmgw-tgi", "ImportError: no torch"),)
    converge = bench.start()
    converge.set_desired((EngineSpec("tgi", "3"),))
    until(is_state(converge, EngineState.FAILED), what="failed")
    assert "the provider `tgi` of the distribution `llmgw-tgi` is not available" in status(converge, "tgi", "3").words


def test_a_directory_that_cannot_be_written_is_told(bench: Bench, until: Until) -> None:
    bench.root.write_text("a file")
    converge = bench.start()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.FAILED), what="failed")
    assert f"cannot create `{bench.root}`" in status(converge).words
    bench.root.unlink()
    bench.clock.ahead += 3600
    converge.wake()
    until(is_state(converge, EngineState.READY), what="ready")


def test_another_driver_makes_it_look_again(bench: Bench, until: Until) -> None:
    nvidia = NvidiaFacts(Finding(Truth.YES, "loaded"), "580.1", "13.0")
    bench.facts = attrs.evolve(facts(), nvidia=nvidia)
    converge = bench.start()
    converge.set_desired((SPEC,))
    until(is_state(converge, EngineState.READY), what="ready")
    (bench.root / "small/b1-cpu/libx.so.0.1").unlink()
    bench.facts = attrs.evolve(facts(), nvidia=attrs.evolve(nvidia, version="590.1"))
    converge.wake()
    until(lambda: len(bench.shelf.fetched) == 2, what="a repair")
    until(is_state(converge, EngineState.READY), what="ready again")


def test_a_named_engine_is_probed_and_never_installed(bench: Bench, until: Until, real_engine_dir: Path) -> None:
    binary = str(real_engine_dir / "llama-server")
    converge = bench.start(NamedEngine("llama.cpp", {"bin": binary}))
    converge.set_desired((EngineSpec("llama.cpp", "b10991"),))
    until(lambda: converge.statuses()[0].usable, what="probed")
    (found,) = converge.statuses()
    assert found.state is EngineState.NAMED
    assert found.version == "0.1.0-dev (build 1, commit 7e4c0a9)"
    assert found.words == f"named in agent.yaml: `{binary}`, version {found.version}, seen to run"
    engine = converge.engine("llama.cpp", found.version)
    assert engine is not None
    assert (engine.binary, engine.dir) == (binary, "")
    assert converge.engine("llama.cpp", "b10991") is None
    bench.clock.ahead += RECHECK_S
    before = converge._named["llama.cpp"].checked_at or 0.0
    converge.recheck_now()
    until(lambda: (converge._named["llama.cpp"].checked_at or 0.0) > before + 1, what="a second look")
    assert converge.statuses() == (found,)


def test_a_named_engine_that_does_not_run_is_told(bench: Bench, until: Until, tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    converge = bench.start(NamedEngine("llama.cpp", {"bin": str(binary)}))
    until(lambda: converge.statuses()[0].next_try, what="probed")
    (found,) = converge.statuses()
    assert (found.state, found.usable) == (EngineState.NAMED, False)
    assert found.words.startswith(f"named in agent.yaml, not usable: `{binary}` does not exist")
    assert converge.engine("llama.cpp", "") is None


def test_an_engine_on_the_path_is_never_looked_at(
    bench: Bench, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_engine_dir: Path
) -> None:
    monkeypatch.setenv("PATH", f"{real_engine_dir}:/usr/bin:/bin")
    converge = bench.start()
    converge.set_desired((EngineSpec("llama.cpp", "b5", sources=("shelf",)),))
    until(is_state(converge, EngineState.FAILED), what="failed")
    assert "llama.cpp b5 has no CPU build for x64 there" in converge.statuses()[0].words
