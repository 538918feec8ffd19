"""What the connections of one gateway process share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmgw.domain.routing import RouteTable
from llmgw.gateway.balance import Balance
from llmgw.gateway.keys import Keys
from llmgw.gateway.serve import ReplicaLines
from llmgw.gateway.settings import Options
from llmgw.gateway.stats import Stats
from llmgw.gateway.upstream import Pool

if TYPE_CHECKING:
    from llmgw.gateway.protocol import Client
    from llmgw.gateway.relay import Relay


class Plane:
    """The shared state of the data plane; only the event loop's thread touches it.

    Args:
        now: seconds on a clock that only goes forward.
    """

    def __init__(self, options: Options, admin_path: str, now: Callable[[], float]) -> None:
        self.options = options
        self.admin_path = admin_path
        self.now = now
        self.stats = Stats()
        self.keys = Keys()
        self.balance = Balance(options, now)
        self.pool = Pool(options, now)
        self.lines = ReplicaLines()
        self.clients: set[Client] = set()
        self.active: set[Relay] = set()
        self.control_connected = False
        self.draining = False
        self._ids = itertools.count(1)
        self._id_prefix = os.urandom(5).hex()

    def apply(self, table: RouteTable) -> None:
        """Take over a routing snapshot."""
        self.lines.clear()
        self.keys.apply(table)
        self.balance.apply(table)

    def new_request_id(self) -> bytes:
        """An id that no other request of any gateway has."""
        return b"%b-%x" % (self._id_prefix.encode("ascii"), next(self._ids))

    def sweep(self) -> None:
        """Judge every deadline; called about twice a second, so no request needs a timer of its own."""
        now = self.now()
        self.balance.expire()
        self.pool.sweep()
        for relay in list(self.active):
            relay.check(now)
        for client in list(self.clients):
            client.check(now)

    def report(self) -> dict[str, Any]:
        """The `stats` message for the control process."""
        return {
            "type": "stats",
            "in_flight": dict(self.balance.busy),
            "queued": self.balance.queued(),
            "requests": self.stats.total,
        }
