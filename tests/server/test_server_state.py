"""The state survives what a machine does to it, and says in words what it cannot survive."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaSpec
from llmgw.domain.rollout import Assignment
from llmgw.domain.routing import RouteKey
from llmgw.errors import LockHeld, StateError
from llmgw.server import schema
from llmgw.server.state import open_state

QWEN = Profile("qwen", "/m.gguf", args=("--a", "b"), node_selector={"rack": "r1"}, memory_bytes=5)
SPEC = ReplicaSpec("qwen#0", 7, "qwen", "qwen", "/m.gguf", "llama.cpp", "b1", 1, 2, ("gpu-a",), api_key="secret")

WRITER = """
import sys
from llmgw.domain.profiles import Profile
from llmgw.server.state import open_state
state = open_state(sys.argv[1])
number = int(sys.argv[2])
while True:
    number += 1
    state.put_profile(Profile(f"p{number}", "m"), 1.0)
    print(number, flush=True)
"""


@pytest.fixture
def where(tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "state.db")


def test_everything_comes_back_and_the_epoch_rises_at_each_start(where: str) -> None:
    state = open_state(where)
    first, identity = state.epoch, state.server_id
    assert state.put_profile(QWEN, 1.0) is True
    assert state.put_profile(QWEN, 2.0) is False
    assert state.put_profile(evolve(QWEN, slots=9), 3.0) is True
    item = Assignment(0, "n1", SPEC, 99, "10.0.0.1", 77)
    state.reassign([item, evolve(item, index=1, spec=evolve(SPEC, replica_id="qwen#1"))], [])
    state.reassign([], ["qwen#1"])
    state.add_node("n1", 1.0)
    assert state.add_key(RouteKey("ann", "ab" * 32, ("qwen",)), 4.0) is True
    assert state.add_key(RouteKey("ann", "cd" * 32), 4.0) is False
    assert (state.next_epoch(3), state.next_epoch(1)) == (1, 4)
    state.close()

    state = open_state(where)
    assert (state.epoch, state.server_id) == (first + 1, identity)
    assert [(kept.profile, kept.created) for kept in state.profiles()] == [(evolve(QWEN, slots=9), 1.0)]
    assert state.assignments() == (item,)
    assert state.assignments()[0].spec.api_key == "secret"
    assert state.nodes() == ("n1",)
    assert [kept.key for kept in state.client_keys()] == [RouteKey("ann", "ab" * 32, ("qwen",))]
    assert state.next_epoch(1) == 5
    assert state.delete_profile("qwen") is True
    assert state.delete_profile("qwen") is False
    assert state.delete_key("ann") is True
    state.close()


def test_nobody_else_can_read_the_files(where: str) -> None:
    state = open_state(where)
    state.put_profile(QWEN, 1.0)
    files = [path for path in Path(where).parent.iterdir() if not path.name.endswith(".lock")]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert Path(where).parent.stat().st_mode & 0o777 == 0o700
    state.close()


def test_a_second_server_is_told_who_has_the_state(where: str) -> None:
    state = open_state(where)
    with pytest.raises(LockHeld, match=f"llmgw server \\(pid {os.getpid()}\\)"):
        open_state(where)
    state.close()
    open_state(where).close()


def test_a_server_killed_in_the_middle_of_writing_loses_nothing_it_said_was_kept(where: str) -> None:
    last = 0
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, where, str(last)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(25):
                last = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            last = max([last, *(int(line) for line in writer.stdout.read().split("\n") if line)])
    state = open_state(where)
    names = {kept.profile.name for kept in state.profiles()}
    assert {f"p{number}" for number in range(1, last + 1)} <= names
    assert state.epoch == 5
    state.close()


def test_a_file_that_is_no_database_is_left_alone_and_words_say_what_to_do(where: str) -> None:
    Path(where).parent.mkdir()
    Path(where).write_bytes(b"not a database at all" * 100)
    with pytest.raises(StateError) as caught:
        open_state(where)
    assert caught.value.cause == "file is not a database"
    assert "restore the file from a backup" in caught.value.hint
    assert Path(where).read_bytes().startswith(b"not a database")


def test_a_database_of_a_newer_version_is_refused(where: str) -> None:
    open_state(where).close()
    with sqlite3.connect(where) as db:
        db.execute("INSERT INTO migrations VALUES (99, 'x')")
    db.close()
    with pytest.raises(StateError, match="written by a newer llmgw"):
        open_state(where)


def test_an_older_schema_is_brought_up_to_date(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = open_state(where)
    state.put_profile(QWEN, 1.0)
    state.close()
    more = (*schema.MIGRATIONS, "CREATE TABLE later (x INTEGER) STRICT; INSERT INTO later VALUES (5)")
    monkeypatch.setattr(schema, "MIGRATIONS", more)
    open_state(where).close()
    state = open_state(where)
    assert [kept.profile for kept in state.profiles()] == [QWEN]
    state.close()
    with sqlite3.connect(where) as db:
        assert db.execute("SELECT x FROM later").fetchall() == [(5,)]
    db.close()


def test_postgresql_is_refused_with_words_and_without_its_password() -> None:
    with pytest.raises(StateError) as caught:
        open_state("postgresql://user:hunter2@db/llmgw")
    assert "SQLite only" in caught.value.cause
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot create"):
        open_state(str(tmp_path / "file" / "state.db"))
