"""An engine process: started so that it outlives the agent, known by its identity, signalled through a pidfd.

Besides `system/commands.py` the only place that starts processes. The engine gets a session of its own, a file for its
output (a pipe would kill or block it when the agent dies) and an environment built from nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from llmgw.agent import keeper as keepers
from llmgw.agent import procs
from llmgw.agent.keeper import KeeperId
from llmgw.errors import ReplicaError
from llmgw.system.commands import exit_words

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEEPER_LEAVES_S = 2.0
_ENGINE_SHOWS_S = 10.0
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
    """How an engine ended. `code` is None when nobody can know; `unknown` says why."""

    code: int | None
    unknown: str = "adopted"

    def words(self) -> str:
        return f"exit code unknown ({self.unknown})" if self.code is None else exit_words(self.code)


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
    """A living engine, ours by birth or adopted. Holds pidfds: `close` gives them back and leaves the engine alone.

    Args:
        keeper: its parent, which writes down how it ended; None when it has none.
    """

    def __init__(self, identity: Identity, pidfd: int, keeper: KeeperId | None = None) -> None:
        self.identity = identity
        self.keeper = keeper
        self._pidfd = pidfd
        self._keeper_pidfd = keepers.open_pidfd(keeper) if keeper is not None else -1
        self._last_alive = 0
        self._gone_since: float | None = None

    @property
    def pid(self) -> int:
        return self.identity.pid

    def ended(self) -> Ended | None:
        """How it ended, None while it runs, or while its keeper is about to say how."""
        if self.keeper is None:
            return self._ended_child()
        if not _readable(self._pidfd):
            self._last_alive = procs.ticks_now()
            return None
        code = keepers.read_exit(self.keeper.exit_file, self.identity.marker)
        if code is None and self._keeper_pidfd >= 0:
            code = self._keepers_code()
            if code is None and not _readable(self._keeper_pidfd):
                now = time.monotonic()
                self._gone_since = now if self._gone_since is None else self._gone_since
                return None if now - self._gone_since < _KEEPER_LEAVES_S else Ended(None, "its keeper hangs")
        return Ended(code, "its keeper was killed")

    def _ended_child(self) -> Ended | None:
        """Without a keeper. The zombie is left: while it stands, its pid and session are not reused."""
        try:
            seen = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return Ended(None) if _readable(self._pidfd) else None
        if seen is None:
            return None
        return Ended(seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status)

    def _keepers_code(self) -> int | None:
        """What the keeper left with, when it is our child: it could not write its file (a full disk)."""
        try:
            seen = os.waitid(os.P_PIDFD, self._keeper_pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        return keepers.decode(seen.si_status) if seen is not None and seen.si_code == os.CLD_EXITED else None

    def reap(self) -> None:
        """Take the zombie away, ours or the keeper's; no effect on an adopted engine."""
        for pidfd in (self._pidfd, self._keeper_pidfd):
            try:
                if pidfd >= 0:
                    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                pass

    def members(self) -> list[procs.Stat]:
        """Living processes that belong to this engine: its session, and whatever carries its marker in any session."""
        found = {stat.pid: stat for stat in procs.find_marked(self.identity.marker)}
        leader = procs.read_stat(self.pid)
        same = leader is not None and leader.start_ticks == self.identity.start_ticks
        # The session's number is the leader's pid. Sessions are only inherited, so a process that is in it and is older
        # than the last moment the leader was seen alive is the engine's; later ones may be of a new owner of that pid.
        found.update({s.pid: s for s in procs.in_session(self.pid) if same or s.start_ticks < self._last_alive})
        return list(found.values())

    def signal_group(self, number: signal.Signals) -> int:
        """Signal the engine's own process group; returns how many processes got it."""
        return sum(signal_if_same(stat, number) for stat in self.members() if stat.group == self.pid)

    def signal_all(self, number: signal.Signals) -> int:
        """Signal everything that belongs to the engine, grandchildren in sessions of their own too."""
        return sum(signal_if_same(stat, number) for stat in self.members())

    def close(self) -> None:
        """Let go of the engine without touching it."""
        for pidfd in (self._pidfd, self._keeper_pidfd):
            if pidfd >= 0:
                os.close(pidfd)
        self._pidfd = self._keeper_pidfd = -1


