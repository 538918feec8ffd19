"""Running other programs: a list of arguments, never a shell; bounded in time and output; the whole group is killed."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import frozen

from llmgw.errors import CommandError

_SPOOL = 65536


@frozen
class Completed:
    """What a program did. `code` is negative for a signal, None when it could not be waited for.

    `pid` is the process's id, free for reuse by others unless `code` is None; None when the runner does not tell.
    """

    argv: tuple[str, ...]
    code: int | None
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    pid: int | None = None

    def words(self) -> str:
        """How it ended, in words: `exited 3`, `was killed by SIGILL`, `gave no answer in time`."""
        if self.timed_out:
            return "gave no answer in time"
        if self.code is None:
            return "could not be waited for"
        return exit_words(self.code)

    def last_line(self) -> str:
        """The last non-empty line it printed, stderr first: usually the diagnosis."""
        for text in (self.stderr, self.stdout):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return lines[-1]
        return ""


def exit_words(code: int) -> str:
    """An exit code or negative signal number in words, with what it usually means."""
    if code == 0:
        return "exited 0"
    if code > 0:
        meaning = {126: " (not executable)", 127: " (a library or the program itself is missing)"}.get(code, "")
        return f"exited {code}{meaning}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    meaning = {
        "SIGILL": " (the CPU lacks an instruction this build uses)",
        "SIGKILL": " (killed: often out of memory)",
        "SIGBUS": " (a file was cut short)",
    }.get(name, "")
    return f"was killed by {name}{meaning}"


class Runner(Protocol):
    """Runs a program to its end."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        output_cap: int = 1 << 20,
        stdin: bytes = b"",
    ) -> Completed:
        """Run `argv` in its own session.

        Args:
            env: the complete environment; None means PATH and LC_ALL=C only.
            output_cap: bytes kept of each stream; a program that prints more is killed and `truncated` set.

        Raises:
            CommandError: the program could not be started.
        """
        ...


MINIMAL_ENV: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
}


class RealRunner:
    """Runs programs on this machine."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        output_cap: int = 1 << 20,
        stdin: bytes = b"",
    ) -> Completed:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(MINIMAL_ENV if env is None else env),
                cwd=cwd,
                start_new_session=True,
                close_fds=True,
            )
        except (OSError, ValueError) as error:
            raise CommandError(
                f"cannot run `{argv[0]}`", cause=getattr(error, "strerror", None) or str(error)
            ) from error
        return _collect(process, tuple(argv), timeout_s, output_cap, stdin)


def _collect(
    process: subprocess.Popen[bytes], argv: tuple[str, ...], timeout_s: float, cap: int, stdin: bytes
) -> Completed:
    deadline = time.monotonic() + timeout_s
    kept: dict[int, bytearray] = {}
    timed_out = truncated = False
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            kept[stream.fileno()] = bytearray()
            selector.register(stream, selectors.EVENT_READ)
        pending = memoryview(stdin)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                timed_out = True
                break
            for key, _ in selector.select(min(left, 0.5)):
                if key.fileobj is process.stdin:
                    pending = _feed(process, pending, selector)
                    continue
                data = os.read(key.fd, _SPOOL)
                if not data:
                    selector.unregister(key.fileobj)
                elif len(kept[key.fd]) + len(data) > cap:
                    kept[key.fd] += data[: cap - len(kept[key.fd])]
                    truncated = True
                else:
                    kept[key.fd] += data
            if truncated:
                break
            # a grandchild may hold the pipes open after the program itself has ended
            if process.poll() is not None and not selector.select(0.05):
                break
        assert process.stdout is not None
        assert process.stderr is not None
        out = bytes(kept[process.stdout.fileno()]).decode("utf-8", "replace")
        err = bytes(kept[process.stderr.fileno()]).decode("utf-8", "replace")
    code = _reap(process, deadline, kill=timed_out or truncated)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    return Completed(argv, code, out, err, timed_out, truncated, process.pid)


def _feed(process: subprocess.Popen[bytes], pending: memoryview, selector: selectors.BaseSelector) -> memoryview:
    assert process.stdin is not None
    try:
        written = os.write(process.stdin.fileno(), pending[:_SPOOL])
    except BlockingIOError:
        return pending
    except OSError:
        written = len(pending)
    pending = pending[written:]
    if not pending:
        selector.unregister(process.stdin)
        process.stdin.close()
    return pending


def _reap(process: subprocess.Popen[bytes], deadline: float, *, kill: bool) -> int | None:
    """Wait for the program; kill its group when told or when it outstays. None when even SIGKILL does not end it."""
    if not kill:
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        else:
            _kill_group(process.pid)
            return code
    _kill_group(process.pid)
    try:
        return process.wait(2.0)
    except subprocess.TimeoutExpired:  # in uninterruptible sleep: waiting longer would hang us too
        return None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


class Daemon:
    """A long-lived child of our own (a gateway worker, the parts of `llmgw up`), in its own session."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code (negative: signal), or None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM)."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None when it is still there after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL to the process itself (not its session: engines live in sessions of their own)."""
        if self._process.poll() is None:
            self._process.kill()


def start_daemon(argv: Sequence[str], *, env: Mapping[str, str], log_path: str | None, cwd: str = "/") -> Daemon:
    """Start `argv` as a session of its own; stdout and stderr are appended to `log_path` (None: inherited).

    Raises:
        CommandError: it could not be started.
    """
    try:
        if log_path is None:
            process = subprocess.Popen(
                list(argv), env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True
            )
        else:
            fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                process = subprocess.Popen(
                    list(argv),
                    env=dict(env),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=fd,
                    stderr=fd,
                    start_new_session=True,
                )
            finally:
                os.close(fd)
    except OSError as error:
        raise CommandError(f"cannot start `{argv[0]}`", cause=error.strerror or str(error)) from error
    return Daemon(process)
