"""The file tree that facts are read from: `/`, or a made one."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from llmgw.system.files import read_text


@frozen
class Tree:
    """Reads below `root`. All paths given to it are absolute, as they are on the node itself."""

    root: str = "/"

    @property
    def real(self) -> bool:
        """True for the machine's own tree: only then may the process itself be asked (confstr, interfaces)."""
        return self.root == "/"

    def path(self, absolute: str) -> Path:
        """Where `absolute` is on this machine."""
        return Path(self.root) / absolute.lstrip("/")

    def text(self, absolute: str, limit: int = 1 << 20) -> str | None:
        """Stripped text of a small file, None when it is missing or unreadable."""
        text = read_text(self.path(absolute), limit)
        return None if text is None else text.strip()

    def exists(self, absolute: str) -> bool:
        """True when something is at `absolute`; a path that may not be looked at counts as missing."""
        try:
            return self.path(absolute).exists()
        except OSError:
            return False

    def names(self, absolute: str) -> tuple[str, ...]:
        """Sorted names in a directory, empty when it is missing or unreadable."""
        try:
            return tuple(sorted(entry.name for entry in self.path(absolute).iterdir()))
        except OSError:
            return ()
