"""The last stage: until the server sees the node, and its engines are ready, with the node's own words meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from llmgw.ctl.text import escape
from llmgw.errors import LlmgwError
from llmgw.system.clock import Clock
from llmgw.units import format_duration

Ask = Callable[[], list[dict[str, Any]]]
"""Asks the server for its nodes."""

_POLL_S = 1.0


class NotReady(LlmgwError):
    """A node did not become ready in time; the cause is its own words."""

    code = "not-ready"


def wait_for_node(
    ask: Ask, node_id: str, clock: Clock, tell: Callable[[str], None], *, timeout_s: float, version: str | None = None,
    engines: bool = True,
) -> str:  # fmt: skip
    """Wait until the server shows the node connected and each of its engines ready.

    Args:
        tell: told the words whenever they change.
        version: of llmgw that the node must report; None takes any.
        engines: False does not wait for engines.

    Returns:
        The last words.

    Raises:
        NotReady: not within `timeout_s`, or an engine has failed for good; carries the node's words.
    """
    deadline = clock.monotonic() + timeout_s
    never, said = threading.Event(), ""
    while True:
        try:
            words, done = _judge(ask(), node_id, version, engines)
        except LlmgwError as error:  # a server that restarts just now comes back
            words, done = error.words(), False
        if words != said:
            said = words
            tell(words)
        if done:
            return words
        if clock.monotonic() > deadline:
            raise NotReady(
                f"`{node_id}` is not ready after {format_duration(timeout_s)}", cause=words,
                hint="it goes on by itself; look at `llmgw ctl nodes`",
            )  # fmt: skip
        clock.wait(never, _POLL_S)


def _judge(nodes: list[dict[str, Any]], node_id: str, version: str | None, engines: bool) -> tuple[str, bool]:
    node = next((each for each in nodes if each.get("node_id") == node_id), None)
    if node is None:
        return "the server has not heard of it yet", False
    if node.get("presence") != "connected":
        return escape(str(node.get("words") or node.get("presence")))[:300], False
    if version is not None and node.get("version") != version:
        return f"it still runs llmgw {escape(str(node.get('version')))[:40]}", False
    if not engines:
        return "connected", True
    known = [each for each in node.get("engines") or [] if isinstance(each, dict)]
    if not known:
        return "connected, its engines are not known yet", False
    words = "; ".join(escape(str(each.get("words")))[:300] for each in known)
    return words, all(each.get("state") == "ready" for each in known)
