"""`llmgw agent` as a service of its node: installed, started, seen to run, and removed again.

`llmgw ctl onboard` runs these commands on the node: one set up by hand and one set up from afar are the same.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgw.errors import CommandError, LlmgwError, PkiError, UsageError

if TYPE_CHECKING:
    from llmgw.agent.settings import AgentSettings
    from llmgw.system.commands import Runner

_PATIENCE_S = 30.0


@click.command("install-service")
@click.option("--start", is_flag=True, help="start it now, again when its files are newer than it is, and see it run")
@click.option("--print", "only_print", is_flag=True, help="only print the unit")
@click.pass_obj
def install_service(config: Path, start: bool, only_print: bool) -> None:
    """Make the agent a service of this node: a systemd unit, or, without systemd, words about what to do."""
    from llmgw.agent import settings
    from llmgw.system import layout, unpacked
    from llmgw.system.commands import RealRunner
    from llmgw.system.files import write_atomic

    config = config.absolute()  # a service starts in another directory
    argv = [*_program(), "agent", "-c", str(config)]
    text = layout.agent_unit(argv)
    if only_print:
        click.echo(text, nl=False)
        return
    loaded = settings.load(config)
    unpacked.prepare(RealRunner())
    if not layout.has_systemd():
        _without_systemd(loaded, config, argv, start)
        return
    runner, unit = RealRunner(), layout.UNITS / layout.AGENT_UNIT
    if not unit.exists() or unit.read_text() != text:
        write_atomic(unit, text.encode())
    _systemctl(runner, "daemon-reload")
    _systemctl(runner, "enable", layout.AGENT_UNIT)
    if not start:
        click.echo(f"installed `{unit}`; `systemctl start {layout.AGENT_UNIT}` starts it")
        return
    main = _main_pid(runner)
    if main is None or _newer(main, config, loaded, unit):
        _systemctl(runner, "reset-failed", layout.AGENT_UNIT, fine=True)
        _systemctl(runner, "restart", layout.AGENT_UNIT)
        click.echo(f"{'started' if main is None else 'restarted'} `{layout.AGENT_UNIT}`")
    else:
        click.echo(f"`{layout.AGENT_UNIT}` runs as it should")
    _see_it_run(loaded, lambda: _unit_words(runner))


@click.command("remove-service")
@click.option("--keep-engines", is_flag=True, help="leave running engines alone")
@click.pass_obj
def remove_service(config: Path, keep_engines: bool) -> None:
    """Stop the agent and its engines, and remove its service from this node."""
    from llmgw.agent import settings
    from llmgw.system import layout
    from llmgw.system.commands import RealRunner

    loaded = settings.load(config)
    runner, unit = RealRunner(), layout.UNITS / layout.AGENT_UNIT
    if layout.has_systemd() and unit.exists():
        _systemctl(runner, "disable", layout.AGENT_UNIT)
        _systemctl(runner, "stop", layout.AGENT_UNIT)
        unit.unlink()
        _systemctl(runner, "daemon-reload")
    pid = _running(loaded)
    if pid is not None:
        _end(pid)
    click.echo("the agent is stopped")
    if not keep_engines:
        for words in _end_engines(loaded):
            click.echo(words)


@click.command("certificate")
@click.option("--node", required=True, help="the node's id")
@click.option("--dir", "directory", type=click.Path(path_type=Path), default="/etc/llmgw", show_default=True)
def certificate(node: str, directory: Path) -> None:
    """Take part in getting this node's certificate (`llmgw ctl onboard` runs this).

    Reads a JSON object from standard input: `ca`, PEM, and `certificate` once it was issued. Prints a JSON object:
    `request`, the certificate request, or null when the certificate that is there is good. The key stays here.
    """
    said = json.load(sys.stdin)
    click.echo(json.dumps(_certificate(node, directory, said["ca"], said.get("certificate"), time.time())))


def _certificate(node: str, directory: Path, ca: str, issued: str | None, now: float) -> dict[str, Any]:
    from llmgw.pki import keys
    from llmgw.system.files import make_dir, read_text, write_atomic

    make_dir(directory)
    key_file, cert_file, ca_file = (directory / n for n in ("agent-key.pem", "agent.pem", "ca.pem"))
    if not key_file.exists():
        write_atomic(key_file, keys.key_pem(keys.new_key()), 0o600)
    key: Any = keys.load_key(key_file)
    if issued is not None:
        made = keys.check_answer(issued, key, node)
        write_atomic(ca_file, ca.encode())
        write_atomic(cert_file, keys.certificate_pem(made))
        return {"request": None, "words": "installed"}
    have = read_text(cert_file)
    if have is not None and read_text(ca_file) == ca:
        try:
            made = keys.check_answer(have, key, node)
            begin, end = made.not_valid_before_utc.timestamp(), made.not_valid_after_utc.timestamp()
            if begin <= now < (begin + end) / 2:
                return {"request": None, "words": f"good until {made.not_valid_after_utc:%Y-%m-%d}"}
        except PkiError:
            pass
    return {"request": keys.make_request(key, node), "words": "asked for"}


@click.command("tidy")
def tidy() -> None:
    """Remove what older releases of llmgw left on this node and nobody uses."""
    from llmgw.system import unpacked

    for words in unpacked.clean():
        click.echo(words)


COMMANDS = (install_service, remove_service, certificate, tidy)


def _program() -> list[str]:
    """How the service starts llmgw: by the fixed name when this one is installed, so that an upgrade needs no edit."""
    from llmgw.system import layout
    from llmgw.system.selfexec import own_argv

    own = own_argv()
    if layout.PROGRAM.exists() and layout.CURRENT.exists() and Path(own[-1]).resolve().parent == layout.LIB:
        return [str(layout.PROGRAM)]
    return own


def _systemctl(runner: Runner, *argv: str, fine: bool = False) -> str:
    done = runner.run(["systemctl", "--no-ask-password", *argv], timeout_s=120)
    if done.code != 0 and not fine:
        raise CommandError(
            f"`systemctl {' '.join(argv)}` failed", cause=done.last_line() or done.words(),
            hint="`systemctl status llmgw-agent` and `journalctl -u llmgw-agent` say more",
        )  # fmt: skip
    return done.stdout


def _main_pid(runner: Runner) -> int | None:
    from llmgw.system import layout

    text = _systemctl(runner, "show", "--property=MainPID", "--value", layout.AGENT_UNIT, fine=True).strip()
    return int(text) if text.isdigit() and int(text) > 0 else None


def _newer(pid: int, config: Path, loaded: AgentSettings, unit: Path) -> bool:
    """Whether anything the agent reads only at its start has changed since."""
    from llmgw.agent import procs
    from llmgw.system import layout

    stat = procs.read_stat(pid)
    if stat is None:
        return True
    age_s = (procs.ticks_now() - stat.start_ticks) / os.sysconf("SC_CLK_TCK")
    began = time.time() - age_s
    tls = loaded.tls
    files = [config, unit, *([Path(tls.ca), Path(tls.cert), Path(tls.key)] if tls is not None else [])]
    times = [path.stat().st_mtime for path in files if path.exists()]
    if layout.CURRENT.is_symlink():
        times.append(layout.CURRENT.lstat().st_mtime)
    return max(times, default=0.0) > began - 0.05


def _unit_words(runner: Runner) -> str:
    from llmgw.system import layout

    lines = _systemctl(runner, "status", "--no-pager", "--lines=15", layout.AGENT_UNIT, fine=True).splitlines()
    said = [line.split(": ", 1)[-1] for line in lines if "error: " in line or "cause: " in line]
    return "; ".join(said[-2:]) or (lines[-1].strip() if lines else "it said nothing")


def _running(loaded: AgentSettings) -> int | None:
    """The pid of a living agent of this configuration."""
    from llmgw.agent.app import _alive
    from llmgw.system.files import read_text

    try:
        pid = int(json.loads(read_text(Path(loaded.supervisor.work_dir, "status.json")) or "{}")["pid"])
    except (ValueError, KeyError, TypeError):
        return None
    return pid if _alive(pid) else None


def _see_it_run(loaded: AgentSettings, words: Any) -> None:
    """Until the agent has written its status once more, or it is plain that it will not."""
    deadline = time.monotonic() + _PATIENCE_S
    while _running(loaded) is None:
        if time.monotonic() > deadline:
            raise LlmgwError("the agent does not stay up", cause=words(), hint="`journalctl -u llmgw-agent` says more")
        time.sleep(0.1)


def _without_systemd(loaded: AgentSettings, config: Path, argv: list[str], start: bool) -> None:
    from llmgw.agent import procs
    from llmgw.system import layout
    from llmgw.system.commands import start_daemon
    from llmgw.system.files import read_text

    line = f"{' '.join(argv)} >>{layout.AGENT_LOG} 2>&1 &"
    click.echo("this machine is not run by systemd, so nothing starts the agent after a reboot")
    click.echo(f"put this into what your machine runs at boot, as root: {line}")
    if not start:
        return
    pid = _running(loaded)
    if pid is not None and _newer(pid, config, loaded, Path("/nonexistent")):
        _end(pid)
        pid = None
    if pid is None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SUDO_", "SSH_", "XDG_"))}
        daemon = start_daemon(argv, env=env | {"PYTHONUNBUFFERED": "1"}, log_path=str(layout.AGENT_LOG))
        deadline = time.monotonic() + _PATIENCE_S
        while _running(loaded) != daemon.pid:
            stat = procs.read_stat(daemon.pid)
            if daemon.poll() is not None or stat is None or time.monotonic() > deadline:
                lines = (read_text(layout.AGENT_LOG) or "").strip().splitlines()
                cause = next((each for each in reversed(lines) if "error: " in each), lines[-1] if lines else "")
                raise LlmgwError("the agent does not stay up", cause=cause, hint=f"`{layout.AGENT_LOG}` says more")
            time.sleep(0.1)
        click.echo(f"started the agent for now, pid {daemon.pid}; its log is `{layout.AGENT_LOG}`")
    else:
        click.echo(f"the agent runs as it should, pid {pid}")


def _end(pid: int) -> None:
    from llmgw.agent import procs

    first = procs.read_stat(pid)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE_S
    while (stat := procs.read_stat(pid)) is not None and not stat.ended:
        if first is None or stat.start_ticks != first.start_ticks:
            return
        if time.monotonic() > deadline:
            raise UsageError(f"process {pid} does not stop", hint=f"`kill -9 {pid}`")
        time.sleep(0.05)


def _end_engines(loaded: AgentSettings) -> list[str]:
    """End every process that carries an engine's marker and lives below this agent's directory."""
    from llmgw.agent import procs

    def ours() -> list[int]:
        home = loaded.supervisor.work_dir.rstrip("/") + "/"
        found = []
        for pid in procs.all_pids():
            environ = procs.read_environ(pid)
            if environ is not None and procs.MARKER in environ and environ.get("HOME", "").startswith(home):
                found.append(pid)
        return found

    said, deadline = [], time.monotonic() + loaded.supervisor.stop_timeout_s
    asked: set[int] = set()
    while pids := ours():
        late = time.monotonic() > deadline
        for pid in pids:
            if pid not in asked or late:
                asked.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                except ProcessLookupError:
                    continue
        if time.monotonic() > deadline + 10:
            raise LlmgwError(f"engine processes {pids} cannot be killed", hint="restart the node")
        time.sleep(0.1)
    if asked:
        said.append(f"{len(asked)} engine processes have ended")
    return said
