"""Trees and records: whole or absent, whatever happened in between."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from install_fakes import Shelf, StepClock, facts
from install_small import Small, pipeline, release

from llmgw.domain.engines import EngineSpec, Recipe
from llmgw.errors import InstallError, LockHeld
from llmgw.install.store import Store

SPEC = EngineSpec("small", "b1", sources=("shelf",))
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate"}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    release(tmp_path / "release")
    return Shelf(tmp_path / "release")


def install(root: Path, shelf: Shelf) -> None:
    pipeline(root, shelf).install(SPEC, Small(), facts(), lambda *_: None, threading.Event())


def test_an_installed_engine_is_found_and_verified(tmp_path: Path, shelf: Shelf) -> None:
    install(tmp_path / "engines", shelf)
    store = Store(tmp_path / "engines", StepClock())
    record = store.find("small", "b1")
    assert record is not None
    assert store.verify(record) is None
    assert store.verify(record, full=True) is None
    assert set(record.files) == {"engine", "libx.so", "libx.so.0.1"}
    assert record.proofs[0].title == "--version"
    assert store.engine(record).binary == str(tmp_path / "engines/small/b1-cpu/engine")
    assert sorted(path.name for path in (tmp_path / "engines").iterdir()) == [".lock", ".records", "small"]


def _drop(tree: Path) -> None:
    (tree / "libx.so.0.1").unlink()


def _mode(tree: Path) -> None:
    (tree / "engine").chmod(0o644)


def _add(tree: Path) -> None:
    (tree / "libggml-evil.so").write_text("x")


def _relink(tree: Path) -> None:
    (tree / "libx.so").unlink()
    (tree / "libx.so").symlink_to("engine")


def _shorten(tree: Path) -> None:
    with (tree / "engine").open("r+b") as handle:
        handle.truncate(100)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_drop, "is gone from"),
        (_mode, "has changed"),
        (_add, "was added"),
        (_relink, "has changed"),
        (_shorten, "changed"),
    ],
)
def test_a_changed_tree_is_noticed(tmp_path: Path, shelf: Shelf, harm, words: str) -> None:  # type: ignore[no-untyped-def]
    install(tmp_path / "engines", shelf)
    store = Store(tmp_path / "engines", StepClock())
    record = store.find("small", "b1")
    assert record is not None
    harm(tmp_path / "engines/small/b1-cpu")
    assert words in (store.verify(record) or "")


def test_content_changed_behind_size_and_time_is_noticed_by_a_full_look(tmp_path: Path, shelf: Shelf) -> None:
    install(tmp_path / "engines", shelf)
    store = Store(tmp_path / "engines", StepClock())
    record = store.find("small", "b1")
    assert record is not None
    path = tmp_path / "engines/small/b1-cpu/libx.so.0.1"
    before = path.stat()
    path.write_bytes(b"LIBRARY")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.verify(record) is None
    assert "has changed" in (store.verify(record, full=True) or "")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe", b'{"format": 2, "recipe": {}}'])
def test_an_unreadable_record_means_absent(tmp_path: Path, shelf: Shelf, content: bytes) -> None:
    install(tmp_path / "engines", shelf)
    (tmp_path / "engines/.records/small/b1-cpu.json").write_bytes(content)
    assert Store(tmp_path / "engines", StepClock()).installed() == ()


def test_a_record_that_speaks_of_another_tree_means_absent(tmp_path: Path, shelf: Shelf) -> None:
    install(tmp_path / "engines", shelf)
    path = tmp_path / "engines/.records/small/b1-cpu.json"
    data = json.loads(path.read_text())
    data["recipe"]["version"] = "../../b1"
    path.write_text(json.dumps(data))
    assert Store(tmp_path / "engines", StepClock()).installed() == ()


def test_what_a_kill_left_behind_is_swept(tmp_path: Path, shelf: Shelf) -> None:
    root = tmp_path / "engines"
    install(root, shelf)
    (root / ".staging-old/tree").mkdir(parents=True)
    (root / "small/b2-cpu").mkdir()
    (root / ".records/small/b3-cpu.json").write_text("{}")
    (root / ".records/small/.b1-cpu.json.x.tmp").write_text("half")
    store = Store(root, StepClock())
    with store.locked():
        removed = store.sweep()
    assert removed == (
        ".staging-old",
        "small/b2-cpu",
        ".records/small/.b1-cpu.json.x.tmp",
        ".records/small/b3-cpu.json",
    )
    assert [record.recipe.version for record in store.installed()] == ["b1"]


def test_removing_leaves_neither_tree_nor_record(tmp_path: Path, shelf: Shelf) -> None:
    root = tmp_path / "engines"
    install(root, shelf)
    store = Store(root, StepClock())
    record = store.find("small", "b1")
    assert record is not None
    with store.locked():
        store.remove(record)
    assert store.installed() == ()
    assert list((root / "small").iterdir()) == []


def test_a_second_agent_is_kept_out(tmp_path: Path) -> None:
    first, second = Store(tmp_path, StepClock()), Store(tmp_path, StepClock())
    with first.locked(), pytest.raises(LockHeld, match="llmgw agent"), second.locked():
        pass


@pytest.mark.parametrize("version", ["../b1", "b1/..", "", ".b1", "b1\n", "a" * 200])
def test_a_version_that_is_no_file_name_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(InstallError, match="cannot be part of"):
        Store(tmp_path, StepClock()).tree("small", version, "cpu")


def _killed_install(root: Path, shelf: Shelf, at: int) -> int:
    """Install in a child that kills itself before its `at`-th change of the file system; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def hook(event: str, _: object) -> None:
            nonlocal seen
            if event in CHANGES:
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            install(root, shelf)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("broken_before", [False, True])
def test_a_kill_at_any_change_leaves_installed_or_absent(tmp_path: Path, shelf: Shelf, broken_before: bool) -> None:
    states = set()
    for at in range(1, 200, 6 if broken_before else 2):
        root = tmp_path / f"engines-{at}"
        allowed = {None}
        if broken_before:
            install(root, shelf)
            (root / "small/b1-cpu/libx.so.0.1").unlink()
            allowed.add(f"`libx.so.0.1` is gone from `{root}/small/b1-cpu`")
        status = _killed_install(root, shelf, at)
        store = Store(root, StepClock())
        records = store.installed()
        with store.locked():
            store.sweep()
        assert store.installed() == records
        assert {store.verify(record, full=True) for record in records} <= allowed
        assert {path.name for path in root.iterdir()} <= {".lock", ".records", ".downloads", "small"}
        assert records or not list((root / "small").glob("*"))
        states.add(bool(records))
        if at % 8 == 1:
            install(root, shelf)
            record = store.find("small", "b1")
            assert record is not None
            assert store.verify(record, full=True) is None
            assert isinstance(record.recipe, Recipe)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    else:
        pytest.fail("the installation never came to its end")
    assert states == {True, False}
    assert at > 15, "many points were tried"
