"""The newcomer's one command, with the package index standing in for GitHub and the model hub, both out of reach."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flows_cluster import free_port, sweep, wait

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.flow, pytest.mark.timeout(400)]


@pytest.fixture
def newcomer(tmp_path):
    """Environment of somebody who has nothing yet; the virtual environment of the tests stands in for a fresh one."""
    away = f"http://127.0.0.1:{free_port()}"
    yield {
        **os.environ,
        "LLMGW_VENV": sys.prefix,
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "LLMGW_GITHUB_API": away,
        "HF_ENDPOINT": away,
    }
    sweep(tmp_path)


def quickstart(env, *options, timeout_s=300):
    command = [str(ROOT / "scripts" / "quickstart.sh"), "--listen", f"127.0.0.1:{free_port()}", *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)


def test_one_command_ends_with_a_real_answer_and_a_second_run_reuses_everything(newcomer, tmp_path):
    first = quickstart(newcomer, "--once")
    assert first.returncode == 0, first.stderr + logs(tmp_path)
    assert "Paris" in first.stdout
    said = first.stderr
    assert "GitHub cannot be used" in said
    assert "the model hub cannot be used" in said
    assert "downloading" in said
    assert "100 %" in said
    assert "cluster page:" not in said, "nothing is there any more"
    assert not left_over(tmp_path), "nothing runs on"

    second = quickstart(newcomer, "--once", timeout_s=120)
    assert second.returncode == 0, second.stderr + logs(tmp_path)
    assert "Paris" in second.stdout
    assert "downloading" not in second.stderr
    assert "cannot be used" not in second.stderr


def test_ctrl_c_stops_all_of_it_cleanly(newcomer, tmp_path, tiny_gguf, real_engine_dir):
    state = tmp_path / "state" / "llmgw" / "up"
    command = [sys.executable, "-m", "llmgw", "up", "--listen", f"127.0.0.1:{free_port()}", "--model", str(tiny_gguf)]
    log = tmp_path / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=newcomer, stdout=out, stderr=out)
    try:
        wait(lambda: "stop it:" in log.read_text(), 240, "the answer", lambda: log.read_text() + logs(tmp_path))
        assert left_over(tmp_path)
        context = (state / "ctl.yaml").read_text()
        assert "token_file" in context
        said = dict(line.split(":", 1) for line in log.read_text().splitlines() if ":  " in line)
        assert "curl" in said["ask it"]
        # as a person does it: what was printed, pasted into a shell
        listed = subprocess.run(
            ["bash", "-c", said["look at it"]],
            env=newcomer | {"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert "this-machine" in listed.stdout, listed.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()
    assert not left_over(tmp_path), "engines, agent, server and gateway have ended"


def test_a_second_up_on_the_same_state_says_who_is_there(newcomer, tmp_path):
    import fcntl

    state = tmp_path / "state" / "llmgw" / "up"
    state.mkdir(parents=True)
    with (state / "up.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("another `llmgw up` (pid 1)\n")
        held.flush()
        done = subprocess.run([sys.executable, "-m", "llmgw", "up"], env=newcomer, capture_output=True, text=True)
    assert done.returncode == 1
    assert "another `llmgw up` (pid 1)" in done.stderr


def test_a_taken_port_is_one_line_and_exit_1(newcomer):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "llmgw", "up", "--once", "--listen", listen],
            env=newcomer,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith(("error", "cause"))]
    assert any("in use" in line for line in errors), done.stderr
    assert "Traceback" not in done.stderr


def left_over(root: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if f"{root}/state" in command:
                found.append(command)
    return found


def logs(root: Path) -> str:
    return "\n".join(f"--- {p}\n{p.read_text()[-2000:]}" for p in root.rglob("*.log"))
