"""Seen to run: the libraries by `ldd`, then the recipe's own programs, up to a few tokens from a tiny model.

Every program runs in a session of its own, with a timeout, an output cap, an almost empty environment, and in a
directory nobody else can write (a llama.cpp build loads backends from its working directory too).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from llmgw.domain.engines import Check, Recipe
from llmgw.domain.facts import NodeFacts, OsFacts
from llmgw.errors import CommandError, HttpError, LlmgwError, ProofFailed
from llmgw.install.elf import NotElf, is_elf, read_elf
from llmgw.install.ldd import Linked, joined, parse_ldd, too_new, version_words
from llmgw.install.tree import matching
from llmgw.system.clock import Clock
from llmgw.system.commands import MINIMAL_ENV, Daemon, Runner, exit_words, start_daemon

_OUTPUT_CAP = 1 << 20
_POLL_S = 0.05
_BAD_ARCHIVE = "the archive is wrong at its source: tell whoever publishes it, or name another source in server.yaml"
_NOT_LOADED = "run `ldd` on the program; when it misses nothing, the archive is wrong at its source: name another one"
_SAME_ARCH = {"amd64": "x86_64", "arm64": "aarch64"}
TINY_MODEL = Path(__file__).with_name("tiny.gguf")

Say = Callable[[str], None]


class Answer(Protocol):
    """A whole HTTP answer."""

    @property
    def status(self) -> int: ...
    @property
    def body(self) -> bytes: ...


class Asker(Protocol):
    """The part of the HTTP client that a proof needs."""

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout_s: float = 10.0,
    ) -> Any: ...


@frozen
class Proof:
    """One thing that was seen: `title` and the line that shows it."""

    title: str
    words: str


class Prover:
    """Runs a recipe's checks on this node.

    Args:
        runner: starts programs.
        http: asks a server that is being proven.
        clock: for deadlines.
        model: the tiny model for `{model}`.
    """

    def __init__(self, runner: Runner, http: Asker, clock: Clock, model: Path = TINY_MODEL) -> None:
        self._runner = runner
        self._http = http
        self._clock = clock
        self._model = model

    def check_files(self, directory: Path, recipe: Recipe, facts: NodeFacts) -> None:
        """Read what the files of the build ask for, before any of them is run.

        Raises:
            ProofFailed: a file is not there, cannot be executed, is cut short, is for another machine, or asks for a
                newer C or C++ library than this node has.
        """
        self._expected(directory, recipe)
        binary = directory / recipe.binary
        if not os.access(binary, os.X_OK):
            mode = binary.stat().st_mode & 0o7777
            raise ProofFailed(
                f"`{recipe.binary}` has no execute bit in its archive (mode {mode:04o})", hint=_BAD_ARCHIVE
            )
        libraries = matching(directory, "*.so*")
        loaded = {path for pattern in recipe.shared_objects for path in matching(directory, pattern)}
        needs: dict[str, None] = {}
        for path in (binary, *libraries):
            if path.is_symlink() or not (is_elf(path) or path in loaded):
                continue  # a script in place of the binary is judged by running it
            name = path.relative_to(directory)
            try:
                found = read_elf(path)
            except NotElf as error:
                raise ProofFailed(f"`{name}` {error}", hint=_BAD_ARCHIVE) from error
            except OSError as error:
                raise ProofFailed(f"cannot read `{path}`", cause=error.strerror or str(error)) from error
            if found.machine not in (facts.cpu.arch, _SAME_ARCH.get(facts.cpu.arch)):
                raise ProofFailed(
                    f"`{name}` is built for {found.machine}, this node is {facts.cpu.arch}", hint=_BAD_ARCHIVE
                )
            needs.update(dict.fromkeys(found.versions))
        own = {path.name for path in libraries}
        self.check_versions(Linked(versions=too_new(needs, facts.os, own)), facts.os)

    def _expected(self, directory: Path, recipe: Recipe) -> None:
        if not (directory / recipe.binary).is_file():
            raise ProofFailed(f"the archive has no `{recipe.binary}`", hint=_BAD_ARCHIVE)
        for pattern in recipe.expected_files:
            if not matching(directory, pattern):
                raise ProofFailed(f"no file matches `{pattern}`, which this build must have", hint=_BAD_ARCHIVE)

    def libraries(self, directory: Path, recipe: Recipe) -> Linked:
        """What the binary and every dlopened library of the build need and this node lacks.

        Raises:
            ProofFailed: an expected file is not there, or the dynamic loader refuses one.
        """
        self._expected(directory, recipe)
        binary = directory / recipe.binary
        shared = [path for pattern in recipe.shared_objects for path in matching(directory, pattern)]
        answers = [self._ldd(path) for path in dict.fromkeys((binary, *shared))]
        found = joined(answers)
        if found.problem:
            raise ProofFailed("a file of this build cannot be loaded", cause=found.problem)
        missing = tuple(library for library in found.missing if library not in recipe.ignore_missing)
        return Linked(missing, found.versions)

    def check_versions(self, found: Linked, system: OsFacts) -> None:
        """Refuse symbol versions that no package can bring.

        Raises:
            ProofFailed: `this build needs GLIBC_2.38, this node has 2.36`.
        """
        if found.versions:
            raise ProofFailed(version_words(found.versions, system), hint="use a build made for an older distribution")

    def _ldd(self, path: Path) -> Linked:
        try:
            done = self._runner.run(("ldd", str(path)), timeout_s=30.0, cwd="/")
        except CommandError as error:
            raise ProofFailed("`ldd` cannot be run on this node", cause=error.cause) from error
        answer = parse_ldd(done.stdout, done.stderr, done.code)
        if answer.problem:
            return Linked(problem=f"`{path.name}`: {answer.problem}")
        return answer

    def prove(
        self,
        directory: Path | None,
        checks: Sequence[Check],
        scratch: Path,
        say: Say,
        stop: threading.Event,
        *,
        quick: bool = False,
    ) -> tuple[Proof, ...]:
        """See each check succeed.

        Args:
            directory: of the engine, for `{dir}`; None for a named engine.
            scratch: a directory only we can write: working directory and HOME of what runs.
            quick: only the checks that are repeated at every re-check.

        Returns:
            What was seen, one per check.

        Raises:
            ProofFailed: the first check that failed, with what the program said.
        """
        seen = []
        for check in checks:
            if stop.is_set():
                raise ProofFailed("stopped while proving")
            if (quick and not check.quick) or not self._applies(check, directory):
                continue
            say(f"proving: {check.title}")
            seen.append(
                self._serve(check, directory, scratch) if check.serves else self._run(check, directory, scratch)
            )
        return tuple(seen)

    def _applies(self, check: Check, directory: Path | None) -> bool:
        if directory is None:
            return True
        if check.only_with and not (directory / check.only_with).is_file():
            return False
        return not (check.only_without and (directory / check.only_without).is_file())

    def _argv(self, check: Check, directory: Path | None, port: int = 0) -> list[str]:
        known = {"{dir}": str(directory or ""), "{model}": str(self._model), "{port}": str(port)}
        argv = list(check.argv)
        for name, value in known.items():
            argv = [part.replace(name, value) for part in argv]
        return argv

    def _env(self, check: Check, scratch: Path) -> dict[str, str]:
        return {**MINIMAL_ENV, "HOME": str(scratch), "TMPDIR": str(scratch), **check.env}

    def _run(self, check: Check, directory: Path | None, scratch: Path) -> Proof:
        try:
            done = self._runner.run(
                self._argv(check, directory),
                timeout_s=check.timeout_s,
                env=self._env(check, scratch),
                cwd=str(scratch),
                output_cap=_OUTPUT_CAP,
            )
        except CommandError as error:
            raise ProofFailed(f"{check.title}: {error.message}", cause=error.cause) from error
        if done.timed_out:
            raise ProofFailed(f"{check.title} gave no answer in {check.timeout_s:g} s", cause=done.last_line()[:300])
        if done.truncated:
            raise ProofFailed(f"{check.title} printed more than {_OUTPUT_CAP} bytes and was stopped")
        if done.code != 0:
            hint = _NOT_LOADED if done.code == 127 else ""
            raise ProofFailed(f"{check.title} {done.words()}", cause=done.last_line()[:300], hint=hint)
        shown = ""
        for pattern, text, where in ((check.stderr, done.stderr, "stderr"), (check.stdout, done.stdout, "stdout")):
            if not pattern:
                continue
            match = re.search(pattern, text, re.MULTILINE)
            if match is None:
                said = _first_lines(text) or done.last_line()[:200]
                raise ProofFailed(
                    f"{check.title} did not answer as this build must",
                    cause=f"it said {said!a} where {where} must match `{pattern}`",
                    hint=check.hint,
                )
            telling = match.groupdict().get("shown") or match[0]
            shown = shown or next((line for line in telling.splitlines() if line.strip()), "")
        return Proof(check.title, (shown or done.last_line())[:300])

    def _serve(self, check: Check, directory: Path | None, scratch: Path) -> Proof:
        port = _free_port()
        log = scratch / "serve.log"
        log.unlink(missing_ok=True)
        argv = self._argv(check, directory, port)
        try:
            daemon = start_daemon(argv, env=self._env(check, scratch), log_path=str(log), cwd=str(scratch))
        except CommandError as error:
            raise ProofFailed(f"{check.title}: {error.message}", cause=error.cause) from error
        deadline = self._clock.monotonic() + check.timeout_s
        base = f"http://127.0.0.1:{port}"
        try:
            self._await_health(check, daemon, base, log, deadline)
            tokens = self._ask(check, base, max(1.0, deadline - self._clock.monotonic()))
        finally:
            _end(daemon)
        return Proof(check.title, f"served {tokens} tokens from the tiny model")

    def _await_health(self, check: Check, daemon: Daemon, base: str, log: Path, deadline: float) -> None:
        pause = threading.Event()
        while True:
            code = daemon.poll()
            if code is not None:
                raise ProofFailed(f"{check.title} {exit_words(code)}", cause=_last_line(log))
            try:
                if self._http.request("GET", base + check.health_path, timeout_s=2.0).status == 200:
                    return
            except HttpError:
                pass  # nothing listens yet: the process and the deadline decide
            if log.stat().st_size > 64 * _OUTPUT_CAP:
                raise ProofFailed(f"{check.title} printed more than {64 * _OUTPUT_CAP} bytes and was stopped")
            if self._clock.monotonic() >= deadline:
                raise ProofFailed(f"{check.title} was not ready in {check.timeout_s:g} s", cause=_last_line(log))
            self._clock.wait(pause, _POLL_S)

    def _ask(self, check: Check, base: str, timeout_s: float) -> int:
        try:
            answer = self._http.request(
                "POST",
                base + check.probe_path,
                headers={"Content-Type": "application/json"},
                body=check.probe_body.encode(),
                timeout_s=timeout_s,
            )
        except LlmgwError as error:
            raise ProofFailed(f"{check.title} did not answer", cause=error.words()) from error
        text = bytes(answer.body[:4096]).decode("utf-8", "replace")
        try:
            tokens = json.loads(answer.body)["usage"]["completion_tokens"]
        except (ValueError, KeyError, TypeError):
            tokens = 0
        if answer.status != 200 or not isinstance(tokens, int) or tokens < 1:
            raise ProofFailed(f"{check.title} gave no token", cause=f"status {answer.status}: {text[:200]!a}")
        return tokens


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(daemon: Daemon) -> None:
    """Nothing of it must stay: the whole group is killed, also when its leader has ended by itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(daemon.pid, signal.SIGKILL)
    daemon.wait(5.0)


def _first_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[:2])[:200]


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - 4096))
            lines = handle.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
