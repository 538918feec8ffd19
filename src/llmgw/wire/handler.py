"""What a link tells its owner."""

from __future__ import annotations

from typing import Protocol

from llmgw.errors import LlmgwError
from llmgw.wire.conn import Conn
from llmgw.wire.messages import Message


class LinkHandler(Protocol):
    """Told on the loop thread; must not block."""

    def opened(self, conn: Conn) -> None:
        """The transport is up (TLS verified). Nobody is admitted yet."""
        ...

    def received(self, conn: Conn, message: Message) -> None:
        """A complete message, in order."""
        ...

    def closed(self, conn: Conn, error: LlmgwError) -> None:
        """Exactly once per connection, with the reason."""
        ...
