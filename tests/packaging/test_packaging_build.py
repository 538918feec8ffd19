"""The one file: the same bytes from everywhere; inside, every CPython minor, one architecture, verified parts only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest_packaging import MINORS, ROOT, build

import llmgw

sys.path.insert(0, str(ROOT / "scripts"))
import lib_build_elf as elf

COPIED = ("src", "scripts", "pyproject.toml", "README.md", "LICENSE", "requirements.lock", "requirements-build.lock")


def libraries(pyz: Path) -> dict[str, str]:
    with zipfile.ZipFile(pyz) as archive:
        found = {name: elf.machine(archive.read(name)[:64]) for name in archive.namelist()}
    return {name: machine for name, machine in found.items() if machine}


def test_two_directories_and_two_times_give_the_same_bytes(pyz, tmp_path):
    other = tmp_path / "elsewhere" / "with a space"
    other.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, other / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, other / name)
    for path in other.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    made = build("--force", root=other, umask=0o077, TZ="Asia/Tokyo", PYTHONHASHSEED="7")
    assert made.is_relative_to(other)
    assert hashlib.sha256(made.read_bytes()).hexdigest() == hashlib.sha256(pyz.read_bytes()).hexdigest()
    assert not (other / "build").exists()


def test_an_unchanged_tree_is_not_built_again(pyz):
    before = pyz.stat().st_mtime_ns
    assert build().stat().st_mtime_ns == before


def test_the_sums_are_those_of_the_files(pyz):
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=pyz.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{pyz.name}: OK" in done.stdout


def test_compiled_parts_are_there_for_every_minor_and_have_no_symbols(pyz):
    names = "\n".join(libraries(pyz))
    for part in ("_cffi_backend", "msgspec/_core", "httptools/parser/parser"):
        for minor in MINORS:
            assert f"{part}.cpython-{minor.replace('.', '')}-" in names
    assert "yaml/_yaml" not in names
    with zipfile.ZipFile(pyz) as archive:
        for name in libraries(pyz):
            assert archive.read(name)[40:48] == bytes(8), f"{name} has a section table"


def test_the_file_for_aarch64_holds_aarch64_code_only(tmp_path):
    made = build("--arch", "aarch64")
    found = libraries(made)
    assert len(found) > 10
    assert set(found.values()) == {"aarch64"}
    assert {m for name in found for m in re.findall(r"-(x86_64|aarch64)-linux", name)} == {"aarch64"}
    assert made.name == f"llmgw-{llmgw.__version__}-linux-aarch64.pyz"


def test_every_part_is_in_the_lock_and_in_the_bill_of_materials(pyz):
    lock = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    bill = json.loads(pyz.with_suffix(".cdx.json").read_text())
    assert {c["name"]: c["version"] for c in bill["components"]} == lock
    digests = set(re.findall(r"sha256:([0-9a-f]{64})", (ROOT / "requirements.lock").read_text()))
    assert {p["value"].removeprefix("sha256:") for c in bill["components"] for p in c["properties"]} <= digests
    with zipfile.ZipFile(pyz) as archive:
        inside = {n.split("/")[1].split("-")[0] for n in archive.namelist() if ".dist-info/METADATA" in n}
    assert {name.replace("_", "-").lower() for name in inside} == {*lock, "llmgw"}
    assert bill["metadata"]["component"]["hashes"][0]["content"] == hashlib.sha256(pyz.read_bytes()).hexdigest()


def test_the_lock_satisfies_the_project(pyz):
    import tomllib

    lock = re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split(r"[^A-Za-z0-9-]", each)[0].lower() for each in wanted} <= set(lock), "run scripts/lock.sh"


PLUGIN = """
from llmgw.providers.llamacpp import LlamaCpp


class Mine(LlamaCpp):
    name = "mine"
"""
ASK = "from llmgw.providers.registry import load; r = load(); print(sorted(r.providers), r.problems)"


@pytest.fixture
def plugin(tmp_path):
    made = tmp_path / "llmgw-mine"
    made.mkdir()
    (made / "llmgw_mine.py").write_text(PLUGIN)
    (made / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "llmgw-mine"\nversion = "1"\ndependencies = ["attrs"]\n'
        '[tool.setuptools]\npy-modules = ["llmgw_mine"]\n'
        '[project.entry-points."llmgw.providers"]\nmine = "llmgw_mine:Mine"\n'
    )
    return made


def test_a_third_party_provider_is_built_in_and_the_sums_cover_it(plugin, tmp_path):
    made = build("--with", str(plugin), "--out", str(tmp_path / "dist"))
    env = {"PATH": os.environ["PATH"], "SHIV_ROOT": str(tmp_path / "shiv"), "SHIV_INTERPRETER": "1"}
    done = subprocess.run([sys.executable, "-IS", made, "-c", ASK], capture_output=True, text=True, env=env)
    assert "'mine'" in done.stdout, done.stderr
    assert "llama.cpp" in done.stdout
    assert made.name in (made.parent / "SHA256SUMS").read_text()
    assert "llmgw-mine" in made.with_suffix(".cdx.json").read_text()
