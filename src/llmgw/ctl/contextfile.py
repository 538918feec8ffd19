"""ctl.yaml: named servers. `llmgw up` writes one too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from llmgw.config import AbsolutePath, Problem, load_text, read_file


@frozen(kw_only=True)
class Entry:
    """One context."""

    server: str
    token_file: AbsolutePath | None = None
    ca: AbsolutePath | None = None
    cert: AbsolutePath | None = None
    key: AbsolutePath | None = None


@frozen(kw_only=True)
class CtlFile:
    """The whole file."""

    current_context: str | None = field(default=None, metadata={"key": "current-context"})
    contexts: Mapping[str, Entry] = field(factory=dict)


def load(path: Path) -> CtlFile:
    """Read a ctl.yaml.

    Raises:
        ConfigError: with all problems.
    """
    return load_text(read_file(path), str(path), CtlFile, _cross)


def _cross(data: Mapping[str, Any]) -> list[Problem]:
    current, contexts = data.get("current-context"), data.get("contexts")
    if isinstance(current, str) and isinstance(contexts, dict | None) and current not in (contexts or {}):
        return [Problem(("current-context",), f"there is no context `{current}` in this file")]
    pairs = contexts.items() if isinstance(contexts, dict) else ()
    return [
        Problem(("contexts", name), "`cert` and `key` go together: an operator's certificate and its key")
        for name, entry in pairs
        if isinstance(entry, dict) and (entry.get("cert") is None) != (entry.get("key") is None)
    ]
