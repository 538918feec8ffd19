"""SIGKILL at every write, fsync, rename and unlink of the state an agent and a server keep.

`strace` kills the writer when it enters its N-th such system call, for every N there is. What is found afterwards has
to be the state before or after the step that was cut, and everything that was reported as kept has to be there. A power
cut is not the same: what the kernel has taken is not lost here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from chaos_lib.figures import Result

_CALLS = ("write", "pwrite64", "fsync", "fdatasync", "rename", "unlink", "ftruncate")


def run(quick: bool) -> Result:
    """Every point of each writer (quick: every tenth)."""
    result = Result("crash-points")
    if shutil.which("strace") is None:
        return result.skip("needs `strace`")
    step = 10 if quick else 1
    points = inconsistent = 0
    for name in ("agent", "server"):
        per_call = {}
        for call in _CALLS:
            with tempfile.TemporaryDirectory(prefix="llmgw-chaos-") as where:
                tried, bad = _every_point(name, call, Path(where), step)
            if tried:
                per_call[call] = tried
            inconsistent += len(bad)
            result.failures += [f"{name}: {each}" for each in bad[:5]]
        result.tell(**{f"{name}_points": per_call})
        points += sum(per_call.values())
    result.tell(points=points)
    result.must("inconsistent_states", inconsistent)
    return result


def _every_point(name: str, call: str, where: Path, step: int) -> tuple[int, list[str]]:
    """Kill the writer at its first, second, third … `call`, until it comes to its end; strace counts calls apart."""
    scripts = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, (str(scripts), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    tried, bad = 0, []
    for number in range(1, 2000, step):
        home = where / str(number)
        home.mkdir()
        done = subprocess.run(
            ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}",
             "-e", f"inject={call}:signal=KILL:when={number}",
             sys.executable, "-m", "chaos_lib.crash_points", name, str(home)],
            capture_output=True, text=True, env=env, timeout=120, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return tried, bad
        tried += 1
        if "Traceback" in done.stderr:
            return tried, [f"{call} {number}: {done.stderr[-500:]}"]
        told = (home / "told").read_text().split() if (home / "told").exists() else []
        problem = _CHECKS[name](home, told)
        if problem:
            bad.append(f"{call} {number}: {problem}")
        shutil.rmtree(home)
    return tried, [*bad, f"{call}: the writer never came to its end"]


# -- the writers: they tell each step that was reported as kept


def _tell(fd: int, words: str) -> None:
    os.write(fd, f"{words}\n".encode())


def _agent_writes(home: Path, told: int) -> None:
    """What an agent keeps: a handle and its changes, the API key, the epoch, its status, and the handle's end."""
    from attrs import evolve

    from llmgw.agent import handles
    from llmgw.system.files import write_atomic

    where = home / "replicas" / "m"
    handles.make_replica_dir(where)
    for epoch in range(1, 4):
        write_atomic(home / "epoch", f"{epoch}\n".encode())
        _tell(told, f"epoch:{epoch}")
        write_atomic(home / "status.json", b'{"epoch": %d}' % epoch)
        handles.write_key(where, f"key-{epoch}" * 8)
        handle = evolve(_handle(where), epoch=epoch)
        handles.save(handle)
        _tell(told, f"saved:{epoch}")
        handles.save(evolve(handle, ready=True))
        _tell(told, f"ready:{epoch}")
        if epoch == 2:
            handles.forget(where)
            _tell(told, "forgot:2")


def _handle(where: Path):
    from llmgw.agent.handles import VERSION, Handle

    return Handle(
        VERSION, "m#0", 0, "d", "m", "m", "fake", "1", 512, 1, "127.0.0.1", 20000, str(where), "m#0/1/ff", 0.0,
        "/health", (503,), 1.0, "/props", True,
    )  # fmt: skip


