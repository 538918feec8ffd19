"""`llmgw server install-service`: the control plane as a systemd service, under a user of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import llmgw
from llmgw.errors import CommandError, LlmgwError, UsageError
from llmgw.system.files import make_dir

if TYPE_CHECKING:
    from llmgw.config import HostPort
    from llmgw.server.settings import ServerSettings
    from llmgw.system.commands import Runner

_PATIENCE_S = 30.0
_RESTARTS = 1
_DEFAULT = Path("/etc/llmgw/server.yaml")


@click.command("install-service")
@click.option("--user", default="llmgw", show_default=True, help="User the server runs as; made when missing.")
@click.option("--start", is_flag=True, help="Start it now, or again.")
@click.option("--print", "only_print", is_flag=True, help="Only print the unit.")
@click.pass_obj
def install_service(file: Path | None, user: str, start: bool, only_print: bool) -> None:
    """Make the server a service of this machine: a hardened systemd unit, or words about what to do."""
    from llmgw.server import settings
    from llmgw.system import layout, unpacked
    from llmgw.system.commands import RealRunner
    from llmgw.system.files import write_atomic

    config = (file or _DEFAULT).resolve()
    argv = [*_program(), "server", *(["-c", str(config)] if file is not None or config.exists() else [])]
    loaded = settings.load(config if config.exists() or file is not None else None)
    tokens = [str(Path(loaded.http.admin_token_file).parent)]
    state_dir = str(loaded.state_dir)
    writable = [each for each in tokens if each != state_dir]
    access_log = loaded.gateway.access_log
    log_dir = str(Path(access_log).parent) if access_log else ""
    text = layout.server_unit(
        argv, user=user, state_dir=state_dir, writable=writable, log_dir="" if log_dir == state_dir else log_dir
    )
    if only_print:
        click.echo(text, nl=False)
        return
    if not layout.has_systemd():
        click.echo("this machine is not run by systemd, so nothing starts the server after a reboot")
        click.echo(f"put this into what your machine runs at boot: {' '.join(argv)} &")
        return
    package = [] if unpacked.own_tree() else [Path(llmgw.__file__)]  # the one file is unpacked for the service below
    refuse_homes([*(Path(part) for part in argv if part.startswith("/")), *package])
    runner = RealRunner()
    _make_user(runner, user)
    for path in _secrets(loaded):
        _readable(path, user)
    for directory in (state_dir, *writable):
        if not directory.startswith("/var/lib/"):  # systemd makes those
            _own_directory(Path(directory), user)
    unpacked.prepare(runner)
    unit = layout.UNITS / layout.SERVER_UNIT
    write_atomic(unit, text.encode())
    for words in (
        ["daemon-reload"],
        ["enable", layout.SERVER_UNIT],
        *([["restart", layout.SERVER_UNIT]] if start else []),
    ):
        _must(runner, ["systemctl", "--no-ask-password", *words])
    if not start:
        click.echo(f"installed `{unit}`; `systemctl start {layout.SERVER_UNIT}` starts it")
        return
    _see_it_serve(runner, loaded.http.listen, loaded.state_dir / "admin.sock")
    click.echo(f"installed `{unit}`; it serves `{loaded.http.listen}`")


COMMANDS = (install_service,)


def refuse_homes(paths: Sequence[Path]) -> None:
    """See that the service can reach what it runs from: home directories are closed to it (`ProtectHome`).

    Raises:
        UsageError: one lies in a home directory, or links into one.
    """
    for path in paths:
        real = path.resolve()
        if any(real.is_relative_to(home) for home in ("/home", "/root", "/run/user")):
            raise UsageError(
                f"the service could not reach `{path}`",
                cause=f"{f'it is `{real}`, and ' if real != path else ''}home directories are closed to it",
                hint="install llmgw elsewhere, such as the one file in `/usr/local/lib/llmgw` (docs/operating.md), "
                "and keep server.yaml in `/etc/llmgw`",
            )


def _program() -> list[str]:
    from llmgw.system import layout
    from llmgw.system.selfexec import own_argv

    own = own_argv()
    installed = layout.PROGRAM.exists() and Path(own[-1]).resolve().parent == layout.LIB
    return [str(layout.PROGRAM)] if installed else own


def _make_user(runner: Runner, user: str) -> None:
    import pwd

    try:
        pwd.getpwnam(user)
    except KeyError:
        words = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
        _must(runner, [*words, "--shell", "/usr/sbin/nologin", user])


def _secrets(loaded: ServerSettings) -> list[Path]:
    found = []
    for tls in (loaded.agents.tls, loaded.http.tls):
        for name in ("key", "ca_key"):
            path = getattr(tls, name, None)
            if path:
                found.append(Path(path))
    return found


def _readable(path: Path, user: str) -> None:
    """A private key the server's user cannot read stops it at its start: said now, with the command that helps."""
    import pwd

    try:
        info = path.stat()
    except OSError as error:
        raise UsageError(f"cannot look at `{path}`", cause=error.strerror or str(error)) from error
    if info.st_uid != pwd.getpwnam(user).pw_uid and os.geteuid() == 0:
        raise UsageError(
            f"the user `{user}` cannot read the key `{path}`", cause="it belongs to another user",
            hint=f"`chown {user}: {path}`, then run it again",
        )  # fmt: skip


