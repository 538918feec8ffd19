"""Seen to run: real programs that behave, sleep, fork, flood, lie, and a real engine that serves tokens."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from install_fakes import DEBIAN

from llmgw.domain.engines import Asset, Check, EngineSpec, Recipe
from llmgw.errors import ProofFailed
from llmgw.install.ldd import Linked
from llmgw.install.prove import TINY_MODEL, Prover
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.system.clock import RealClock
from llmgw.system.commands import RealRunner
from llmgw.system.http import Http

Until = Callable[..., object]


@pytest.fixture
def prover() -> Iterator[Prover]:
    with Http() as http:
        yield Prover(RealRunner(), http, RealClock())


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def prove(prover: Prover, tmp_path: Path, text: str, **changes: object) -> str:
    script(tmp_path / "engine", text)
    check = attrs.evolve(Check("--version", ("{dir}/engine", "--version"), timeout_s=5.0), **changes)
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True, mode=0o700)
    proofs = prover.prove(tmp_path, (check,), scratch, lambda _: None, threading.Event())
    return proofs[0].words


def gone(marker: Path) -> bool:
    pid = int(marker.read_text())
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_version_is_read_from_stderr(prover: Prover, tmp_path: Path) -> None:
    words = prove(
        prover,
        tmp_path,
        "echo 'version: 0.4.1-dev (build 10991, commit 615d814dd)' >&2",
        stderr=r"^version: .*10991.*$",
    )
    assert words == "version: 0.4.1-dev (build 10991, commit 615d814dd)"


def test_another_version_is_refused_and_quoted(prover: Prover, tmp_path: Path) -> None:
    with pytest.raises(ProofFailed, match=r"did not answer as this build must: it said 'version: 1 \(abc\)'"):
        prove(prover, tmp_path, "echo 'version: 1 (abc)' >&2", stderr=r"^version: (?:\S+ \(build )?10991\b")


def test_the_environment_is_almost_empty_and_the_directory_is_private(
    prover: Prover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/evil")
    monkeypatch.setenv("LLAMA_ARG_PORT", "1")
    words = prove(
        prover,
        tmp_path,
        'pwd; stat -c %a .; env | cut -d= -f1 | sort | tr "\\n" " "',
        stdout=r"[\s\S]+",
        env={"X": "1"},
    )
    assert words == f"{tmp_path}/scratch"
    script(tmp_path / "engine", 'env | cut -d= -f1 | sort | tr "\\n" " "')
    check = Check("env", ("{dir}/engine",), env={"X": "1"})
    seen = prover.prove(tmp_path, (check,), tmp_path / "scratch", lambda _: None, threading.Event())
    assert set(seen[0].words.split()) - {"_", "OLDPWD", "SHLVL"} == {"HOME", "LC_ALL", "PATH", "PWD", "TMPDIR", "X"}


def test_a_program_that_sleeps_is_killed_in_time(prover: Prover, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ProofFailed, match=r"--version gave no answer in 0\.3 s"):
        prove(prover, tmp_path, "sleep 60", timeout_s=0.3)
    assert time.monotonic() - started < 10


def test_what_a_program_forked_does_not_stay(prover: Prover, tmp_path: Path, until: Until) -> None:
    marker = tmp_path / "pid"
    prove(prover, tmp_path, f"sleep 60 & echo $! > {marker}; echo done")
    until(lambda: gone(marker), what="the end of the forked program")


def test_a_program_that_prints_without_end_is_stopped(prover: Prover, tmp_path: Path) -> None:
    with pytest.raises(ProofFailed, match="printed more than 1048576 bytes and was stopped"):
        prove(prover, tmp_path, "yes", timeout_s=30.0)


def test_an_exit_code_and_the_last_words_are_told(prover: Prover, tmp_path: Path) -> None:
    with pytest.raises(ProofFailed, match="--version exited 3: illegal something"):
        prove(prover, tmp_path, "echo illegal something >&2; exit 3")


def test_a_signal_is_told_with_what_it_means(prover: Prover, tmp_path: Path) -> None:
    with pytest.raises(ProofFailed, match=r"was killed by SIGILL \(the CPU lacks an instruction this build uses\)"):
        prove(prover, tmp_path, "kill -ILL $$")


def test_a_file_that_is_not_executable_is_told(prover: Prover, tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("x")
    check = Check("--version", ("{dir}/engine",))
    with pytest.raises(ProofFailed, match=r"cannot run .*Permission denied"):
        prover.prove(tmp_path, (check,), tmp_path, lambda _: None, threading.Event())


def test_quick_checks_and_file_conditions_choose_what_runs(prover: Prover, tmp_path: Path) -> None:
    script(tmp_path / "engine", "echo $1")
    checks = (
        Check("quick", ("{dir}/engine", "a"), quick=True),
        Check("slow", ("{dir}/engine", "b")),
        Check("with", ("{dir}/engine", "c"), only_with="bench"),
        Check("without", ("{dir}/engine", "d"), only_without="bench"),
    )

    def titles(quick: bool) -> list[str]:
        seen = prover.prove(tmp_path, checks, tmp_path, lambda _: None, threading.Event(), quick=quick)
        return [proof.title for proof in seen]

    assert titles(True) == ["quick"]
    assert titles(False) == ["quick", "slow", "without"]
    (tmp_path / "bench").write_text("")
    assert titles(False) == ["quick", "slow", "with"]


SERVES = Check("serving", ("{dir}/engine", "{port}"), serves=True, probe_path="/v1/completions", timeout_s=8.0)


def test_a_server_that_ends_is_told_with_its_last_line(prover: Prover, tmp_path: Path) -> None:
    script(tmp_path / "engine", "echo loading; echo 'no CPU backend found' >&2; exit 1")
    with pytest.raises(ProofFailed, match="serving exited 1: no CPU backend found"):
        prover.prove(tmp_path, (SERVES,), tmp_path, lambda _: None, threading.Event())


def test_a_server_that_never_listens_is_stopped_with_all_it_started(
    prover: Prover, tmp_path: Path, until: Until
) -> None:
    marker = tmp_path / "pid"
    script(tmp_path / "engine", f"sleep 60 & echo $! > {marker}; echo waiting; wait")
    with pytest.raises(ProofFailed, match=r"serving was not ready in 1 s: waiting"):
        prover.prove(tmp_path, (attrs.evolve(SERVES, timeout_s=1.0),), tmp_path, lambda _: None, threading.Event())
    until(lambda: gone(marker), what="the end of what the server started")


def recipe(release: Path) -> Recipe:
    asset = Asset("llama-b1-bin-ubuntu-x64.tar.gz", "file:///x", 1, "0" * 64)
    from install_fakes import facts

    return LlamaCpp().recipe(EngineSpec("llama.cpp", "b1"), facts(), (asset,))


def test_a_real_engine_serves_tokens_from_the_shipped_model(
    prover: Prover, tmp_path: Path, real_engine_dir: Path
) -> None:
    said: list[str] = []
    made = recipe(real_engine_dir)
    assert prover.libraries(real_engine_dir, made) == Linked()
    proofs = prover.prove(real_engine_dir, made.checks, tmp_path, said.append, threading.Event())
    assert said == ["proving: --version", "proving: llama-server with the tiny model"]
    assert proofs[0].words.startswith("version: 0.1.0-dev (build 1,")
    assert proofs[1].words == "served 4 tokens from the tiny model"
    assert TINY_MODEL.is_file()


def test_an_engine_without_its_cpu_backend_is_not_ready(prover: Prover, tmp_path: Path, real_engine_dir: Path) -> None:
    shutil.copytree(real_engine_dir, tmp_path / "e", symlinks=True, copy_function=os.link)
    for path in (tmp_path / "e").glob("libggml-cpu*"):
        path.unlink()
    with pytest.raises(ProofFailed, match=r"no file matches `libggml-cpu\*\.so\*`"):
        prover.libraries(tmp_path / "e", recipe(real_engine_dir))


def test_a_missing_library_is_found_in_the_binary_and_in_what_it_opens_later(
    prover: Prover, tmp_path: Path, real_engine_dir: Path
) -> None:
    shutil.copytree(real_engine_dir, tmp_path / "e", symlinks=True, copy_function=os.link)
    made = recipe(real_engine_dir)
    for path in (tmp_path / "e").glob("libmtmd*"):
        path.unlink()
    assert prover.libraries(tmp_path / "e", made).missing == ("libmtmd.so.0",)
    (tmp_path / "e" / "libvulkan.so.1").unlink()
    found = prover.libraries(tmp_path / "e", attrs.evolve(made, binary="ggml-rpc-server"))
    if not any(Path(folder, "libvulkan.so.1").exists() for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")):
        assert found.missing == ("libvulkan.so.1",)
        ignoring = attrs.evolve(made, binary="ggml-rpc-server", ignore_missing=("libvulkan.so.1",))
        assert prover.libraries(tmp_path / "e", ignoring) == Linked()


def test_a_file_that_is_no_program_of_this_machine_is_refused(prover: Prover, tmp_path: Path) -> None:
    script(tmp_path / "llama-server", "echo version")
    with pytest.raises(ProofFailed, match="`llama-server`: it is not a dynamic executable"):
        prover.libraries(tmp_path, Recipe("x", "1", "cpu", (), "llama-server"))


def test_a_tree_without_the_binary_is_refused(prover: Prover, tmp_path: Path) -> None:
    with pytest.raises(ProofFailed, match="the archive has no `llama-server`"):
        prover.libraries(tmp_path, Recipe("x", "1", "cpu", (), "llama-server"))


def test_a_missing_symbol_version_says_what_the_node_has(prover: Prover) -> None:
    with pytest.raises(ProofFailed, match=r"^this build needs GLIBC_2\.38, this node has 2\.36$"):
        prover.check_versions(Linked((), ("GLIBC_2.38",)), DEBIAN)
