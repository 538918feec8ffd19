"""What an engine inherits and what it does not; where its key is and where it is not; its log."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from supervise_fakes import KEY, Bench, ask, spec, wait_for

from llmgw.agent import procs
from llmgw.agent.handles import replica_dir
from llmgw.domain.replicas import ReplicaState
from llmgw.errors import ReplicaError
from llmgw.testing.fake_provider import FakeProvider


def test_the_environment_is_built_from_nothing(bench: Bench) -> None:
    own = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/home/agent",
        "LLAMA_ARG_PORT": "1",
        "VLLM_HOST_IP": "10.0.0.1",
        "PYTHONPATH": "/evil",
        "PYTHONSTARTUP": "/evil/x.py",
        "SHIV_ROOT": "/evil",
        "LD_PRELOAD": "/evil.so",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    supervisor = bench.supervisor(environ=own)
    supervisor.set_desired([spec(bench, epoch=7, env={"OMP_NUM_THREADS": "2", "LLMGW_REPLICA": "lie"})], 7)
    pid = wait_for(supervisor, ReplicaState.READY).pid
    environ = procs.read_environ(pid)
    marker = environ.pop("LLMGW_REPLICA")
    assert marker.startswith("m#0/7/")
    assert len(marker.rpartition("/")[2]) == 32
    assert KEY not in environ.pop("LLMGW_HANDLE")
    assert environ == {
        "PATH": "/usr/bin:/bin",
        "HOME": "/home/agent",
        "LANG": "C.UTF-8",
        "SPT_NOENV": "1",
        "OMP_NUM_THREADS": "2",
    }


def test_the_engine_has_a_session_a_private_directory_and_no_descriptor_of_ours(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    pid = wait_for(supervisor, ReplicaState.READY).pid
    seen = procs.read_stat(pid)
    assert (seen.session, seen.group) == (pid, pid)
    where = replica_dir(bench.work_dir, "m#0")
    assert Path(f"/proc/{pid}/cwd").resolve() == where.resolve()
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    targets = {link.name: str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    log = str(where / "engine.log")
    assert (targets["0"], targets["1"], targets["2"]) == ("/dev/null", log, log)
    assert all(target.startswith("socket:") for number, target in targets.items() if number not in "012")


def test_the_key_is_in_a_private_file_and_in_no_command_line(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    status = wait_for(supervisor, ReplicaState.READY)
    where = replica_dir(bench.work_dir, "m#0")
    assert (where / "api-key").read_text() == KEY + "\n"
    for name in ("api-key", "handle.json", "engine.log"):
        assert stat.S_IMODE((where / name).stat().st_mode) == 0o600
    for pid in procs.all_pids():
        for part in ("cmdline", "environ"):
            try:
                data = Path(f"/proc/{pid}/{part}").read_bytes()
            except OSError:
                continue
            assert KEY.encode() not in data
    assert KEY not in (where / "handle.json").read_text()
    assert KEY not in repr(supervisor.statuses()) + repr(spec(bench))
    assert status.pid is not None


def test_a_provider_that_puts_the_key_into_argv_is_refused(bench: Bench) -> None:
    class Leaky(FakeProvider):
        def launch(self, engine: object, plan: object) -> object:
            self.flags = ("--alias", Path(plan.api_key_file).read_text().strip())
            return super().launch(engine, plan)

    supervisor = bench.supervisor(provider=Leaky())
    supervisor.set_desired([spec(bench)], 1)
    failed = wait_for(supervisor, ReplicaState.FAILED)
    assert failed.words.startswith("the provider `fake` puts the API key on the command line: refused")
    assert KEY not in failed.words


def test_a_changed_key_needs_a_new_engine(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    old = wait_for(supervisor, ReplicaState.READY)
    supervisor.set_desired([spec(bench, api_key="another-key")], 1)
    new = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != old.pid)
    assert ask(new.port, "/props", key="another-key")["model_alias"] == "m"


def test_the_log_is_kept_of_this_run_and_of_the_previous_one(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.set_desired([spec(bench)], 1)
    first = wait_for(supervisor, ReplicaState.READY)
    assert supervisor.logs("m#0", 1) == [f"listening on http://127.0.0.1:{first.port}"]
    assert len(supervisor.logs("m#0", 100)) == 2
    ask(first.port, "/fake/set", {"crash": 2})
    second = wait_for(supervisor, ReplicaState.READY, where=lambda status: status.pid != first.pid)
    assert supervisor.logs("m#0", 1) == [f"listening on http://127.0.0.1:{second.port}"]
    assert supervisor.logs("m#0", 1, previous=True) == ["fake engine: crashing with 2 as told"]


def test_a_replica_without_a_log_is_said(bench: Bench) -> None:
    supervisor = bench.supervisor()
    with pytest.raises(ReplicaError, match=r"no log of a run of `x/\.\./y#0`"):
        supervisor.logs("x/../y#0", 10)


def test_replica_directories_are_inside_and_differ(bench: Bench) -> None:
    names = ["a/b#0", "a%2Fb#0", "A/b#0", "../x", "..", ".", "x" * 300, "x" * 301]
    places = [replica_dir(bench.work_dir, name) for name in names]
    assert len({place.name.lower() for place in places}) == len(names)
    assert all(place.parent == bench.work_dir / "replicas" and len(place.name) < 120 for place in places)
    assert all(place.name not in (".", "..") for place in places)
