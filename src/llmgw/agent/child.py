"""An engine process: started so that it outlives the agent, known by its identity, signalled through a pidfd.

Besides `system/commands.py` the only place that starts processes. The engine gets a session of its own, a file for its
output (a pipe would kill or block it when the agent dies) and an environment built from nothing.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from llmgw.agent import procs
from llmgw.errors import ReplicaError
from llmgw.system.commands import exit_words

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PIDFD_HINT = "engines are watched through pidfds: this needs Linux 5.4 or newer, and a container that allows them"


@frozen
class Identity:
    """What makes a process that process and no other, also after its pid was given away again.

    Args:
        boot_id: of the boot it was started in.
        start_ticks: clock ticks after boot when it was started.
        exe: its program file; "" while a wrapper may still replace itself by the engine.
        marker: value of LLMGW_REPLICA in its environment: `<replica id>/<epoch>/<random>`.
    """

    boot_id: str
    pid: int
    start_ticks: int
    exe: str
    marker: str


@frozen
class Ended:
    """How an engine ended. `code` is None when nobody can know: it was not our child."""

    code: int | None

    def words(self) -> str:
        return "exit code unknown (adopted)" if self.code is None else exit_words(self.code)


def new_marker(replica_id: str, epoch: int) -> str:
    """A marker no other process carries."""
    return f"{replica_id}/{epoch}/{secrets.token_hex(16)}"


def engine_environ(own: Mapping[str, str], wanted: Mapping[str, str], home: Path) -> dict[str, str]:
    """The engine's whole environment: a few plain variables of ours, then what the launch wants.

    Nothing else is inherited: an `LLAMA_ARG_*`, `VLLM_*`, `PYTHON*` or `SHIV_*` of the agent's would change the engine.
    """
    made = {"PATH": _DEFAULT_PATH, "HOME": str(home), "LANG": "C.UTF-8"}
    made.update({name: own[name] for name in _KEPT if own.get(name)})
    # a process that renames itself (setproctitle) would wipe its environment, and the marker with it
    made["SPT_NOENV"] = "1"
    made.update({name: value for name, value in wanted.items() if name not in (procs.MARKER, procs.HANDLE)})
    return made


class Child:
    """A living engine, ours by birth or adopted. Holds a pidfd: `close` gives it back and leaves the engine alone."""

    def __init__(self, identity: Identity, pidfd: int) -> None:
        self.identity = identity
        self._pidfd = pidfd

    @property
    def pid(self) -> int:
        return self.identity.pid

    def ended(self) -> Ended | None:
        """How it ended, None while it runs. The zombie is left: while it stands, its pid and session are not reused."""
        try:
            seen = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            return Ended(None) if poller.poll(0) else None
        if seen is None:
            return None
        return Ended(seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status)

    def reap(self) -> None:
        """Take the zombie away; no effect on an adopted engine."""
        try:
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            pass

    def members(self) -> list[procs.Stat]:
        """Living processes that belong to this engine: its session, and whatever carries its marker in any session."""
        found = {stat.pid: stat for stat in procs.find_marked(self.identity.marker)}
        leader = procs.read_stat(self.pid)
        if leader is not None and leader.start_ticks == self.identity.start_ticks:
            # the session's number is the leader's pid: it is only proof while the leader itself still holds that pid
            found.update({stat.pid: stat for stat in procs.in_session(self.pid)})
        return list(found.values())

    def signal_group(self, number: signal.Signals) -> int:
        """Signal the engine's own process group; returns how many processes got it."""
        return sum(signal_if_same(stat, number) for stat in self.members() if stat.group == self.pid)

    def signal_all(self, number: signal.Signals) -> int:
        """Signal everything that belongs to the engine, grandchildren in sessions of their own too."""
        return sum(signal_if_same(stat, number) for stat in self.members())

    def close(self) -> None:
        """Let go of the engine without touching it."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def signal_if_same(seen: procs.Stat, number: signal.Signals) -> bool:
    """Signal the process that was seen, never one that got its pid since: pin by pidfd, look again, then signal."""
    try:
        pidfd = os.pidfd_open(seen.pid)
    except OSError:
        return False
    try:
        again = procs.read_stat(seen.pid)
        if again is None or again.start_ticks != seen.start_ticks:
            return False
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def start(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, log: Path) -> Child:
    """Start an engine as its own session, its output appended to `log` (a new file).

    Args:
        environ: complete, with the marker.
        cwd: a directory only we can write: engines search it for libraries.

    Raises:
        ReplicaError: it could not be started, or cannot be watched here.
    """
    try:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ReplicaError(f"cannot open the log `{log}`", cause=error.strerror or str(error)) from error
    try:
        process = subprocess.Popen(
            list(argv),
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            start_new_session=True,
            close_fds=True,
        )
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise ReplicaError(f"cannot start `{argv[0]}`", cause=cause) from error
    finally:
        os.close(fd)
    pid = process.pid
    # this room waits for its children itself; told an exit code, Popen neither polls nor warns when it is dropped
    process.returncode = 0
    stat = procs.read_stat(pid)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise ReplicaError("cannot watch the engine", cause=error.strerror or str(error), hint=_PIDFD_HINT) from error
    identity = Identity(
        boot_id=procs.boot_id(),
        pid=pid,
        start_ticks=stat.start_ticks if stat else 0,
        exe=procs.read_exe(pid) or "",
        marker=environ.get(procs.MARKER, ""),
    )
    return Child(identity, pidfd)


def hold(identity: Identity) -> Child | None:
    """Take hold of a running engine; None when the process is not (or no longer) the one of `identity`.

    Its boot, pid, start time, program and marker must all be the recorded ones.
    """
    if identity.boot_id != procs.boot_id():
        return None
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    if is_same(identity):
        return Child(identity, pidfd)
    os.close(pidfd)
    return None


def is_same(identity: Identity) -> bool:
    """Whether the process with that pid is alive and the one of `identity`."""
    stat = procs.read_stat(identity.pid)
    if stat is None or stat.ended or stat.start_ticks != identity.start_ticks:
        return False
    environ = procs.read_environ(identity.pid)
    if environ is None or not identity.marker or environ.get(procs.MARKER) != identity.marker:
        return False
    return not identity.exe or procs.read_exe(identity.pid) == identity.exe
