"""On a node that lacks a library: brought by its own package source, missed when it goes, and told when it cannot come.

The tests go on from one another, in this order: one node, one engine, one life.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from cluster_node import ENV, HEAD, NAMES, PACKAGES, Lab, wait

pytestmark = pytest.mark.cluster

SOURCE = f"deb [trusted=yes] http://{PACKAGES}/ ./"
LACKING = "libgomp.so.1 is missing and no package source of this node has libgomp1"


def has_library(lab: Lab) -> bool:
    return lab.node("sh", "-c", "ls /usr/lib/*/libgomp.so.1", code=None).returncode == 0


def test_the_node_is_bare_and_alone(lab: Lab) -> None:
    assert lab.node("hostname").stdout == "bare\n"
    assert not has_library(lab)
    assert lab.node("dpkg-query", "-W", "libgomp1", code=None).returncode != 0
    assert lab.node("dpkg", "--audit").stdout == ""
    assert lab.node("ip", "route").stdout.split()[0] == "10.213.77.0/24"
    assert "default" not in lab.node("ip", "route").stdout


def test_without_any_package_source_the_words_say_so(lab: Lab) -> None:
    lab.start_server(engines={"llama.cpp": "b1"}, sources=["github"])
    lab.start_agent(recheck_interval="2s")
    found = lab.await_engine("failed", LACKING)
    assert not found["usable"]
    assert found["words"].startswith(f"failed: {LACKING}")
    assert "; next try at " in found["words"]
    # what the archive holds was fetched by the real names, over TLS this node's store vouches for
    asked = [line.split()[0] for line in lab.log("github").splitlines()]
    assert asked[0] == "api.github.com"
    assert set(asked) == set(NAMES)


def test_the_library_comes_from_the_nodes_own_source_and_the_engine_is_ready(lab: Lab) -> None:
    lab.sources(SOURCE)
    asked_for = lab.ctl("engines", "recheck", "bare").stdout
    assert asked_for == "bare: looks at every engine again, every byte of it\n"
    found = lab.await_engine("ready")
    assert (found["build"], found["usable"]) == ("cpu", True)
    assert found["words"] == "ready: CPU build, seen to run"
    assert has_library(lab)
    assert "install ok installed" in lab.node("dpkg-query", "-s", "libgomp1").stdout
    asked = lab.log("packages")
    assert "libgomp1.deb" in asked
    linked = lab.node("sh", "-c", "ldd /opt/llmgw/engines/llama.cpp/b1-cpu/llama-server").stdout
    assert "libgomp.so.1 => /" in linked
    assert "not found" not in linked


def losses(lab: Lab) -> int:
    return lab.log("agent").count("broken: libgomp.so.1 is missing")


def test_a_removed_library_is_noticed_and_brought_back(lab: Lab) -> None:
    before = losses(lab)
    lab.node("apt-get", "-y", "remove", "libgomp1")
    wait(lambda: losses(lab) > before, 60, "the loss to be noticed", lambda: lab.log("agent")[-2000:])
    wait(lambda: has_library(lab), 40, "the library to come back", lambda: lab.log("agent")[-2000:])
    assert lab.await_engine("ready")["usable"]


def test_a_removed_library_with_no_source_left_is_broken_in_words(lab: Lab) -> None:
    lab.sources()
    lab.node("apt-get", "-y", "remove", "libgomp1")
    found = lab.await_engine("broken", LACKING)
    assert not found["usable"]
    assert found["words"].startswith("broken: ")
    assert HEAD not in found["words"]
    told = lab.node(sys.executable, "-m", "llmgw", "doctor", "-c", str(lab.root / "agent.yaml"), code=1).stdout
    fix = "libgomp.so.1 is missing -> run `apt-get install libgomp1` as root"
    assert f"BAD  llama.cpp b1 cpu, libraries: {fix}" in told.splitlines()
    assert any(line.startswith("BAD  llama.cpp b1 cpu, --version: --version exited 127") for line in told.splitlines())
    lab.sources(SOURCE)
    lab.ctl("engines", "recheck", "bare")
    assert lab.await_engine("ready")["usable"]


HOLD = (
    "import fcntl, sys; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX);"
    "print('held', flush=True); sys.stdin.read()"
)


@contextlib.contextmanager
def lock_held_without_library(lab: Lab) -> Iterator[None]:
    """Remove the library and hold the lock of dpkg before the agent brings it back; again when the agent was faster."""
    command = f'apt-get -y remove libgomp1 >/dev/null && exec {sys.executable} -c "{HOLD}"'
    for _ in range(5):
        holder = subprocess.Popen(
            lab.inside("sh", "-c", command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, text=True
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            if not has_library(lab):
                yield
                return
        finally:
            holder.communicate("")
        lab.await_engine("ready")
    pytest.fail("the agent was faster five times")


def test_a_lock_somebody_holds_is_waited_for_in_words(lab: Lab) -> None:
    with lock_held_without_library(lab):
        found = lab.await_engine("broken", "waiting for process ")
        assert "which holds the lock of `apt-get`" in found["words"]
        assert not has_library(lab)
    assert lab.await_engine("ready")["usable"]
    assert has_library(lab)


def test_a_recheck_of_a_node_that_is_not_there_is_told(lab: Lab) -> None:
    done = lab.ctl("engines", "recheck", "nobody", code=1)
    assert "there is no node `nobody`" in done.stderr
