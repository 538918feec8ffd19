"""The pipeline: each step in words, each source's own refusal, repair in place, and a real release end to end."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from github_server import GithubServer
from install_archives import entry, tar_gz, write
from install_fakes import Shelf, StepClock, facts
from install_small import NoPackages, Small, pipeline, release

from llmgw.domain.engines import Asset, EngineSpec, Progress
from llmgw.errors import (
    ArchiveRefused,
    FetchError,
    InstallError,
    LlmgwError,
    NoBuild,
    NoSpace,
    NotPublished,
    ProofFailed,
)
from llmgw.install.ldd import Linked
from llmgw.install.pipeline import Pipeline, build_allowed
from llmgw.install.prove import Prover
from llmgw.install.store import Store
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.sources import fetch_asset, make_source
from llmgw.system.clock import RealClock
from llmgw.system.commands import RealRunner
from llmgw.system.http import Http

SPEC = EngineSpec("small", "b1", sources=("shelf",))


class Told:
    """Collects what the pipeline says."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.progress: list[Progress] = []

    def __call__(self, words: str, progress: Progress | None) -> None:
        self.words.append(words)
        if progress:
            self.progress.append(progress)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    release(tmp_path / "release")
    return Shelf(tmp_path / "release")


def run(made: Pipeline, spec: EngineSpec = SPEC, provider: Small | None = None, told: Told | None = None) -> object:
    return made.install(spec, provider or Small(), facts(), told or Told(), threading.Event())


def test_each_step_is_told_in_words(tmp_path: Path, shelf: Shelf) -> None:
    told = Told()
    run(pipeline(tmp_path / "engines", shelf), told=told)
    first = [words for words in told.words if "downloading" not in words]
    assert first == [
        "installing: asking shelf for small b1",
        "installing: unpacking engine-b1.tar.gz",
        "installing: reading what the build asks of this node",
        "installing: looking for missing libraries",
        "installing: proving: --version",
        "installing: marking it as installed",
    ]
    downloads = [words for words in told.words if "downloading" in words]
    assert downloads[0].startswith("installing: downloading engine-b1.tar.gz (")
    assert downloads[-1].endswith(", 100 %)")
    assert told.progress[-1].done_bytes == told.progress[-1].total_bytes


def test_archives_are_not_kept_after_success(tmp_path: Path, shelf: Shelf) -> None:
    run(pipeline(tmp_path / "engines", shelf))
    assert not (tmp_path / "engines/.downloads").exists()


def test_a_second_request_installs_nothing(tmp_path: Path, shelf: Shelf) -> None:
    made = pipeline(tmp_path / "engines", shelf)
    assert run(made) == run(made)
    assert shelf.fetched == ["engine-b1.tar.gz"]


def test_a_damaged_tree_is_installed_anew(tmp_path: Path, shelf: Shelf) -> None:
    made = pipeline(tmp_path / "engines", shelf)
    engine = run(made)
    (tmp_path / "engines/small/b1-cpu/libx.so.0.1").unlink()
    assert "is gone" in (made.recheck(engine) or "")
    run(made)
    assert made.recheck(engine) is None
    assert len(shelf.fetched) == 2


