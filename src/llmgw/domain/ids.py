"""Names that travel: what a node, a model or a replica may be called."""

from __future__ import annotations

import re

from llmgw.errors import NameInvalid

_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}")


def check_node_id(name: str) -> str:
    """Return `name` when it is a usable node id: a host name, at most 253 ASCII characters.

    Raises:
        NameInvalid: it is not.
    """
    if not _NODE.fullmatch(name):
        raise NameInvalid(
            f"`{name[:80]!a}` is not a node id",
            hint="use letters, digits, `.`, `_` and `-`, beginning and ending with a letter or digit",
        )
    return name


def check_model_name(name: str) -> str:
    """Return `name` when it is a usable model name (what clients send as `model`).

    Raises:
        NameInvalid: it is not.
    """
    if not _MODEL.fullmatch(name) or ".." in name:
        raise NameInvalid(
            f"{name[:80]!a} is not a model name",
            hint="use letters, digits and `._:/@+-`, beginning with a letter or digit, without `..`",
        )
    return name


def replica_id(profile: str, index: int) -> str:
    """Identity of the `index`-th replica of a profile: `qwen3-8b#0`."""
    return f"{profile}#{index}"
