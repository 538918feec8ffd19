"""`llmgw server install-service`: the control plane as a systemd service, under a user of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmgw.errors import CommandError, UsageError

if TYPE_CHECKING:
    from llmgw.server.settings import ServerSettings
    from llmgw.system.commands import Runner

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
    runner = RealRunner()
    _make_user(runner, user)
    for path in _secrets(loaded):
        _readable(path, user)
    unpacked.prepare()
    unit = layout.UNITS / layout.SERVER_UNIT
    write_atomic(unit, text.encode())
    for words in (
        ["daemon-reload"],
        ["enable", layout.SERVER_UNIT],
        *([["restart", layout.SERVER_UNIT]] if start else []),
    ):
        _must(runner, ["systemctl", "--no-ask-password", *words])
    click.echo(f"installed `{unit}`" + ("" if start else f"; `systemctl start {layout.SERVER_UNIT}` starts it"))


COMMANDS = (install_service,)


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


def _must(runner: Runner, argv: list[str]) -> None:
    done = runner.run(argv, timeout_s=120)
    if done.code != 0:
        raise CommandError(f"`{' '.join(argv)}` failed", cause=done.last_line() or done.words())
