"""The command line as a process: exit codes, streams, and what is imported."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ctl_server import INSTALLING, AdminServer

from llmgw import __version__, cli
from llmgw.errors import ConfigError, LlmgwError

Run = Callable[..., "subprocess.CompletedProcess[str]"]
LLMGW = [sys.executable, "-m", "llmgw"]


@pytest.fixture
def env(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}


@pytest.fixture
def run(env: dict[str, str]) -> Run:
    def call(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*LLMGW, *args], env={**env, **more}, capture_output=True, text=True, errors="replace", timeout=60
        )

    return call


def test_the_version_and_the_help_are_printed(run: Run) -> None:
    assert run("--version").stdout == f"llmgw {__version__}\n"
    shown = run("--help").stdout
    for name, (_, text) in cli.COMMANDS.items():
        assert (f"{name} " in shown and text in shown) == (name not in cli.HIDDEN)


def test_nodes_are_listed_by_a_real_process(run: Run, admin: AdminServer, token_file: Path) -> None:
    done = run("ctl", "nodes", "--server", admin.url, "--token-file", str(token_file))
    assert (done.returncode, done.stderr) == (0, "")
    assert INSTALLING in done.stdout
    plain = run("ctl", "nodes", "--server", admin.url, "--token-file", str(token_file), PYTHONIOENCODING="latin-1")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "\\u201e" in plain.stdout


def test_errors_are_words_on_stderr_and_an_exit_code(run: Run) -> None:
    for args, code, said in (
        (("ctl", "nodes", "--server", "nowhere"), 2, "error: `nowhere` is not the address of a server\nhint: write "),
        (
            ("ctl", "nodes", "--server", "http://127.0.0.1:1"),
            1,
            "error: no llmgw server at `http://127.0.0.1:1`\ncause: ",
        ),
        (
            ("ctl", "nods"),
            2,
            "error: there is no command `nods`, did you mean `nodes`?\nhint: see `llmgw ctl --help`\n",
        ),
        (("ctl", "nodes", "-o", "xml"), 2, "error: "),
        (
            ("ctl", "apply", "-f", "/nonexistent.yaml"),
            2,
            "error: nothing was applied\n`/nonexistent.yaml` does not exist",
        ),
    ):
        done = run(*args)
        assert done.stderr.startswith(said)
        assert (done.returncode, done.stdout) == (code, "")


def test_a_configuration_error_lists_each_problem_on_its_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("name: a\nmodel: m\nslots: 0\nnodes: 0\n")
    assert run("ctl", "apply", "-f", str(path)).stderr == (
        f"error: nothing was applied\n{path}:3: slots: must be from 1 to 4096, is 0\n"
        f"{path}:4: nodes: must be from 1 to 4096, is 0\n"
    )


def test_listing_nodes_imports_nothing_of_the_other_apps(
    env: dict[str, str], admin: AdminServer, token_file: Path
) -> None:
    code = (
        "import sys; from llmgw import cli; code = cli.run(sys.argv[1:]); "
        "print(*[m for m in sys.modules if m.startswith(('llmgw', 'yaml', 'cattr', 'urllib3', 'OpenSSL', 'jinja2'))], "
        "file=sys.stderr, sep='\\n'); sys.exit(code)"
    )
    where = {**env, "LLMGW_SERVER": admin.url, "LLMGW_TOKEN_FILE": str(token_file)}

    def loaded(*args: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *args], env=where, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0
        return set(done.stderr.split())

    nodes = loaded("ctl", "nodes")
    heavy = ("llmgw.server", "llmgw.agent", "llmgw.gateway", "llmgw.config", "llmgw.wire", "yaml", "cattr", "OpenSSL")
    assert [m for m in nodes if m.startswith(heavy)] == []
    assert "urllib3" not in nodes, "plain http asks with a socket alone"
    helped = loaded("--help")
    assert [m for m in helped if m.startswith((*heavy, "llmgw.ctl.app", "llmgw.up", "urllib3"))] == []
    assert [m for m in loaded("ctl", "--help") if m.startswith((*heavy, "urllib3", "llmgw.ctl.nodes"))] == []


def test_a_reader_that_leaves_is_no_error(env: dict[str, str], admin: AdminServer, token_file: Path) -> None:
    args = [*LLMGW, "ctl", "nodes", "--server", admin.url, "--token-file", str(token_file)]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(args, env=env, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert done.stderr == ""


def test_watching_prints_again_only_what_changed_and_ends_with_ctrl_c(
    env: dict[str, str], admin: AdminServer, token_file: Path
) -> None:
    args = [*LLMGW, "ctl", "status", "-w", "--server", admin.url, "--token-file", str(token_file), "-o", "json"]
    process = subprocess.Popen(args, env={**env, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "{\n"
        admin.routes[("GET", "/api/v1/status")] = {"version": "9.9.9"}
        while "9.9.9" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_a_terminal_gets_its_own_width_and_colours(env: dict[str, str], admin: AdminServer, token_file: Path) -> None:
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    args = [*LLMGW, "ctl", "nodes", "--server", admin.url, "--token-file", str(token_file)]
    process = subprocess.Popen(args, env={**env, "TERM": "xterm"}, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    shown, deadline = b"", time.monotonic() + 30
    while time.monotonic() < deadline:
        select.select([leader], [], [], 1)
        try:
            piece = os.read(leader, 65536)
        except BlockingIOError:
            continue
        except OSError:  # the other end is closed: it has ended
            break
        if not piece:
            break
        shown += piece
    assert process.wait(10) == 0
    os.close(leader)
    text = shown.decode()
    assert "\x1b[32mconnected\x1b[0m" in text
    assert "\x1b[31mlost\x1b[0m" in text
    assert "    lost: no report for 61 s (3 beats of 5 s)" in text  # 80 columns: below


def failing(error: BaseException) -> Callable[..., object]:
    def main(*_: object, **__: object) -> object:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (LlmgwError("m \x1b[2J", cause="c\nd", hint="h"), 1, "error: m \\x1b[2J\ncause: c\\nd\nhint: h\n"),
        (ConfigError("m", ["f:1: a", "f:2: b"], hint="h"), 2, "error: m\nf:1: a\nf:2: b\nhint: h\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (ValueError("x"), 1, "error: ValueError: x\ncause: this is a bug in llmgw, or in a plugin\nhint: "),
    ],
)
def test_every_error_becomes_words_and_a_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LLMGW_DEBUG", raising=False)
    monkeypatch.setattr("click.Group.main", failing(error))
    assert cli.run([]) == code
    shown = capsys.readouterr().err
    assert shown.startswith(said)
    assert "Traceback" not in shown
    monkeypatch.setenv("LLMGW_DEBUG", "1")
    cli.run([])
    assert ("Traceback" in capsys.readouterr().err) == (not isinstance(error, KeyboardInterrupt))


def test_an_old_interpreter_is_told_apart_before_anything_is_imported() -> None:
    assert cli.too_old((3, 11), "/usr/bin/python3") == ""
    assert cli.too_old((3, 9), "/usr/bin/python3").startswith(
        "error: llmgw needs Python 3.11 or newer, `/usr/bin/python3` is 3.9\nhint: "
    )


@pytest.mark.parametrize("what", [("nodes", "-w"), ("events", "-f"), ("requests", "-f")])
def test_what_goes_on_for_ever_ends_once_nobody_reads_it(
    env: dict[str, str], admin: AdminServer, token_file: Path, what: tuple[str, ...]
) -> None:
    admin.routes[("GET", "/api/v1/events")] = {"events": []}
    admin.routes[("GET", "/api/v1/requests")] = {"seq": 0, "open": [], "ended": []}
    argv = [*LLMGW, "ctl", *what, "--server", admin.url, "--token-file", str(token_file)]
    reads, writes = os.pipe()
    with subprocess.Popen(argv, env=env, stdout=writes, stderr=subprocess.PIPE) as process:
        os.close(writes)
        deadline = time.monotonic() + 60
        while not admin.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        os.close(reads)  # as `head -1` does; nothing new is there to be written
        assert process.wait(60) == cli.FAILED
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_watching_with_a_wrong_token_ends_instead_of_asking_for_ever(
    run: Run, admin: AdminServer, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("wrong\n")
    done = run("ctl", "nodes", "-w", "--server", admin.url, "--token-file", str(tmp_path / "wrong"))
    assert done.returncode == 1
    assert "error: the server refused the token" in done.stderr
