"""A file is the old one or the new one; a lock names its holder; space is that of the nearest existing parent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.errors import FileError, LockHeld
from llmgw.system.files import free_space, lock, make_dir, read_text, write_atomic


def test_write_replaces_content_and_sets_the_mode(tmp_path):
    path = tmp_path / "f"
    write_atomic(path, b"one", 0o600)
    write_atomic(path, b"two", 0o600)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_failed_write_keeps_the_old_content_and_leaves_nothing(tmp_path):
    path = tmp_path / "d"
    path.mkdir()
    (path / "inside").touch()
    with pytest.raises(FileError, match="cannot write"):
        write_atomic(path, b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_killed_at_any_moment_the_file_is_whole(tmp_path):
    path = tmp_path / "f"
    program = f"""
from pathlib import Path
from llmgw.system.files import write_atomic
print("go", flush=True)
n = 0
while True:
    n += 1
    write_atomic(Path({str(path)!r}), (str(n) * 20000).encode() + b"END")
"""
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        child.stdout.readline()
        while not path.exists():
            pass
        child.kill()
        child.wait()
        child.stdout.close()
        assert path.read_bytes().endswith(b"END")


def test_a_lock_is_exclusive_between_processes_and_names_its_holder(tmp_path):
    path = tmp_path / "lock"
    program = f"""
from pathlib import Path
from llmgw.system.files import lock
with lock(Path({str(path)!r}), "the first agent"):
    print("held", flush=True); input()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"held\n"
    with pytest.raises(LockHeld, match=f"the first agent \\(pid {child.pid}\\)"), lock(path, "me"):
        pass
    child.communicate(b"\n")
    with lock(path, "me"):
        assert f"me (pid {os.getpid()})" in path.read_text()


def test_space_of_a_path_that_does_not_exist_yet_is_its_parents(tmp_path):
    assert free_space(tmp_path / "a" / "b").device == tmp_path.stat().st_dev
    assert free_space(tmp_path).free_bytes > 0


def test_a_directory_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot create"):
        make_dir(tmp_path / "file" / "x")


def test_reading_what_is_not_there_is_none(tmp_path):
    assert read_text(tmp_path / "no") is None
    assert read_text(Path("/proc/self/comm"))