def _readable(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


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
    """Start an engine as its own session below a keeper, its output appended to `log` (a new file).

    Args:
        environ: complete, with the marker and the handle.
        cwd: a directory only we can write: engines search it for libraries. The keeper's file goes there.

    Raises:
        ReplicaError: it could not be started, or cannot be watched here.
    """
    _check_program(argv[0])
    kept = keepers.available()
    exit_file = cwd / keepers.EXIT_FILE
    command, told = list(argv), dict(environ)
    try:
        exit_file.unlink(missing_ok=True)
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ReplicaError(f"cannot open the log `{log}`", cause=error.strerror or str(error)) from error
    if kept:
        # the keeper must not carry the marker: it is nobody to be swept
        marker, handle = told.pop(procs.MARKER, ""), told.pop(procs.HANDLE, "")
        command = keepers.argv(argv, exit_file, marker, handle)
    try:
        process = subprocess.Popen(
            command,
            env=told,
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
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise ReplicaError("cannot watch the engine", cause=error.strerror or str(error), hint=_PIDFD_HINT) from error
    keeper = None
    if kept:
        stat = procs.read_stat(pid)
        keeper = KeeperId(pid, stat.start_ticks if stat else 0, exit_file)
        pid, pidfd = _await_engine(pid, pidfd)
    stat = procs.read_stat(pid)
    identity = Identity(
        boot_id=procs.boot_id(),
        pid=pid,
        start_ticks=stat.start_ticks if stat else 0,
        exe=procs.read_exe(pid) or "",
        marker=environ.get(procs.MARKER, ""),
    )
    return Child(identity, pidfd, keeper)


def _await_engine(keeper: int, keeper_pidfd: int) -> tuple[int, int]:
    """The engine a keeper has just started, and its pidfd; the keeper itself when the engine has ended already."""
    poller = select.poll()
    poller.register(keeper_pidfd, select.POLLIN)
    until = time.monotonic() + _ENGINE_SHOWS_S
    while time.monotonic() < until:
        pid = keepers.engine_of(keeper)
        if pid is not None:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue
            if procs.read_parent(pid) == keeper:
                os.close(keeper_pidfd)
                return pid, pidfd
            os.close(pidfd)
        if poller.poll(2):
            return keeper, keeper_pidfd
    os.killpg(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    os.close(keeper_pidfd)
    raise ReplicaError("cannot start the engine", cause=f"its keeper did not start it within {_ENGINE_SHOWS_S:g} s")


def _check_program(path: str) -> None:
    """Say now what a shell would say badly, or what it would try to run as a script of its own.

    Raises:
        ReplicaError: the program is missing, not executable, or not for this machine.
    """

    def no(cause: str) -> ReplicaError:
        return ReplicaError(f"cannot start `{path}`", cause=cause)

    try:
        with open(path, "rb") as handle:  # noqa: PTH123
            head = handle.read(20)
        with open("/proc/self/exe", "rb") as handle:  # noqa: PTH123
            own = handle.read(20)
    except PermissionError as error:
        if not os.access(path, os.X_OK):
            raise no(error.strerror or str(error)) from error
        return  # executable and not readable is allowed
    except OSError as error:
        raise no(error.strerror or str(error)) from error
    if not os.access(path, os.X_OK):
        raise no(os.strerror(errno.EACCES))
    # ELF: magic, class, byte order, machine (elf(5)); a script names its interpreter
    if not head.startswith(b"#!") and (head[:6], head[18:20]) != (own[:6], own[18:20]):
        raise no(os.strerror(errno.ENOEXEC))


def hold(identity: Identity, keeper: KeeperId | None = None) -> Child | None:
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
        return Child(identity, pidfd, keeper)
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
