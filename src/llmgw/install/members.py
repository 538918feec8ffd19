"""What an archive may hold: names, links and sizes, decided before a byte of a member is written."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from attrs import frozen

from llmgw.errors import ArchiveRefused

_MAX_COMPONENT = 255
_MAX_DEPTH = 16
_RESERVED = (".staging-", ".tmp-", ".records", ".downloads")


@frozen
class Limits:
    """Bounds an archive must keep.

    Args:
        members: entries of all kinds.
        total_bytes: of all files together.
        ratio: unpacked bytes per archive byte, once more than `ratio_free_bytes` were unpacked.
        header_bytes: one extended header.
    """

    members: int = 5_000
    total_bytes: int = 8 << 30
    ratio: int = 50
    ratio_free_bytes: int = 10 << 20
    header_bytes: int = 64 << 10


def shown(name: str) -> str:
    """A member's name as it may be shown: ASCII, escaped, in backticks, cut after 120 characters."""
    text = ascii(name)[1:-1]
    return f"`{text[:120]}…`" if len(text) > 120 else f"`{text}`"


def refuse(name: str | None, why: str) -> ArchiveRefused:
    """The error for one bad member (None: the archive as a whole)."""
    what = "the archive is refused" if name is None else f"the archive is refused because of its member {shown(name)}"
    return ArchiveRefused(what, cause=why, hint="tell whoever publishes it, or name another source in server.yaml")


def split_name(name: str, *, what: str = "its name", member: str | None = None) -> tuple[str, ...]:
    """The components of a member's name; () for the archive's own top (`./`).

    Args:
        what: what `name` is, for the sentence.
        member: the member it belongs to, when it is not that one's own name.

    Raises:
        ArchiveRefused: the name is absolute, climbs, is not plain text, or is too long or too deep.
    """
    owner = name if member is None else member
    bare = name[2:] if name.startswith("./") else name
    if bare in ("", ".") and name in (".", "./"):
        return ()
    if not bare:
        raise refuse(owner, f"{what} is empty")
    if bare.startswith("/"):
        raise refuse(owner, f"{what} is absolute")
    if any(not character.isprintable() for character in bare):
        raise refuse(owner, f"{what} has characters that cannot be printed, or is not UTF-8")
    if "\\" in bare or (len(bare) > 1 and bare[1] == ":"):
        raise refuse(owner, f"{what} is written for another operating system")
    parts = tuple(bare.split("/"))
    for part in parts:
        if part in ("", ".", ".."):
            raise refuse(owner, f"{what} has an empty component" if not part else f"{what} has the component `{part}`")
        if len(part.encode()) > _MAX_COMPONENT:
            raise refuse(owner, f"a component of {what} is longer than {_MAX_COMPONENT} bytes")
        if part.startswith(_RESERVED):
            raise refuse(owner, f"{what} is one that llmgw keeps for itself")
    if len(parts) > _MAX_DEPTH:
        raise refuse(owner, f"{what} is deeper than {_MAX_DEPTH} directories")
    return parts


Parts = tuple[str, ...]


class Plan:
    """Keeps the tally of an archive's members: each name once, parents are directories, sizes within the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._count = 0
        self._total = 0
        self._kinds: dict[Parts, str] = {}
        self._spelling: dict[Parts, Parts] = {}
        self._links: dict[Parts, tuple[str, str]] = {}

    def _claim(self, name: str, parts: Parts, kind: str) -> None:
        self._count += 1
        if self._count > self._limits.members:
            raise refuse(name, f"it has more than {self._limits.members} members")
        for depth in range(1, len(parts)):
            parent = parts[:depth]
            if self._kinds.setdefault(parent, "implied") not in ("dir", "implied"):
                raise refuse(name, "a parent of it is not a directory")
            self._spell(name, parent)
        if not parts:
            if kind != "dir":
                raise refuse(name, "its name is that of the archive's own top")
            return
        known = self._kinds.get(parts)
        if known is not None and not (kind == "dir" and known == "implied"):
            raise refuse(name, "its name occurs twice")
        self._spell(name, parts)
        self._kinds[parts] = kind

    def _spell(self, name: str, parts: Parts) -> None:
        folded = tuple(unicodedata.normalize("NFKC", part).casefold() for part in parts)
        if self._spelling.setdefault(folded, parts) != parts:
            raise refuse(name, "its name differs from another one only in spelling")

    def directory(self, name: str) -> Parts:
        """Take note of a directory; returns its components."""
        parts = split_name(name)
        self._claim(name, parts, "dir")
        return parts

    def file(self, name: str, size: int) -> Parts:
        """Take note of a regular file of `size` bytes; returns its components."""
        parts = split_name(name)
        if size < 0:
            raise refuse(name, "its size is negative")
        self._total += size
        if self._total > self._limits.total_bytes:
            raise refuse(name, f"the files are larger than {self._limits.total_bytes} bytes")
        self._claim(name, parts, "file")
        return parts

    def symlink(self, name: str, target: str) -> Parts:
        """Take note of a symbolic link; where it leads is judged by `links` when all members are known."""
        parts = split_name(name)
        self._claim(name, parts, "link")
        self._links[parts] = (name, target)
        return parts

    def hardlink(self, name: str, target: str) -> tuple[Parts, Parts]:
        """Take note of a hard link; returns its components and those of the earlier regular file it names."""
        parts, goal = split_name(name), split_name(target, what=f"its link target {shown(target)}", member=name)
        if self._kinds.get(goal) != "file":
            raise refuse(name, f"it is a hard link to {shown(target)}, which is not an earlier file of the archive")
        self._claim(name, parts, "file")
        return parts, goal

    def links(self) -> Mapping[Parts, str]:
        """All symbolic links, each leading (over other links perhaps) to a regular file of the archive.

        Raises:
            ArchiveRefused: one is absolute, climbs out, dangles, loops or leads to a directory.
        """
        for parts, (name, _) in self._links.items():
            seen = {parts}
            at = parts
            while at in self._links:
                at = self._follow(name, at)
                if at in seen:
                    raise refuse(name, "it is a link that leads back to itself")
                seen.add(at)
            if self._kinds.get(at) != "file":
                raise refuse(name, "it is a link that does not lead to a file of the archive")
        return {parts: target for parts, (_, target) in self._links.items()}

    def _follow(self, name: str, parts: Parts) -> Parts:
        target = self._links[parts][1]
        base = list(parts[:-1])
        rest = target
        while rest.startswith("../"):
            if not base:
                raise refuse(name, f"it is a link out of the archive, to {shown(target)}")
            base.pop()
            rest = rest[3:]
        if rest.startswith("./"):
            raise refuse(name, f"it is a link to {shown(target)}, which is not the plain form of a path")
        return (*base, *split_name(rest, what=f"its link target {shown(target)}", member=name))
