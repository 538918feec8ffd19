"""The numbered archives on every Python there is: one verdict, nothing outside touched, bounded time and memory.

`LLMGW_TEST_PYTHONS` (paths, separated by `:`) adds interpreters to those found on PATH and below PYENV_ROOT. They need
no packages: the extractor runs with the standard library and attrs alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attr
import attrs
import install_corpus as corpus
import pytest

import llmgw

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
HERE = Path(__file__).parent


def _version(python: str) -> str | None:
    try:
        done = subprocess.run(
            [python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _candidates() -> Iterator[str]:
    yield sys.executable
    yield from filter(None, os.environ.get("LLMGW_TEST_PYTHONS", "").split(":"))
    for version in SUPPORTED:
        if found := shutil.which(f"python{version}"):
            yield found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob("versions/3.1[1-9]*/bin/python")))


@pytest.fixture(scope="module")
def pythons() -> dict[str, str]:
    """Version -> interpreter."""
    found: dict[str, str] = {}
    for python in _candidates():
        if version := _version(python):
            found.setdefault(version, python)
    return found


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.lay_out(tmp_path_factory.mktemp("corpus") / "archives")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path with llmgw and attrs, and nothing else."""
    site = tmp_path_factory.mktemp("site")
    for module in (llmgw, attr, attrs):
        (site / module.__name__).symlink_to(Path(str(module.__file__)).parent)
    return site


def test_every_number_has_its_archive_and_its_verdict() -> None:
    cases = corpus.cases()
    assert {corpus.number(name) for name in cases} >= set(corpus.NUMBERS)
    verdicts = {(corpus.number(name), verdict) for name, (verdict, _) in cases.items() if corpus.number(name)}
    assert {number for number, verdict in verdicts if verdict == corpus.ACCEPTED} == set(corpus.ACCEPTED_NUMBERS)
    assert len(verdicts) == len(corpus.NUMBERS), "each number has one verdict only"


@pytest.mark.parametrize("version", SUPPORTED)
def test_each_python_comes_to_the_same_verdicts(
    version: str, pythons: dict[str, str], laid_out: Path, packages: Path, tmp_path: Path
) -> None:
    if version not in pythons:
        pytest.skip(f"no Python {version} on this machine; name one in LLMGW_TEST_PYTHONS")
    done = subprocess.run(
        [pythons[version], "-s", "-B", HERE / "unpack_each.py", laid_out, tmp_path / "jail"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    expected = json.loads((laid_out / "cases.json").read_text())
    assert [row["case"] for row in rows] == [each["case"] for each in expected], done.stderr[-2000:]
    assert [wrong for row in rows if (wrong := _wrong(row))] == []


def _wrong(row: dict[str, Any]) -> str:
    told, number = row["told"], corpus.number(row["case"])
    faults = []
    if told["verdict"] != row["verdict"]:
        faults.append(f"{told['verdict']} ({told['words']})")
    if told["strange"] or not told["untouched"]:
        faults.append(f"outside changed or strange files: {told['strange']}")
    if told["cpu_s"] >= 5 or told["rss_mib"] >= 150:
        faults.append(f"took {told['cpu_s']:.1f} s and {told['rss_mib']:.0f} MiB")
    if row["verdict"] == corpus.REFUSED:
        words = told["words"]
        if number and number not in corpus.NAMELESS and "because of its member `" not in words:
            faults.append(f"names no member: {words}")
        if not words.isprintable() or "\x1b" in words:
            faults.append(f"words are not escaped: {words!a}")
        if told.get("code") != "archive-refused":
            faults.append(f"code {told.get('code')}")
    return f"{row['case']}: {'; '.join(faults)}" if faults else ""


def test_modes_come_out_normalised(pythons: dict[str, str], packages: Path, tmp_path: Path) -> None:
    made = {name: make for name, make in corpus.accepted().items() if corpus.number(name) in (40, 41, 1)}
    for at, (_, make) in enumerate(sorted(made.items())):
        archive = tmp_path / f"{at}.archive"
        archive.write_bytes(make())
        out = tmp_path / f"out-{at}"
        subprocess.run(
            [sys.executable, "-c", "import os, sys; os.umask(0); from pathlib import Path;"
             "from llmgw.install.unpack import unpack; unpack(Path(sys.argv[1]), Path(sys.argv[2]))", archive, out],
            check=True,
        )  # fmt: skip
        modes = {path.stat().st_mode & 0o7777 for path in out.rglob("*")}
        assert modes <= {0o755, 0o644}
