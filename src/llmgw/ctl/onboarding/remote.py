"""One machine over OpenSSH: never asks anything, never takes a host key it does not know."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from attrs import frozen

from llmgw.ctl.text import escape
from llmgw.errors import LlmgwError, UsageError
from llmgw.system.commands import Completed, Runner

_TARGET = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}@)?[A-Za-z0-9_\[:][A-Za-z0-9_.:\[\]%-]{0,252}")
_SSH_FAILED = 255


class RemoteError(LlmgwError):
    """A machine could not be reached over ssh, or a command on it failed."""

    code = "remote-failed"


@frozen
class SshOptions:
    """How ssh is called: `config` for `-F`, `port` for `-p`, `identity` for `-i`; None leaves it to ssh."""

    config: str | None = None
    port: int | None = None
    identity: str | None = None

    def argv(self) -> list[str]:
        """The options."""
        given = (("-F", self.config), ("-p", self.port), ("-i", self.identity))
        return [part for flag, value in given if value is not None for part in (flag, str(value))]


def check_target(text: str) -> str:
    """Return `user@host` when nothing in it could be taken for an option or a command.

    Raises:
        UsageError: it could.
    """
    if not _TARGET.fullmatch(text):
        raise UsageError(f"`{escape(text[:80])}` is not a machine to log in to", hint="write `user@host` or `host`")
    return text


class Remote:
    """Runs shell scripts on `target`.

    Args:
        env: this process's environment: ssh finds its agent and its files by it.
    """

    def __init__(self, target: str, options: SshOptions, runner: Runner, env: Mapping[str, str]) -> None:
        self.target = check_target(target)
        self._options = options
        self._runner = runner
        self._env = dict(env)
        self.sudo = False

    def run(
        self, script: str, *args: str, stdin: bytes = b"", timeout_s: float = 120.0, fine: Sequence[int] = ()
    ) -> Completed:
        """Run a POSIX shell script as root (by `sudo -n` when `sudo` is set) with arguments and standard input.

        Args:
            fine: exit codes beside 0 that the caller understands.

        Raises:
            RemoteError: no connection, no answer in time, or another exit code.
        """
        words = [*(["sudo", "-n"] if self.sudo else []), "sh", "-c", script, "llmgw", *args]
        argv = ["ssh", *self._options.argv()]
        for option in (
            "BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=10", "ServerAliveInterval=5",
            "ServerAliveCountMax=3", "ForwardAgent=no", "ForwardX11=no", "PermitLocalCommand=no", "LogLevel=ERROR",
        ):  # fmt: skip
            argv += ["-o", option]
        argv += ["--", self.target, " ".join(shlex.quote(each) for each in words)]
        # a script without input of its own must not wait for ours
        done = self._runner.run(argv, timeout_s=timeout_s, env=self._env, stdin=stdin)
        if done.code in (0, *fine) and not done.timed_out:
            return done
        raise self._failed(done)

    def _failed(self, done: Completed) -> RemoteError:
        said = escape(done.last_line())[:400]
        if done.timed_out:
            return RemoteError(f"`{self.target}` gave no answer in time", hint="look at the machine, and run it again")
        if done.code != _SSH_FAILED:
            return RemoteError(f"a step on `{self.target}` failed", cause=said or done.words())
        text = done.stderr
        if "IDENTIFICATION HAS CHANGED" in text or "Host key verification failed" in text:
            changed = "IDENTIFICATION HAS CHANGED" in text
            cause = "its host key is not the one that is known" if changed else "its host key is not known"
            return RemoteError(
                f"`{self.target}` is not trusted", cause=cause, code="host-key",
                hint="compare its fingerprint with what the machine's own console shows "
                "(`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`), then put the key into known_hosts",
            )  # fmt: skip
        hint = "try `ssh -o BatchMode=yes " + self.target + " true`"
        if "Permission denied" in text:
            hint = "put your public key into its authorized_keys, or start an ssh-agent; passwords are never asked for"
        return RemoteError(f"cannot reach `{self.target}` over ssh", cause=said or "the connection broke", hint=hint)