def _own_directory(path: Path, user: str) -> None:
    """A directory the server keeps its state in: made for its user when missing, else it must be its user's."""
    import pwd

    if os.geteuid() != 0:
        return
    owner = pwd.getpwnam(user)
    if not path.exists():
        make_dir(path, 0o700)
        os.chown(path, owner.pw_uid, owner.pw_gid)
    elif path.stat().st_uid != owner.pw_uid:
        raise UsageError(
            f"the user `{user}` cannot keep its state in `{path}`", cause="it belongs to another user",
            hint=f"`chown -R {user}: {path}`, then run it again",
        )  # fmt: skip


def _see_it_serve(runner: Runner, listen: HostPort, admin: Path) -> None:
    """Until somebody can connect to the server just started, or it is plain that nobody will.

    Args:
        admin: the control process's socket: who answers at `listen` may be another program.

    Raises:
        LlmgwError: with the server's own last words.
    """
    from llmgw.system import layout

    if not listen.port:
        return  # any free one: the log says which
    # what the one before did and said is over
    before, heard = _restarts(runner, layout.SERVER_UNIT), _journal_end(runner)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)  # noqa: S104  (asked, not listened on)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as own:
            own.connect(str(admin))
            with socket.create_connection((host, listen.port), 2.0):
                return
        if _restarts(runner, layout.SERVER_UNIT) > before + _RESTARTS:
            break
        time.sleep(0.2)
    asked = ["journalctl", "-q", "-u", layout.SERVER_UNIT, "-n", "60", "--no-pager", "-o", "cat", *heard]
    raise LlmgwError(
        "the server is installed and does not stay up",
        cause=_last_words(runner.run(asked, timeout_s=30).stdout.splitlines()),
        hint="`journalctl -u llmgw-server` says more",
    )


def _last_words(lines: list[str]) -> str:
    """The last error a program wrote, with its cause and hint; its last line when it wrote none."""
    found: list[str] = []
    for line in lines:
        if line.startswith("error: "):
            found = [line.removeprefix("error: ")]
        elif found and line.startswith(("cause: ", "hint: ")):
            found.append(line.partition(": ")[2])
    return "; ".join(found) or next((line for line in reversed(lines) if line.strip()), "it said nothing")


def _journal_end(runner: Runner) -> list[str]:
    """Options of `journalctl` for what comes from now on; none where that cannot be told."""
    said = runner.run(["journalctl", "-n", "1", "--show-cursor", "--no-pager", "-o", "cat"], timeout_s=30).stdout
    found = said.rpartition("-- cursor: ")[2].strip() if "-- cursor: " in said else ""
    return [f"--after-cursor={found}"] if found else []


def _restarts(runner: Runner, unit: str) -> int:
    said = runner.run(["systemctl", "show", "-p", "NRestarts", "--value", unit], timeout_s=30).stdout.strip()
    return int(said) if said.isdecimal() else 0


def _must(runner: Runner, argv: list[str]) -> None:
    done = runner.run(argv, timeout_s=120)
    if done.code != 0:
        raise CommandError(f"`{' '.join(argv)}` failed", cause=done.last_line() or done.words())
