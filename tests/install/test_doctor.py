"""`llmgw doctor`: one line for everything on this node, and what to do where something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import pytest
from install_fakes import DEBIAN, Shelf, StepClock, facts
from install_small import Small, pipeline, release

from llmgw.agent import app_doctor
from llmgw.agent import settings as agent_settings
from llmgw.agent.doctor import EngineDoctor, Mark, directory_line, node_lines
from llmgw.domain.engines import EngineSpec, NamedEngine
from llmgw.domain.facts import CpuFacts, FabricFacts, Finding, GpuFacts, NodeWarning, Truth
from llmgw.install.ldd import Linked
from llmgw.install.prove import Prover
from llmgw.install.store import Store
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.providers.registry import ProviderProblem, Registry
from llmgw.system.commands import RealRunner
from llmgw.system.http import Http

SPEC = EngineSpec("small", "b1", sources=("shelf",))


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    release(tmp_path / "release")
    made = pipeline(tmp_path / "engines", Shelf(tmp_path / "release"))
    made.install(SPEC, Small(), facts(), lambda *_: None, threading.Event())
    return tmp_path / "engines"


def config(tmp_path: Path, text: str = "") -> Path:
    path = tmp_path / "agent.yaml"
    path.write_text(
        f"server: http://127.0.0.1:7443\nnode_id: n1\nengines_dir: {tmp_path}/engines\n"
        f"weights_dir: {tmp_path}/weights\nsupervisor: {{work_dir: {tmp_path}/work}}\n{text}"
    )
    (tmp_path / "weights").mkdir(exist_ok=True)
    return path


def doctor(path: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "llmgw", "doctor", "-c", path, *options], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_every_probe_and_proof_is_a_line(engines: Path, tmp_path: Path) -> None:
    code, out = doctor(config(tmp_path))
    assert code == 0, out
    lines = out.splitlines()
    for what in ("configuration", "system", "C library", "packages", "processor", "memory", "NVIDIA driver", "address"):
        assert sum(line[5:].startswith(f"{what}: ") for line in lines) == 1, what
    assert "ok   small b1 cpu, files: 3 files are as they were proven" in lines
    assert "ok   small b1 cpu, needs of its files: this node has what they ask for" in lines
    assert any(line.startswith("ok   small b1 cpu, --version: env (") for line in lines)
    assert "?    server: no agent has run with" in out


def test_what_is_wrong_is_bad_with_its_fix(engines: Path, tmp_path: Path) -> None:
    (engines / "small/b1-cpu/engine").chmod(0o644)
    code, out = doctor(config(tmp_path, "engines: {llama.cpp: {bin: /nowhere/llama-server}}\n"), "-o", "json")
    assert code == 1
    bad = {line["what"]: (line["words"], line["fix"]) for line in json.loads(out) if line["mark"] == "BAD"}
    words, fix = bad["small b1 cpu, files"]
    assert words.endswith("its mode is 0644, not 0755 (its execute bit is lost)")
    assert "recheck" in fix
    assert "has no execute bit" in bad["small b1 cpu, needs of its files"][0]
    assert bad["llama.cpp, named"] == (
        "`/nowhere/llama-server` is not there or not executable",
        "correct the path in agent.yaml",
    )


def test_without_a_usable_configuration_the_rest_is_still_looked_at(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text("servr: x\n")
    code, out = doctor(tmp_path / "agent.yaml")
    assert code == 1
    assert "BAD  configuration: " in out
    assert "ok   system: " in out


def test_a_missing_library_is_told_with_the_command_that_brings_it(engines: Path) -> None:
    class Short(Prover):
        def libraries(self, directory, recipe):  # type: ignore[no-untyped-def]
            return Linked(("libgomp.so.1",))

    store = Store(engines, StepClock())
    record = store.installed()[0]
    named = attrs.evolve(
        record, recipe=attrs.evolve(record.recipe, os_packages={"libgomp.so.1": {"debian": "libgomp1"}})
    )
    store.installed = lambda: (named,)  # type: ignore[method-assign]
    problem = ProviderProblem("odd", "odd-plugin", "it is broken")
    made = EngineDoctor(store, Short(RealRunner(), None, StepClock()), Registry({}, (problem,)))  # type: ignore[arg-type]
    lines = {line.what: line for line in made.lines(facts(), ())}
    assert lines["small b1 cpu, libraries"].text() == (
        "BAD  small b1 cpu, libraries: libgomp.so.1 is missing -> run `apt-get install libgomp1` as root"
    )
    assert "odd-plugin" in lines["providers"].words


def test_a_named_engine_is_proven_line_by_line(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'version: 7 (abc)' >&2\nexit 0\n")
    binary.chmod(0o755)
    registry = Registry({"llama.cpp": LlamaCpp()})  # type: ignore[dict-item]
    with Http(use_proxies=False) as http:
        made = EngineDoctor(Store(tmp_path / "e", StepClock()), Prover(RealRunner(), http, StepClock()), registry)
        lines = list(made.lines(facts(), (NamedEngine("llama.cpp", {"bin": str(binary)}),)))
    assert [line.mark for line in lines] == [Mark.OK, Mark.BAD]
    assert lines[0].words == "version: 7 (abc)"
    assert "llama-server with the tiny model" in lines[1].what


def test_hardware_and_its_troubles_have_words() -> None:
    node = attrs.evolve(
        facts(system=attrs.evolve(DEBIAN, glibc=None)),
        cpu=CpuFacts("x86_64", 4, "Old CPU", flags=("sse4_2",), virtual=True),
        gpus=(GpuFacts("GPU-1", 0, "A100", memory_total_bytes=40 << 30, compute_cap="8.0", faulty="fell off the bus"),),
        fabrics=(FabricFacts("ib0", ("mlx5_0",), usable=Finding(Truth.NO, "port 1 of mlx5_0 is down")),),
    )
    lines = {line.what: line for line in node_lines(node, (NodeWarning("clock-skew", "the clock is off", 0.0),))}
    assert lines["C library"].mark is Mark.UNKNOWN
    assert lines["processor"].fix == "give this virtual machine the host's CPU type"
    assert (lines["GPU 0"].mark, lines["fabric ib0"].mark) == (Mark.BAD, Mark.BAD)
    assert lines["fabric ib0"].words == "port 1 of mlx5_0 is down"
    assert lines["clock-skew"].text() == "warn clock-skew: the clock is off"


def test_a_directory_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert directory_line("engines_dir", tmp_path / "new" / "deeper").mark is Mark.OK
    line = directory_line("engines_dir", Path("/proc/engines"))
    assert line.mark is Mark.BAD
    assert line.fix == "name another directory in agent.yaml"


@pytest.mark.parametrize(
    ("words", "last_error", "fix"),
    [
        (
            "the certificate expired 2d ago",
            "the certificate expired 2d ago",
            "docs/certificates.md says how to renew one",
        ),
        ("not connected: no route to host", "no route to host", "look at the agent's log"),
        ("not connected, trying again", "no route to host", "no route to host"),
    ],
)
def test_what_to_do_about_the_server_is_never_its_trouble_said_again(
    tmp_path: Path, words: str, last_error: str, fix: str
) -> None:
    (tmp_path / "status.json").write_text(
        json.dumps({"pid": os.getpid(), "connected": "no", "words": words, "last_error": last_error})
    )
    line = app_doctor._server(agent_settings.loads(f"server: http://a\nsupervisor: {{work_dir: {tmp_path}}}\n", "a"))
    assert (line.words, line.fix) == (words, fix)
