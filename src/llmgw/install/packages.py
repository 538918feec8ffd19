"""The node's own package manager: only allow-listed packages, simulated first, never a removal or an upgrade."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from attrs import field, frozen

from llmgw.domain.facts import OsFacts
from llmgw.errors import CommandError, PackagesFailed
from llmgw.system.clock import Clock
from llmgw.system.commands import MINIMAL_ENV, Completed, Runner

_LOCK_LOOK_S = 2.0
_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]*")
Say = Callable[[str], None]


@frozen
class Manager:
    """One package manager's ways: argument lists and the words it uses.

    Args:
        program: found on the fixed PATH.
        simulate, install: followed by the package names.
        refresh: brings the lists up to date.
        removes: regex over the simulation's output: it would remove or upgrade something (group 1: what).
        unknown: regex: no source has the package, or the lists are stale.
        locked: regex: another package manager is at work.
        repair: regex -> what a person must run first.
        env: added to PATH and LC_ALL.
        simulate_codes: exit codes of a simulation that went well.
    """

    program: str
    simulate: tuple[str, ...]
    install: tuple[str, ...]
    refresh: tuple[str, ...]
    removes: str
    unknown: str
    locked: str
    repair: Mapping[str, str] = field(factory=dict)
    env: Mapping[str, str] = field(factory=dict)
    simulate_codes: tuple[int, ...] = (0,)

    @property
    def by_hand(self) -> tuple[str, ...]:
        """What a person types before the package names."""
        return (self.program, {"pacman": "-S", "apk": "add"}.get(self.program, "install"))


_APT_OPTIONS = (
    "-y", "--no-install-recommends", "--no-upgrade",
    "-o", "Dpkg::Options::=--force-confold", "-o", "Dpkg::Options::=--force-confdef",
    "-o", "DPkg::Lock::Timeout=0", "-o", "Acquire::Retries=3",
)  # fmt: skip

MANAGERS: Mapping[str, Manager] = {
    "debian": Manager(
        "apt-get",
        simulate=("apt-get", "-s", "-y", "--no-install-recommends", "--no-upgrade", "install", "--"),
        install=("apt-get", *_APT_OPTIONS, "--no-remove", "install", "--"),
        refresh=("apt-get", "-o", "Acquire::Retries=3", "update"),
        removes=r"^(?:Remv (\S+)|Inst (\S+) \[)",
        unknown=r"Unable to locate package|has no installation candidate|404 +Not Found",
        locked=r"Could not get lock|Unable to lock directory|Unable to acquire the dpkg",
        repair={r"dpkg was interrupted": "dpkg --configure -a", r"unmet dependencies": "apt-get --fix-broken install"},
        env={"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1", "NEEDRESTART_MODE": "l"},
    ),
    "rhel": Manager(
        "dnf",
        simulate=("dnf", "--assumeno", "--setopt=install_weak_deps=False", "install", "--"),
        install=("dnf", "-y", "--setopt=install_weak_deps=False", "install", "--"),
        refresh=("dnf", "-y", "makecache"),
        removes=r"^(?:Removing|Upgrading|Downgrading)[^\n]*:\n\s*(\S+)",
        unknown=r"No match for argument|Unable to find a match",
        locked=r"Waiting for process with pid|another copy is running|Failed to obtain the transaction lock",
        simulate_codes=(0, 1),
    ),
    "suse": Manager(
        "zypper",
        simulate=("zypper", "--non-interactive", "install", "--no-recommends", "--dry-run", "--"),
        install=("zypper", "--non-interactive", "install", "--no-recommends", "--"),
        refresh=("zypper", "--non-interactive", "refresh"),
        removes=r"going to be (?:REMOVED|upgraded|downgraded):\n\s*(\S+)",
        unknown=r"No provider of|not found in package names",
        locked=r"System management is locked",
    ),
    "arch": Manager(
        "pacman",
        simulate=("pacman", "-S", "--noconfirm", "--needed", "--print", "--"),
        install=("pacman", "-S", "--noconfirm", "--needed", "--"),
        refresh=("pacman", "-Sy", "--noconfirm"),
        removes=r"conflict[^\n]*Remove (\S+)\?",
        unknown=r"target not found",
        locked=r"unable to lock database",
    ),
    "alpine": Manager(
        "apk",
        simulate=("apk", "add", "--no-cache", "--simulate", "--"),
        install=("apk", "add", "--no-cache", "--"),
        refresh=("apk", "update"),
        removes=r"^\([0-9/]+\) (?:Purging|Upgrading|Downgrading) (\S+)",
        unknown=r"no such package",
        locked=r"Unable to lock database",
    ),
}


class Packages(Protocol):
    """Provides missing libraries."""

    def provide(
        self,
        missing: Sequence[str],
        allowed: Mapping[str, Mapping[str, str]],
        system: OsFacts,
        say: Say,
        stop: threading.Event,
    ) -> tuple[str, ...]:
        """Install the packages that hold the libraries.

        Args:
            missing: sonames, such as `libgomp.so.1`.
            allowed: library -> {family -> package}: nothing else is ever installed.
            say: takes sentences while it works.

        Returns:
            The packages that were asked for; () when nothing was missing.

        Raises:
            PackagesFailed: says which library, which package, and what to run by hand.
        """
        ...


class NodePackages:
    """The package manager of this node's family.

    Args:
        is_root: whether packages can be installed at all.
        lock_deadline_s: how long another package manager is waited for.
        managers: by family.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Clock,
        *,
        is_root: bool | None = None,
        lock_deadline_s: float = 600.0,
        managers: Mapping[str, Manager] = MANAGERS,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._is_root = os.geteuid() == 0 if is_root is None else is_root
        self._lock_deadline_s = lock_deadline_s
        self._managers = managers

    def provide(
        self,
        missing: Sequence[str],
        allowed: Mapping[str, Mapping[str, str]],
        system: OsFacts,
        say: Say,
        stop: threading.Event,
    ) -> tuple[str, ...]:
        if not missing:
            return ()
        lacking = f"{_and(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        manager = None if system.immutable or system.family is None else self._managers.get(system.family)
        if manager is None or system.family is None:
            raise PackagesFailed(
                f"{lacking} and {system.name or system.id} takes no packages from llmgw",
                hint=f"add {_and(missing)} to the image of this node",
            )
        names = tuple(dict.fromkeys(self._name(library, allowed, system.family) for library in missing))
        by_hand = f"run `{' '.join((*manager.by_hand, *names))}`"
        if not self._is_root:
            raise PackagesFailed(f"{lacking} and the agent does not run as root", hint=f"{by_hand} as root")
        self._simulate(manager, names, lacking, say, stop)
        say(f"installing {_and(names)} with {manager.program}")
        done = self._patiently(manager, (*manager.install, *names), say, stop)
        if done.code != 0:
            raise self._failure(manager, done, lacking, names, by_hand)
        return names

    def _name(self, library: str, allowed: Mapping[str, Mapping[str, str]], family: str) -> str:
        name = allowed.get(library, {}).get(family)
        if name is None:
            raise PackagesFailed(
                f"{library} is missing and no package is known to hold it on this distribution family ({family})",
                hint=f"install {library} by hand",
            )
        # `name-` would remove and `name+` or a glob would select something else
        if not _NAME.fullmatch(name) or name.endswith("-") or (name.endswith("+") and not name.endswith("++")):
            raise PackagesFailed(f"the package name {name!a} for {library} is refused", hint="correct the provider")
        return name

    def _simulate(
        self, manager: Manager, names: tuple[str, ...], lacking: str, say: Say, stop: threading.Event
    ) -> None:
        for attempt in ("as it is", "refreshed"):
            done = self._patiently(manager, (*manager.simulate, *names), say, stop, timeout_s=300.0)
            text = f"{done.stdout}\n{done.stderr}"
            if not re.search(manager.unknown, text):
                break
            if attempt == "refreshed":
                raise PackagesFailed(
                    f"{lacking} and no package source of this node has {_and(names)}", cause=done.last_line()
                )
            say(f"refreshing the package lists with {manager.program}")
            refreshed = self._patiently(manager, manager.refresh, say, stop)
            if refreshed.code != 0:
                raise PackagesFailed(
                    f"{lacking}, and the package lists could not be refreshed",
                    cause=refreshed.last_line() or refreshed.words(),
                    hint=f"run `{' '.join(manager.refresh)}` and look at its answer",
                )
        found = re.search(manager.removes, text, re.MULTILINE)
        if found:
            what = next((group for group in found.groups() if group), "something")
            raise PackagesFailed(
                f"{lacking}, but installing {_and(names)} would remove or upgrade {what}",
                hint="install it by hand after looking at what it changes",
            )
        if done.code not in manager.simulate_codes:
            raise self._failure(manager, done, lacking, names, "")

    def _patiently(
        self,
        manager: Manager,
        argv: tuple[str, ...],
        say: Say,
        stop: threading.Event,
        timeout_s: float = 1200.0,
    ) -> Completed:
        """Run; while another package manager holds a lock, say so and try again until the deadline."""
        deadline = self._clock.monotonic() + self._lock_deadline_s
        while True:
            try:
                done = self._runner.run(argv, timeout_s=timeout_s, env={**MINIMAL_ENV, **manager.env})
            except CommandError as error:
                raise PackagesFailed(f"cannot run `{manager.program}`", cause=error.cause or error.message) from error
            if done.code == 0 or not re.search(manager.locked, f"{done.stdout}\n{done.stderr}"):
                return done
            holder = re.search(r"held by process (\d+ \([^)]*\))", f"{done.stdout}\n{done.stderr}")
            who = f"process {holder[1]}" if holder else "another package manager"
            if self._clock.monotonic() >= deadline:
                raise PackagesFailed(
                    f"`{manager.program}` is locked by {who} for more than {self._lock_deadline_s:.0f} s",
                    cause=done.last_line(),
                    hint="wait for it, or look at why it does not end",
                )
            say(f"waiting for {who}, which holds the lock of `{manager.program}`")
            if self._clock.wait(stop, _LOCK_LOOK_S):
                raise PackagesFailed("stopped while waiting for the package manager")

    def _failure(
        self, manager: Manager, done: Completed, lacking: str, names: tuple[str, ...], by_hand: str
    ) -> PackagesFailed:
        text = f"{done.stdout}\n{done.stderr}"
        for pattern, command in manager.repair.items():
            if re.search(pattern, text):
                return PackagesFailed(
                    f"{lacking} and `{manager.program}` cannot install {_and(names)}: its database needs repair",
                    cause=done.last_line(),
                    hint=f"run `{command}` on this node",
                )
        return PackagesFailed(
            f"{lacking} and `{manager.program}` could not install {_and(names)}",
            cause=done.last_line() or done.words(),
            hint=by_hand,
        )


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