def _agent_problem(home: Path, told: list[str]) -> str:
    import json

    from llmgw.agent import handles
    from llmgw.errors import LlmgwError

    highest = max((int(each.partition(":")[2]) for each in told if each.startswith("epoch:")), default=0)
    epoch_file = home / "epoch"
    if highest and not epoch_file.exists():
        return "the epoch is gone"
    if epoch_file.exists():
        text = epoch_file.read_text()
        if text not in (f"{highest}\n", f"{highest + 1}\n"):
            return f"the epoch is {text!r}, {highest} was kept"
    if (home / "status.json").exists():
        json.loads((home / "status.json").read_text())
    where = home / "replicas" / "m"
    if not where.exists():
        return ""
    try:
        handle = handles.load(where)
    except LlmgwError as error:
        return f"the handle cannot be read: {error.words()}"
    kept = [each for each in told if not each.startswith("epoch:")]
    last = kept[-1] if kept else ""
    saved = int(last.partition(":")[2]) if last else 0
    if last.startswith(("saved", "ready")) and handle is None and last != "ready:2":
        return f"the handle is gone after {last}"
    if handle is not None and handle.epoch not in (saved, saved + 1):
        return f"the handle is of epoch {handle.epoch} after {last}"
    if last.startswith("ready") and handle is not None and handle.epoch == saved and not handle.ready:
        return f"the handle went back after {last}"
    key = handles.read_key(where)
    if key and key not in {f"key-{epoch}" * 8 for epoch in range(1, 4)}:
        return f"the key is torn: {key!r}"
    return ""


def _server_writes(home: Path, told: int) -> None:
    """What a server keeps: profiles, epochs, assignments, keys."""
    from llmgw.domain.profiles import Profile
    from llmgw.domain.routing import RouteKey

    with _state(home) as state:
        for number in range(3):
            state.put_profile(Profile(f"m{number}", "m.gguf"), float(number))
            _tell(told, f"profile:m{number}")
            epoch = state.next_epoch(1)
            _tell(told, f"epoch:{epoch}")
            state.reassign([_assignment(number, epoch)], [])
            _tell(told, f"assigned:m{number}#0")
            state.add_key(RouteKey(f"k{number}", f"{number}" * 64, ()), float(number))
            _tell(told, f"key:k{number}")
        state.delete_profile("m0")
        _tell(told, "deleted:m0")


def _state(home: Path):
    import contextlib

    from llmgw.server.state import open_state

    return contextlib.closing(open_state(str(home / "state.db")))


def _assignment(number: int, epoch: int):
    from llmgw.domain.replicas import ReplicaSpec
    from llmgw.domain.rollout import Assignment

    spec = ReplicaSpec(f"m{number}#0", epoch, f"m{number}", f"m{number}", "m.gguf", "fake", "1", 512, 1)
    return Assignment(0, "node-0", spec, None)


def _server_problem(home: Path, told: list[str]) -> str:
    import sqlite3

    database = home / "state.db"
    if not database.exists():
        return "the database is gone" if told else ""
    with sqlite3.connect(database) as connection:
        answer = connection.execute("PRAGMA integrity_check").fetchone()[0]
    connection.close()
    if answer != "ok":
        return f"integrity_check: {answer}"
    with _state(home) as state:
        profiles = {item.profile.name for item in state.profiles()}
        assigned = {item.spec.replica_id for item in state.assignments()}
        keys = {item.key.name for item in state.client_keys()}
        following = state.next_epoch(1)
    for each in told:
        kind, _, name = each.partition(":")
        lost = (
            (kind == "profile" and name not in profiles and not (name == "m0" and len(keys) == 3))
            or (kind == "assigned" and name not in assigned)
            or (kind == "key" and name not in keys)
            or (kind == "epoch" and following <= int(name))
            or (kind == "deleted" and name in profiles)
        )
        if lost:
            return f"{each} was reported as kept and is not there"
    return ""


_CHECKS: dict[str, Callable[[Path, list[str]], str]] = {"agent": _agent_problem, "server": _server_problem}


def _main(name: str, home: Path) -> None:
    told = os.open(home / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    {"agent": _agent_writes, "server": _server_writes}[name](home, told)
    os.close(told)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
