"""What the subcommands share: the connection, the clock, and the options that say where the server is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from llmgw.ctl import contexts
from llmgw.ctl.client import Client, Transport
from llmgw.ctl.text import escape
from llmgw.errors import LlmgwError, Unreachable
from llmgw.system.clock import Clock

F = TypeVar("F", bound=Callable[..., Any])


class Session:
    """One run of `llmgw ctl`. Nothing is read or dialed before `client` is asked for.

    Args:
        clock: for ages and for `--watch`.
        dial: makes the HTTP client from a CA file (None: the machine's own authorities) and, when there is one, from an
            operator's certificate and its key.
    """

    def __init__(self, clock: Clock, dial: Callable[..., Transport]) -> None:
        self.clock = clock
        self._dial = dial
        self._given: dict[str, str] = {}
        self._client: Client | None = None

    def give(self, name: str, value: str) -> None:
        """Take an option: `server`, `token_file` or `context`."""
        self._given[name] = value

    def client(self) -> Client:
        """The client of the chosen server.

        Raises:
            UsageError: where to go, or the token, is not clear.
        """
        if self._client is None:
            where = contexts.find(os.environ, **self._given)
            if where.token is not None and where.exposed:
                click.echo(f"warning: the token crosses the network in the clear to `{where.server}`", err=True)
            http = self._dial(where.ca, where.certificate) if where.certificate else self._dial(where.ca)
            self._client = Client(where, http)
        return self._client


def for_each(names: Iterable[str], do: Callable[[str], None]) -> None:
    """Do it for every name: one that fails keeps no other from its turn.

    Raises:
        LlmgwError: the last failure; those before it have been printed.
    """
    last: LlmgwError | None = None
    for name in names:
        try:
            do(name)
        except Unreachable:
            raise
        except LlmgwError as error:
            if last is not None:
                click.echo(f"error: {escape(last.words())}", err=True)
            last = error
    if last is not None:
        raise last


def connection(command: F) -> F:
    """Give a command the options that say where the server is."""

    def keep(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None and param.name is not None:
            ctx.obj.give(param.name, value)

    for flag, metavar, text in (
        ("--context", "NAME", "A context of ~/.config/llmgw/ctl.yaml."),
        ("--token-file", "FILE", "File with the admin token (also: LLMGW_TOKEN_FILE)."),
        ("--server", "URL", "Server to talk to (also: LLMGW_SERVER)."),
    ):
        command = click.option(flag, metavar=metavar, expose_value=False, callback=keep, help=text)(command)
    return command
