"""`llmgw agent status` says how things are now, not how they were when the agent last said so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmgw.agent.app import command


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "agent.yaml"
    path.write_text(f"server: http://127.0.0.1:7443\nsupervisor: {{work_dir: {tmp_path}}}\n")
    return path


def told(config: Path, pid: int, *options: str) -> str:
    status = {
        "node_id": "n1", "pid": pid, "server": "http://127.0.0.1:7443", "connected": "yes",
        "words": "connected to `http://127.0.0.1:7443`", "last_error": "",
    }  # fmt: skip
    (config.parent / "status.json").write_text(json.dumps(status))
    return CliRunner().invoke(command, ["status", "-c", str(config), *options], catch_exceptions=False).output


def test_an_agent_that_is_gone_is_not_called_connected(config: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert told(config, gone.pid).splitlines() == [
        f"agent   not running (pid {gone.pid}), node `n1`",
        "server  http://127.0.0.1:7443: nobody is connected now; it said last: connected to `http://127.0.0.1:7443`",
    ]
    said = json.loads(told(config, gone.pid, "-o", "json"))
    assert (said["running"], said["connected"]) == (False, "unknown")


def test_the_file_is_named_after_the_word_status_too(config: Path) -> None:
    argv = [sys.executable, "-c", "print(flush=True); input()", "agent"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()  # for an instant after its start a process has no command line
        said = told(config, running.pid)
        running.communicate(b"\n")
    assert said.splitlines() == [
        f"agent   running (pid {running.pid}), node `n1`",
        "server  http://127.0.0.1:7443: connected to `http://127.0.0.1:7443`",
    ]
