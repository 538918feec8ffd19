"""The command line: imports one app lazily, and turns every error into words and an exit code.

Nothing but the standard library is imported at module top: an interpreter that is too old must get words, not a
SyntaxError out of a library.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

    from llmgw.errors import LlmgwError

OLDEST = (3, 11)
DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

# the short help stands here so that `--help` imports no app
COMMANDS = {
    "server": ("llmgw.server.app:command", "Run the control plane and the gateways it starts"),
    "agent": ("llmgw.agent.app:command", "Run the agent of this node"),
    "ctl": ("llmgw.ctl.app:command", "Look at a cluster and change it"),
    "doctor": ("llmgw.agent.app_doctor:command", "Look at everything on this node, one line each, with the fix"),
    "up": ("llmgw.up:command", "Run server and agent in one go on this machine"),
    "gateway": ("llmgw.gateway.worker:command", "Run one gateway process (the server starts these)"),
}
HIDDEN = ("gateway",)


def main() -> None:
    """Entry point: run the command line and exit the process."""
    words = too_old(sys.version_info[:2], sys.executable)
    if words:
        sys.stderr.write(words)
        sys.exit(FAILED)
    sys.exit(run(sys.argv[1:]))


def too_old(version: tuple[int, ...], executable: str) -> str:
    """What to print when the interpreter is too old, "" when it is not."""
    if version >= OLDEST:
        return ""
    found = ".".join(str(part) for part in version)
    return (
        f"error: llmgw needs Python 3.11 or newer, `{executable}` is {found}\n"
        "hint: start it with a newer interpreter, such as `python3.12`\n"
    )


def run(argv: list[str]) -> int:
    """Run one command line; errors are printed to stderr.

    Returns:
        The exit code: 0 done, 1 failed, 2 the command line or a file is wrong, 130 interrupted.
    """
    import click

    from llmgw.errors import LlmgwError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a locale that lacks a character must not turn words into a traceback
            stream.reconfigure(errors="backslashreplace")
    debug = [bool(os.environ.get("LLMGW_DEBUG"))]
    try:
        code = _group(debug).main(args=argv, prog_name="llmgw", standalone_mode=False)
        sys.stdout.flush()
    except LlmgwError as error:
        _traceback(debug[0])
        show(error)
        return error.exit_code
    except click.UsageError as error:
        return _usage(error)
    except click.ClickException as error:
        _say("error", error.format_message().rstrip("."))
        return int(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _say("error", "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has left; Python would complain once more while closing stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except Exception as error:
        return _bug(error, debug[0])
    return code if isinstance(code, int) else DONE


def show(error: LlmgwError) -> None:
    """Print an error for people: what was tried, every problem or the cause, and what to do next."""
    from llmgw.errors import ConfigError

    _say("error", error.message)
    if isinstance(error, ConfigError) and error.problems:
        for problem in error.problems:
            _print(problem)
    elif error.cause:
        _say("cause", error.cause)
    if error.hint:
        _say("hint", error.hint)


def _group(debug: list[bool]) -> click.Group:
    import click

    from llmgw import __version__
    from llmgw.ctl.lazy import LazyGroup

    def set_debug(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        debug[0] = debug[0] or value

    @click.group(
        cls=LazyGroup,
        table=COMMANDS,
        hidden=HIDDEN,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    @click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=set_debug,
        help="Show where an error comes from (also: LLMGW_DEBUG=1).",
    )
    @click.version_option(__version__, message="llmgw %(version)s")
    def llmgw() -> None:
        """Turns a pile of Linux machines into one LLM endpoint."""

    return llmgw


def _usage(error: click.UsageError) -> int:
    from click.exceptions import NoArgsIsHelpError

    if isinstance(error, NoArgsIsHelpError):
        _print(error.format_message())
        return USAGE
    _say("error", error.format_message().rstrip("."))
    if error.ctx is not None:
        _say("hint", f"see `{error.ctx.command_path} --help`")
    return USAGE


def _bug(error: Exception, debug: bool) -> int:
    _say("error", f"{type(error).__name__}: {error}")
    _say("cause", "this is a bug in llmgw, or in a plugin")
    if not debug:
        _say("hint", "run it again with `LLMGW_DEBUG=1` and report the traceback")
    _traceback(debug)
    return FAILED


def _traceback(debug: bool) -> None:
    if debug:
        import traceback

        _print(traceback.format_exc().rstrip())


def _say(what: str, words: str) -> None:
    from llmgw.ctl.text import escape

    # escaped here already, so that a line break in somebody's words cannot begin a `hint:` of theirs
    _print(f"{what}: {escape(words)}")


def _print(text: str) -> None:
    from llmgw.ctl.text import escape

    # words may quote a node or a client: nothing a terminal could obey gets through
    lines = [escape(line) for line in text.split("\n")]
    try:
        sys.stderr.write("\n".join(lines) + "\n")
    except OSError:
        pass  # nobody is left to read it
