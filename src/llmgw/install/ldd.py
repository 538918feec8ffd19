"""What `ldd` says, parsed: it exits 0 with libraries missing, and has several ways to say that a file is not for it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from attrs import field, frozen

from llmgw.domain.facts import OsFacts

_MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
_VERSION = re.compile(r"^(?:\S+): (\S+): version `([^']+)' not found \(required by ([^)]+)\)", re.MULTILINE)


@frozen
class Linked:
    """What one or more files need and this node lacks.

    Args:
        missing: sonames that no file was found for, in order.
        versions: symbol versions such as `GLIBC_2.38` that the found libraries lack, in order.
        problem: why the dynamic loader does not take the file at all, "" when it does.
    """

    missing: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    problem: str = field(default="")


def parse_ldd(stdout: str, stderr: str, code: int | None) -> Linked:
    """Read one `ldd FILE`.

    Args:
        stdout, stderr: its output in the C locale.
        code: its exit code; None or negative when it was killed.
    """
    missing = tuple(dict.fromkeys(_MISSING.findall(stdout)))
    versions = tuple(dict.fromkeys(match[1] for match in _VERSION.findall(f"{stdout}\n{stderr}")))
    if code == 0 or missing or versions:
        return Linked(missing, versions)
    said = next((line.strip() for line in (*stderr.splitlines(), *stdout.splitlines()) if line.strip()), "")
    if "not a dynamic executable" in said:
        return Linked(
            problem="it is not a dynamic executable of this machine's kind (another architecture, or damaged)"
        )
    return Linked(problem=said or "`ldd` gave no answer")


def joined(each: Iterable[Linked]) -> Linked:
    """Several answers as one; the first problem wins."""
    missing: dict[str, None] = {}
    versions: dict[str, None] = {}
    problem = ""
    for one in each:
        missing.update(dict.fromkeys(one.missing))
        versions.update(dict.fromkeys(one.versions))
        problem = problem or one.problem
    return Linked(tuple(missing), tuple(versions), problem)


def version_words(versions: Iterable[str], system: OsFacts) -> str:
    """`this build needs GLIBC_2.38, this node has 2.36`; the highest of each family counts, no package cures it."""
    highest: dict[str, str] = {}
    for version in versions:
        family, _, number = version.rpartition("_")
        if family not in highest or version_key(number) > version_key(highest[family]):
            highest[family] = number
    have = {"GLIBC": system.glibc, "GLIBCXX": system.libstdcxx}
    parts = []
    for family, number in sorted(highest.items()):
        node = have.get(family)
        parts.append(f"this build needs {family}_{number}, this node has {node or 'an older one'}")
    return "; ".join(parts)


def too_new(versions: Iterable[str], system: OsFacts, own: AbstractSet[str] = frozenset()) -> tuple[str, ...]:
    """Those symbol versions that the node's C or C++ library is known to lack.

    Args:
        versions: such as `GLIBC_2.34`, as files need them.
        system: what the node has; a library of unknown version lacks nothing here, `ldd` decides then.
        own: names of libraries the build carries itself: the node's do not count for those.
    """
    have = {"GLIBC": system.glibc, "GLIBCXX": system.libstdcxx}
    if any(name.startswith("libstdc++.so") for name in own):
        have["GLIBCXX"] = None
    lacking = []
    for version in versions:
        family, _, number = version.rpartition("_")
        node = have.get(family)
        if node is not None and number[:1].isdigit() and version_key(number) > version_key(node):
            lacking.append(version)
    return tuple(lacking)


def version_key(text: str) -> tuple[int, ...]:
    """`3.4.30` as numbers to compare by; a part that is no number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))
