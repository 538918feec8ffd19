"""What this operator has onboarded: how each node is reached, and how far it came. Upgrades go by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from llmgw.ctl.onboarding.remote import SshOptions
from llmgw.errors import NameInvalid, UsageError
from llmgw.system.files import make_dir, read_text, write_atomic


@frozen
class Entry:
    """One node. `stages` maps a stage that is done to the time it was, seconds since the epoch."""

    node_id: str
    target: str
    config: str | None = None
    port: int | None = None
    identity: str | None = None
    version: str = ""
    stages: Mapping[str, float] = {}

    def options(self) -> SshOptions:
        """How it is reached."""
        return SshOptions(self.config, self.port, self.identity)


class Records:
    """One file per node in a directory.

    Args:
        env: `XDG_STATE_HOME` or `HOME` say where.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        state = env.get("XDG_STATE_HOME") or f"{env.get('HOME') or '/root'}/.local/state"
        self.directory = Path(state, "llmgw", "onboarded")

    def save(self, entry: Entry) -> None:
        """Write an entry."""
        make_dir(self.directory, 0o700)
        write_atomic(self.directory / f"{entry.node_id}.json", json.dumps(asdict(entry), indent=1).encode(), 0o600)

    def forget(self, node_id: str) -> None:
        """Remove an entry."""
        (self.directory / f"{node_id}.json").unlink(missing_ok=True)

    def all(self) -> list[Entry]:
        """Every entry, by name."""
        found = (self._read(path) for path in sorted(self.directory.glob("*.json")))
        return [each for each in found if each is not None]

    def get(self, node_id: str) -> Entry:
        """The entry of a node.

        Raises:
            UsageError: there is none.
        """
        from llmgw.domain.ids import check_node_id

        try:
            found = self._read(self.directory / f"{check_node_id(node_id)}.json")
        except NameInvalid:
            found = None
        if found is None:
            raise UsageError(
                f"`{node_id}` was not onboarded from here",
                hint=f"`llmgw ctl onboard` it again from here, or copy the other operator's `{self.directory}`",
            )
        return found

    def _read(self, path: Path) -> Entry | None:
        try:
            said: dict[str, Any] = json.loads(read_text(path) or "")
            return Entry(**said)
        except (ValueError, TypeError):
            return None
