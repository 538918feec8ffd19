"""The command: choose, start, watch until the model answers, then serve until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmgw.errors import LlmgwError, UsageError
from llmgw.up.choice import ENGINE, check_model, choose
from llmgw.up.talk import Talk
from llmgw.up.watch import Watch

if TYPE_CHECKING:
    from llmgw.up.parts import Parts

QUESTION = "What is the capital of France?"


def default_state() -> Path:
    """Where `up` keeps everything unless told otherwise."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base, "llmgw", "up")


@click.command("up")
@click.option(
    "--model",
    metavar="MODEL",
    help="GGUF file, hf:ORG/REPO@REV:FILE or https://…#sha256=…; chosen for you when left out",
)
@click.option("--question", default=QUESTION, show_default=True, help="what the model is asked once it is ready")
@click.option("--once", is_flag=True, help="stop everything and exit 0 after the answer")
@click.option(
    "--listen", default="127.0.0.1:8080", show_default=True, metavar="HOST:PORT", help="where the API and the page are"
)
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="where everything is kept  [~/.local/state/llmgw/up]"
)
def command(model: str | None, question: str, once: bool, listen: str, state_dir: Path | None) -> None:
    """Serve one model on this machine: server and agent in one go, on loopback.

    The agent installs an engine and proves that it runs, the weights are fetched, one real question is asked. Ctrl-C
    stops everything. A second start reuses what is there.
    """
    from llmgw.system.files import lock, make_dir

    _check_listen(listen)
    if model:
        check_model(model)
    state = (state_dir or default_state()).expanduser().resolve()
    make_dir(state, 0o700)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with lock(state / "up.lock", "another `llmgw up`"):
        _serve(state, listen, model, question, once, stop)


def _check_listen(listen: str) -> None:
    from llmgw.config import parse_host_port

    try:
        address = parse_host_port(listen)
    except ValueError as error:
        raise UsageError(f"cannot listen there: {error}", hint="write `--listen 127.0.0.1:9000`") from error
    if not address.loopback or address.port == 0:
        raise UsageError(
            f"`llmgw up` does not listen on `{listen}`",
            cause="it serves this machine alone, without keys and TLS, on a port you know",
            hint="write `--listen 127.0.0.1:9000`; docs/quickstart.md says how to serve others",
        )


def _serve(state: Path, listen: str, model: str | None, question: str, once: bool, stop: threading.Event) -> None:
    from llmgw.providers import registry
    from llmgw.system.http import Http
    from llmgw.up.parts import Parts

    watch, parts = Watch(), Parts(state, listen)
    with Http() as http:
        talk = Talk(http, parts, watch, stop)
        choice = choose(state / "choice.json", talk, registry.load().get(ENGINE).origin, model, watch.line)
        parts.sweep()
        parts.configure(choice)
        try:
            parts.start("server")
            talk.await_server()
            talk.apply(choice)
            parts.start("agent", "--stop-engines")
            talk.await_ready(choice.model_name, give_up=once)
            if not stop.is_set():
                _answer(talk, choice.model_name, question)
            if not stop.is_set() and not once:
                for line in _invitation(parts, choice.model_name):
                    watch.line(line)
            while not once and not stop.wait(0.5):
                parts.check()
        finally:
            if not once:
                watch.line("stopping engines, agent and server")
            parts.stop()
    if once and stop.is_set():
        raise LlmgwError("stopped before the answer", hint="run it again: what was fetched is kept")


def _answer(talk: Talk, name: str, question: str) -> None:
    click.echo(f"\n> {question}")
    for piece in talk.ask(name, question):
        sys.stdout.write(piece)
        sys.stdout.flush()
    click.echo("\n")


def _invitation(parts: Parts, name: str) -> tuple[str, ...]:
    """What to do with it now, in lines that can be pasted into the shell `up` was started from."""
    from llmgw.system.selfexec import own_words

    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    where = "" if parts.state == default_state().expanduser().resolve() else parts.ctl_options() + " "
    return (
        f"cluster page:  {parts.url}/",
        f"ask it:        curl {parts.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        f"look at it:    {own_words()} ctl {where}nodes",
        "stop it:       Ctrl-C",
    )