def test_a_recheck_runs_the_program_again(tmp_path: Path, shelf: Shelf) -> None:
    made = pipeline(tmp_path / "engines", shelf)
    engine = run(made)

    class Sick(Prover):
        def prove(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            assert kwargs["quick"]
            raise ProofFailed("--version was killed by SIGBUS (a file was cut short)")

    again = pipeline(tmp_path / "engines", shelf, Sick(RealRunner(), None, StepClock()))  # type: ignore[arg-type]
    assert again.recheck(engine) == "--version was killed by SIGBUS (a file was cut short)"


def test_each_source_is_tried_and_each_refusal_is_told(tmp_path: Path, shelf: Shelf) -> None:
    class Empty:
        def assets(self, origin, spec, arch):  # type: ignore[no-untyped-def]
            raise NotPublished("b1 is not published yet", retry_after_s=300.0)

    clock = StepClock()
    sources = {"github": Empty(), "shelf": shelf}
    prover = Prover(RealRunner(), None, clock)  # type: ignore[arg-type]
    made = Pipeline(Store(tmp_path / "e", clock), sources.__getitem__, shelf.fetch, NoPackages(), prover, clock)
    told = Told()
    run(made, attrs.evolve(SPEC, sources=("github", "shelf")), told=told)
    assert told.words[:2] == [
        "installing: asking github for small b1",
        "installing: asking shelf for small b1 (github: b1 is not published yet)",
    ]
    with pytest.raises(InstallError) as caught:
        run(made, attrs.evolve(SPEC, version="b2", sources=("github", "shelf")))
    assert caught.value.words() == "github: b1 is not published yet; shelf: small b2 has no build there"
    assert caught.value.retry_after_s == 300.0
    with pytest.raises(NotPublished):
        run(made, attrs.evolve(SPEC, version="b2", sources=("github",)))
    with pytest.raises(NoBuild):
        run(made, attrs.evolve(SPEC, version="b2", sources=("shelf",)))


def test_a_failed_download_is_told_and_nothing_is_left(tmp_path: Path, shelf: Shelf) -> None:
    made = pipeline(tmp_path / "engines", shelf)

    def broken(*args: object, **kwargs: object) -> Path:
        raise FetchError("cannot fetch `engine-b1.tar.gz`", cause="the peer closed the connection")

    made._fetch = broken  # type: ignore[assignment]
    with pytest.raises(FetchError, match="the peer closed the connection"):
        run(made)
    assert list((tmp_path / "engines").glob(".staging-*")) == []
    assert made.records() == ()


def test_an_asset_without_a_digest_needs_a_pin(tmp_path: Path, shelf: Shelf) -> None:
    class NoDigest(Shelf):
        def assets(self, origin, spec, arch):  # type: ignore[no-untyped-def]
            return tuple(attrs.evolve(asset, sha256=None) for asset in super().assets(origin, spec, arch))

    bare = NoDigest(shelf.directory)
    made = pipeline(tmp_path / "engines", bare)
    with pytest.raises(InstallError, match=r"no digest is published for `engine-b1\.tar\.gz`"):
        run(made)
    digest = hashlib.sha256((shelf.directory / "engine-b1.tar.gz").read_bytes()).hexdigest()
    run(made, attrs.evolve(SPEC, sha256={"engine-b1.tar.gz": digest}))


def test_a_digest_other_than_the_pinned_one_is_refused(tmp_path: Path, shelf: Shelf) -> None:
    with pytest.raises(InstallError, match=r"is not the one pinned in server\.yaml"):
        run(pipeline(tmp_path / "engines", shelf), attrs.evolve(SPEC, sha256={"engine-b1.tar.gz": "0" * 64}))
    assert shelf.fetched == []


def test_a_hostile_archive_ends_the_installation(tmp_path: Path, shelf: Shelf) -> None:
    write(shelf.directory / "engine-b1.tar.gz", tar_gz([entry("top/engine"), entry("../../evil")]))
    made = pipeline(tmp_path / "engines", shelf)
    with pytest.raises(ArchiveRefused, match=r"`\.\./\.\./evil`"):
        run(made)
    assert made.records() == ()
    assert not (tmp_path / "evil").exists()


def test_a_tree_without_the_expected_binary_is_not_installed(tmp_path: Path) -> None:
    release(tmp_path / "release", binary="other")
    made = pipeline(tmp_path / "engines", Shelf(tmp_path / "release"))
    with pytest.raises(ProofFailed, match="the archive has no `engine`"):
        run(made)
    assert made.records() == ()


def test_a_wrong_version_is_not_installed(tmp_path: Path, shelf: Shelf) -> None:
    made = pipeline(tmp_path / "engines", shelf)
    with pytest.raises(ProofFailed, match="--version did not answer as this build must"):
        run(made, provider=Small(says="^version: 7"))
    assert made.records() == ()


def test_too_little_room_is_told_before_anything_is_fetched(tmp_path: Path, shelf: Shelf) -> None:
    class Huge(Shelf):
        def assets(self, origin, spec, arch):  # type: ignore[no-untyped-def]
            return tuple(attrs.evolve(asset, size_bytes=1 << 60) for asset in super().assets(origin, spec, arch))

    huge = Huge(shelf.directory)
    with pytest.raises(NoSpace, match=r"needs about .* TB and has"):
        run(pipeline(tmp_path / "engines", huge))
    assert huge.fetched == []


class OneLibraryShort(Prover):
    """A node that lacks a library until the package manager was asked `cured_by` times."""

    missing = True

    def libraries(self, directory: Path, recipe: object) -> Linked:
        return Linked(("libgomp.so.1",)) if self.missing else Linked()


def test_a_missing_library_is_brought_by_a_package_and_looked_for_again(tmp_path: Path, shelf: Shelf) -> None:
    prover = OneLibraryShort(RealRunner(), None, StepClock())  # type: ignore[arg-type]

    class Bringing:
        def provide(self, missing, allowed, system, say, stop):  # type: ignore[no-untyped-def]
            say("installing libgomp1 with apt-get")
            prover.missing = False
            return ("libgomp1",)

    told = Told()
    made = pipeline(tmp_path / "engines", shelf, prover, Bringing())
    engine = run(made, told=told)
    assert "installing: installing libgomp1 with apt-get" in told.words
    prover.missing = True
    assert made.recheck(engine) == "libgomp.so.1 is missing"
    run(made)
    assert made.recheck(engine) is None
    assert shelf.fetched == ["engine-b1.tar.gz"], "repaired in place"


def test_a_package_that_does_not_bring_the_library_is_told(tmp_path: Path, shelf: Shelf) -> None:
    class Useless:
        def provide(self, missing, allowed, system, say, stop):  # type: ignore[no-untyped-def]
            return ("libgomp1",)

    prover = OneLibraryShort(RealRunner(), None, StepClock())  # type: ignore[arg-type]
    with pytest.raises(ProofFailed, match=r"libgomp\.so\.1 is missing although libgomp1 is installed"):
        run(pipeline(tmp_path / "engines", shelf, prover, Useless()))


def test_a_stop_ends_it_between_two_steps(tmp_path: Path, shelf: Shelf) -> None:
    stop = threading.Event()

    def told(words: str, progress: Progress | None) -> None:
        if "unpacking" in words:
            stop.set()

    made = pipeline(tmp_path / "engines", shelf)
    with pytest.raises(LlmgwError):
        made.install(SPEC, Small(), facts(), told, stop)
    assert made.records() == ()


def test_a_second_agent_at_work_is_told(tmp_path: Path, shelf: Shelf) -> None:
    made = pipeline(tmp_path / "engines", shelf)
    with (
        Store(tmp_path / "engines", StepClock()).locked(),
        pytest.raises(InstallError, match="another agent installs engines into the same directory"),
    ):
        run(made)


def test_two_versions_live_side_by_side_and_one_is_collected(tmp_path: Path, shelf: Shelf) -> None:
    release(shelf.directory, "b2")
    made = pipeline(tmp_path / "engines", shelf)
    old = run(made)
    run(made, attrs.evolve(SPEC, version="b2"))
    assert [record.recipe.version for record in made.records()] == ["b1", "b2"]
    made.collect(old)
    assert [record.recipe.version for record in made.records()] == ["b2"]


def test_builds_are_matched_by_kind() -> None:
    assert build_allowed("cuda-13.3", ("cuda",))
    assert build_allowed("cpu", ())
    assert not build_allowed("cpu", ("cuda", "vulkan"))


@pytest.fixture
def real(tmp_path: Path, release_dir: Path) -> Iterator[Pipeline]:
    shelf, clock = Shelf(release_dir), RealClock()
    with Http() as http:
        yield pipeline(tmp_path / "engines", shelf, Prover(RealRunner(), http, clock), NoPackages(), clock)


def test_a_real_release_is_installed_and_proven_end_to_end(tmp_path: Path, real: Pipeline) -> None:
    told = Told()
    spec = EngineSpec("llama.cpp", "b1", sources=("shelf",))
    engine = real.install(spec, LlamaCpp(), facts(), told, threading.Event())
    assert (engine.build, engine.version) == ("cpu", "b1")
    assert os.access(engine.binary, os.X_OK)
    assert "installing: downloading llama-b1-bin-ubuntu-x64.tar.gz (28 MB, 100 %)" in told.words
    assert told.words[-2] == "installing: proving: llama-server with the tiny model"
    record = real.store.find("llama.cpp", "b1")
    assert record is not None
    assert record.proofs[-1].words == "served 4 tokens from the tiny model"
    assert real.recheck(engine) is None
    (Path(engine.dir) / "libggml-cpu.so.0.20.0").rename(tmp_path / "moved")
    assert "`libggml-cpu.so.0.20.0` is gone" in (real.recheck(engine) or "")


def test_a_release_on_github_reaches_the_node_over_http(tmp_path: Path, release_dir: Path) -> None:
    name = "llama-b1-bin-ubuntu-x64.tar.gz"
    told, clock, stop = Told(), RealClock(), threading.Event()
    spec = EngineSpec("llama.cpp", "b1")
    with GithubServer() as github, Http() as http:
        env = {"LLMGW_GITHUB_API": github.api}
        served = github.release("ggml-org/llama.cpp", "b1", {name: (release_dir / name).read_bytes()})[name]
        served.cuts = [9_000_000]

        def fetch(asset: Asset, dest_dir: Path, **kwargs: object) -> Path:
            return fetch_asset(asset, dest_dir, http, env=env, **kwargs)  # type: ignore[arg-type]

        made = Pipeline(
            Store(tmp_path / "engines", clock),
            lambda text: make_source(text, http, env=env),
            fetch,
            NoPackages(),
            Prover(RealRunner(), http, clock),
            clock,
        )
        engine = made.install(spec, LlamaCpp(), facts(), told, stop)
        assert made.recheck(engine) is None
        with pytest.raises(NotPublished):
            made.install(attrs.evolve(spec, version="b2"), LlamaCpp(), facts(), told, stop)
    assert any("MB, 100 %)" in words for words in told.words)
    assert told.words[0] == "installing: asking github for llama.cpp b1"
