from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from probe_fakes import make_tree

from llmgw.domain.facts import CpuFacts
from llmgw.domain.warnings import avx2_words
from llmgw.errors import CommandError
from llmgw.probe import child, cpu
from llmgw.probe.tree import Tree
from llmgw.system.commands import Completed, RealRunner

V1 = "fpu sse sse2 syscall nx lm"
V2 = f"{V1} cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2"
V3 = f"{V2} avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def cpuinfo(*flags: str, key: str = "flags", name: str = "model name\t: Some CPU @ 2.00GHz\n") -> str:
    return "\n".join(f"processor\t: {n}\n{name}{key}\t\t: {text}\n" for n, text in enumerate(flags))


class Broken:
    """A Runner whose programs cannot be started; counts the tries."""

    def __init__(self) -> None:
        self.tries = 0

    def run(self, argv, **_):
        self.tries += 1
        raise CommandError(f"cannot run `{argv[0]}`", cause="no")


@pytest.mark.parametrize(("flags", "level"), [(V1, 1), (V2, 2), (V3, 3), (V4, 4), (V4.replace("movbe ", ""), 2)])
def test_the_x86_level_needs_every_flag_of_the_levels_below(flags, level):
    assert cpu.x86_level(flags.split()) == level


def test_flags_are_those_every_processor_has(tmp_path):
    root = make_tree(tmp_path, {"/proc/cpuinfo": cpuinfo(f"{V3} hypervisor", f"{V2} hypervisor extra")})
    facts = cpu.cpu_facts(Tree(root), "x86_64", None)
    assert facts.cores == 2
    assert facts.level == 2
    assert facts.virtual is True
    assert set(facts.flags or ()) == set(f"{V2} hypervisor".split())


def test_an_arm_cpu_has_features_no_level_and_its_trailer_is_no_processor(tmp_path):
    text = cpuinfo("fp asimd asimddp sve", "fp asimd asimddp", key="Features", name="BogoMIPS\t: 50\n")
    root = make_tree(tmp_path, {"/proc/cpuinfo": text + "\nHardware\t: BCM2835\nModel\t\t: Some Board\n"})
    facts = cpu.cpu_facts(Tree(root), "aarch64", None)
    assert facts == CpuFacts("aarch64", 2, None, ("asimd", "asimddp", "fp"), None, None)


def test_nothing_readable_is_unknown_not_zero(tmp_path):
    facts = cpu.cpu_facts(Tree(str(tmp_path)), "x86_64", None)
    assert (facts.cores, facts.flags, facts.level, facts.virtual) == (None, None, None, None)


def test_a_vm_without_avx2_is_told_its_cpu_type_and_a_machine_is_not():
    flags = tuple(V2.split())
    assert "set the VM's CPU type to `host` or `x86-64-v3`" in (
        avx2_words(CpuFacts("x86_64", flags=flags, virtual=True)) or ""
    )
    assert "VM" not in (avx2_words(CpuFacts("x86_64", flags=flags, virtual=False)) or "VM")
    assert avx2_words(CpuFacts("x86_64", flags=tuple(V3.split()))) is None
    assert avx2_words(CpuFacts("aarch64", flags=("asimd",))) is None
    assert avx2_words(CpuFacts("x86_64", flags=None)) is None


def test_the_name_is_asked_for_once_per_boot_and_survives_a_restart(tmp_path):
    work = tmp_path / "work"
    first = cpu.CpuName(Tree(), RealRunner(), str(work)).get("boot-1")
    assert first
    assert json.loads((work / "cpu-name.json").read_text()) == {"boot_id": "boot-1", "name": first}
    (work / "cpu-name.json").write_text(json.dumps({"boot_id": "boot-1", "name": "Remembered CPU"}))
    broken = Broken()
    assert cpu.CpuName(Tree(), broken, str(work)).get("boot-1") == "Remembered CPU"
    assert broken.tries == 0
    assert cpu.CpuName(Tree(), broken, str(work)).get("boot-2") != "Remembered CPU"
    assert broken.tries == 1


def test_without_a_child_the_kernels_model_name_is_taken(tmp_path):
    root = make_tree(tmp_path / "root", {"/proc/cpuinfo": cpuinfo(V1)})
    assert cpu.CpuName(Tree(root), Broken(), str(tmp_path / "work")).get("b") == "Some CPU @ 2.00GHz"


def test_a_read_only_or_damaged_work_dir_stops_nothing(tmp_path):
    root = make_tree(tmp_path / "root", {"/proc/cpuinfo": cpuinfo(V1)})
    (tmp_path / "file").write_text("not a directory")
    assert cpu.CpuName(Tree(root), Broken(), str(tmp_path / "file")).get("b") == "Some CPU @ 2.00GHz"
    (tmp_path / "cpu-name.json").write_text('{"boot_id": 7')
    assert cpu.CpuName(Tree(root), Broken(), str(tmp_path)).get("b") == "Some CPU @ 2.00GHz"


def test_a_child_imports_what_we_import_and_nothing_from_its_environment(tmp_path, monkeypatch):
    (tmp_path / "only_on_our_path.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = lambda argv, timeout: RealRunner().run(argv, timeout_s=timeout)  # noqa: E731
    code = "import only_on_our_path\nprint('noise')\nprint(json.dumps({'answer': only_on_our_path.ANSWER}))"
    assert child.run_python(code, run, 20)["answer"] == 42
    assert all(Path(entry).is_absolute() for entry in child.import_path())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('it broke')", "exited 1: it broke"),
        ("print('[1]')", "no usable answer"),
        ("pass", "no usable answer"),
        ("import os; os.kill(os.getpid(), 4)", "SIGILL"),
    ],
)
def test_a_child_that_fails_says_how(code, words):
    with pytest.raises(CommandError) as caught:
        child.run_python(code, lambda argv, timeout: RealRunner().run(argv, timeout_s=timeout), 20)
    assert words in caught.value.words()


def test_without_an_interpreter_of_our_own_there_is_no_child(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(CommandError, match="does not know its own interpreter"):
        child.run_python("pass", lambda argv, _: Completed(tuple(argv), 0, "{}", ""), 1)
