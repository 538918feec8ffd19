"""Programs are bounded in time and output, and nothing of theirs outlives the run."""

import os
import signal

import pytest

from llmgw.errors import CommandError
from llmgw.system.commands import RealRunner, exit_words, start_daemon

RUNNER = RealRunner()


def test_output_code_and_input_are_those_of_the_program():
    done = RUNNER.run(["sh", "-c", "cat; echo two >&2; exit 3"], timeout_s=10, stdin=b"one")
    assert (done.code, done.stdout, done.stderr) == (3, "one", "two\n")
    assert done.last_line() == "two"


def test_environment_is_empty_but_for_path_and_locale():
    os.environ["LLMGW_CANARY"] = "x"
    try:
        lines = RUNNER.run(["env"], timeout_s=10).stdout.splitlines()
    finally:
        del os.environ["LLMGW_CANARY"]
    assert sorted(line.split("=")[0] for line in lines if not line.startswith("_")) == ["LC_ALL", "PATH"]


def test_large_input_to_a_program_that_answers_late_does_not_deadlock():
    data = b"x" * 500_000
    done = RUNNER.run(["sh", "-c", "sleep 0.1; wc -c"], timeout_s=10, stdin=data)
    assert done.stdout.strip() == "500000"


def test_a_program_that_hangs_is_killed_with_its_children(until):
    done = RUNNER.run(["sh", "-c", "sleep 1000 & echo $!; wait"], timeout_s=0.3)
    assert done.timed_out
    assert done.words() == "gave no answer in time"
    child = int(done.stdout)
    until(lambda: _gone(child), 5, "the grandchild to be gone")


def test_a_grandchild_holding_the_pipes_does_not_hold_up_the_answer(until):
    done = RUNNER.run(["sh", "-c", "sleep 1000 & echo $!"], timeout_s=20)
    assert (done.code, done.timed_out) == (0, False)
    until(lambda: _gone(int(done.stdout)), 5, "the grandchild to be gone")


def test_endless_output_is_cut_and_the_program_killed():
    done = RUNNER.run(["yes"], timeout_s=20, output_cap=1000)
    assert done.truncated
    assert len(done.stdout) == 1000
    assert done.code == -signal.SIGKILL


def test_a_missing_program_is_an_error_with_its_cause():
    with pytest.raises(CommandError, match="cannot run `/nonexistent/x`: No such file"):
        RUNNER.run(["/nonexistent/x"], timeout_s=1)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited 0"),
        (7, "exited 7"),
        (127, "exited 127 (a library or the program itself is missing)"),
        (-4, "was killed by SIGILL (the CPU lacks an instruction this build uses)"),
        (-9, "was killed by SIGKILL (killed: often out of memory)"),
        (-200, "was killed by signal 200"),
    ],
)
def test_exit_codes_are_told_in_words(code, words):
    assert exit_words(code) == words


def test_a_daemon_appends_to_its_log_and_ends_on_term(tmp_path, until):
    log = tmp_path / "log"
    log.write_text("before\n")
    daemon = start_daemon(["sh", "-c", "echo up; sleep 1000"], env={"PATH": "/usr/bin:/bin"}, log_path=str(log))
    until(lambda: log.read_text() == "before\nup\n", 5, "its line in the log")
    assert daemon.poll() is None
    assert os.getsid(daemon.pid) == daemon.pid
    daemon.terminate()
    assert daemon.wait(5) == -signal.SIGTERM
    _kill_session(daemon.pid)


def _kill_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
