"""The very file runs on every CPython there is, and unpacks itself wherever a service may be."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from flows_cluster import Cluster, sweep

import llmgw

# A user nobody has heard of: no entry in passwd, no home.
NOBODY = 54321


@pytest.fixture
def cluster(pyz, interpreter, tmp_path):
    made = Cluster(tmp_path / "cluster", [interpreter, "-IS", str(pyz)])
    yield made
    try:
        made.close()
    finally:
        sweep(made.root)


@pytest.mark.timeout(180)
def test_version_server_agent_and_chat_on_every_python(cluster, release_dir, tiny_gguf):
    done = subprocess.run([*cluster.command, "--version"], capture_output=True, text=True, env=cluster.env)
    assert done.stdout == f"llmgw {llmgw.__version__}\n", done.stderr
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{release_dir}"])
    cluster.start_agent(model_dirs=[str(tiny_gguf.parent)])
    cluster.await_engine("ready")
    cluster.apply(name="tiny", model="tiny.gguf", context=256, slots=1)
    cluster.await_model("tiny")
    status, answer = cluster.chat("tiny")
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"].strip()
    assert cluster.node()["version"] == llmgw.__version__


@pytest.mark.parametrize("minor", ["3.9", "3.10"])
def test_a_python_that_is_too_old_gets_words(pyz, minor, tmp_path):
    from conftest_packaging import find_interpreter

    python = find_interpreter(minor)
    if python is None:
        pytest.skip(f"no CPython {minor} here")
    done = subprocess.run([python, pyz, "ctl", "nodes"], capture_output=True, text=True, env={"HOME": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("error: llmgw needs Python 3.11 or newer")
    assert minor in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def run(pyz: Path, *argv: str, user: int | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    before = []
    if user is not None:
        before = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--no-new-privs"]
    command = [*before, sys.executable, "-IS", str(pyz), *(argv or ("--version",))]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"], **env}, timeout=60)


@pytest.fixture
def shared(pyz):
    """The executable under a name nothing was unpacked for yet, readable by everybody."""
    directory = Path("/var/tmp") / f"llmgw-test-{uuid.uuid4().hex[:8]}"
    directory.mkdir(mode=0o755)
    copy = directory / f"llmgw-{uuid.uuid4().hex[:8]}.pyz"
    copy.write_bytes(pyz.read_bytes())
    copy.chmod(0o755)
    yield copy
    subprocess.run(["rm", "-rf", directory, *Path("/var/tmp").glob(f"llmgw-unpacked-{NOBODY}*")], check=True)
    subprocess.run(["rm", "-rf", *Path("/tmp").glob(f"llmgw-unpacked-{NOBODY}*")], check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def good(done: subprocess.CompletedProcess[str]) -> bool:
    assert done.returncode == 0, done.stderr
    return done.stdout == f"llmgw {llmgw.__version__}\n"


@needs_root
def test_a_user_without_a_home_and_without_a_passwd_entry(shared):
    assert good(run(shared, user=NOBODY))
    tree = Path(f"/var/tmp/llmgw-unpacked-{NOBODY}")
    assert stat.S_IMODE(tree.stat().st_mode) == 0o700
    assert tree.stat().st_uid == NOBODY


@needs_root
def test_a_home_that_cannot_be_written_to(shared, tmp_path):
    tmp_path.chmod(0o755)
    assert good(run(shared, user=NOBODY, HOME=str(tmp_path)))
    assert not (tmp_path / ".shiv").exists()


@needs_root
def test_a_services_own_directory_is_used_before_a_temporary_one(shared):
    cache = shared.parent / "cache"
    cache.mkdir()
    os.chown(cache, NOBODY, NOBODY)
    assert good(run(shared, user=NOBODY, HOME="/nonexistent", CACHE_DIRECTORY=str(cache)))
    assert [p.name.startswith(shared.name) for p in (cache / "llmgw-unpacked").glob("[!.]*")] == [True]


@needs_root
def test_a_temporary_directory_somebody_else_prepared_is_not_used(shared):
    for base in ("/var/tmp", "/tmp"):
        Path(base, f"llmgw-unpacked-{NOBODY}").mkdir(mode=0o777)
    done = run(shared, user=NOBODY)
    assert done.returncode == 1
    assert "nowhere to unpack itself" in done.stderr
    assert "SHIV_ROOT" in done.stderr


@needs_root
def test_a_temporary_tree_with_a_gap_is_unpacked_anew(shared):
    assert good(run(shared, user=NOBODY))
    (tree,) = Path(f"/var/tmp/llmgw-unpacked-{NOBODY}").glob("llmgw-*")
    (tree / "site-packages" / "click" / "core.py").unlink()
    assert good(run(shared, user=NOBODY))
    assert (tree / "site-packages" / "click" / "core.py").exists()


def test_what_its_owner_unpacked_beside_the_file_serves_everybody(shared, tmp_path):
    unpacked = shared.parent / "unpacked"
    unpacked.mkdir(mode=0o755)
    assert good(run(shared, HOME=str(tmp_path)))
    (tree,) = unpacked.glob("llmgw-*")
    before = sorted(p for p in unpacked.rglob("*") if p.suffix != ".pyc" and p.name != "__pycache__")
    if os.geteuid() == 0:
        assert good(run(shared, user=NOBODY))
    assert sorted(p for p in unpacked.rglob("*") if p.suffix != ".pyc" and p.name != "__pycache__") == before
    assert all(stat.S_IMODE(p.stat().st_mode) & 0o044 == 0o044 for p in tree.rglob("*"))
    assert not (tmp_path / ".shiv").exists()


def test_two_first_starts_at_once_unpack_once(shared, tmp_path):
    argv = [sys.executable, "-IS", str(shared), "--version"]
    env = {"PATH": os.environ["PATH"], "SHIV_ROOT": str(tmp_path / "root")}
    starts = [
        subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [each.communicate(timeout=60) for each in starts]
    assert said == [(f"llmgw {llmgw.__version__}\n", "")] * 2
    assert len(list((tmp_path / "root").glob("[!.]*"))) == 1


def test_code_planted_in_pythonpath_or_the_current_directory_is_not_run(shared, tmp_path):
    (tmp_path / "click.py").write_text("raise SystemExit('planted')")
    env = {"PATH": os.environ["PATH"], "SHIV_ROOT": str(tmp_path / "root"), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([shared, "--version"], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert good(done)
