"""What was unpacked is kept while somebody runs from it, and goes afterwards; plugins come from a directory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llmgw.system import plugins, unpacked

HOLD = "from llmgw.system import unpacked; unpacked.hold(); print('held', flush=True); input()"


@pytest.fixture
def installed(tmp_path):
    """Three releases: an old one, the one before, and the current one, each unpacked."""
    lib = tmp_path / "lib"
    root = lib / "unpacked"
    for version in ("1", "2", "3"):
        (root / f"llmgw-{version}-linux-x.pyz_aa" / "site-packages").mkdir(parents=True)
        (lib / f"llmgw-{version}-linux-x.pyz").write_text("")
    (lib / "previous").symlink_to("llmgw-2-linux-x.pyz")
    (lib / "current").symlink_to("llmgw-3-linux-x.pyz")
    (lib / ".llmgw-9-linux-x.pyz.part").write_text("half")
    return lib


def left(lib):
    return sorted(p.name.split("-")[1] for p in (lib / "unpacked").glob("llmgw-*"))


def test_only_what_is_older_than_the_release_before_goes(installed):
    said = unpacked.clean(installed / "unpacked", installed)
    assert left(installed) == ["2", "3"]
    assert sorted(p.name for p in installed.glob("*.pyz")) == ["llmgw-2-linux-x.pyz", "llmgw-3-linux-x.pyz"]
    assert not list(installed.glob(".*.part"))
    assert len(said) == 3
    assert unpacked.clean(installed / "unpacked", installed) == []


def test_a_tree_somebody_runs_from_stays_until_that_process_ends(installed, pyz):
    root = installed / "unpacked"
    old = installed / "llmgw-0-linux-x.pyz"
    old.write_bytes(pyz.read_bytes())
    env = {"PATH": os.environ["PATH"], "SHIV_ROOT": str(root), "SHIV_INTERPRETER": "1"}
    argv = [sys.executable, "-IS", str(old), "-c", HOLD]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "held\n"
        unpacked.clean(root, installed)
        assert left(installed) == ["0", "2", "3"]
        running.communicate("\n", timeout=20)
    unpacked.clean(root, installed)
    assert left(installed) == ["2", "3"]


ASK = """
import sys
from llmgw.system import plugins
print(repr(plugins.add(sys.argv[1])))
from llmgw.providers.registry import load
found = load()
print(sorted(found.providers), found.problems)
import attrs
print(attrs.__file__)
"""


@pytest.fixture
def directory(tmp_path):
    made = tmp_path / "plugins"
    info = made / "llmgw_mine-1.dist-info"
    info.mkdir(parents=True)
    (made / "llmgw_mine.py").write_text(
        "from llmgw.providers.llamacpp import LlamaCpp\n\n\nclass Mine(LlamaCpp):\n    name = 'mine'\n"
    )
    (made / "attrs.py").write_text("raise SystemExit('shadowed')\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llmgw-mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[llmgw.providers]\nmine = llmgw_mine:Mine\n")
    made.chmod(0o755)
    return made


def ask(pyz, directory, tmp_path):
    env = {"PATH": os.environ["PATH"], "SHIV_ROOT": str(tmp_path / "root"), "SHIV_INTERPRETER": "1"}
    argv = [sys.executable, "-IS", str(pyz), "-c", ASK, str(directory)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_provider_in_the_plugin_directory_is_found_and_shadows_nothing(pyz, directory, tmp_path):
    said = ask(pyz, directory, tmp_path)
    assert "'mine'" in said
    assert "llama.cpp" in said
    assert str(tmp_path / "root") in said.splitlines()[-1]


def test_a_plugin_directory_others_can_write_to_is_left_out_with_words(directory):
    directory.chmod(0o777)
    assert "other users can write there" in plugins.add(str(directory))
    assert str(directory) not in sys.path
    assert plugins.add(str(directory / "nothing")) == ""
