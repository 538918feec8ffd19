"""A click group whose commands stand in a table of strings: `--help` imports none of them, one command only itself."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click


class LazyGroup(click.Group):
    """The group.

    Args:
        table: name -> (`module:attribute`, short help).
        hidden: names that work but are not listed.
    """

    def __init__(
        self, *args: Any, table: Mapping[str, tuple[str, str]], hidden: Sequence[str] = (), **given: Any
    ) -> None:
        super().__init__(*args, **given)
        self.table = table
        self.hidden_names = tuple(hidden)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [name for name in self.table if name not in self.hidden_names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self.table:
            return None
        module, _, attribute = self.table[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.table and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib

            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1, cutoff=0.6)
            guess = f"did you mean `{near[0]}`?" if near else f"choose from {', '.join(self.list_commands(ctx))}"
            ctx.fail(f"there is no command `{name}`, {guess}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.table[name][1]) for name in self.list_commands(ctx)])
