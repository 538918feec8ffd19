"""What the connections of one gateway process share."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmgw.domain.routing import RouteTable
from llmgw.gateway.asking import Asking
from llmgw.gateway.balance import Balance
from llmgw.gateway.head import QUICK, Heads
from llmgw.gateway.keys import Keys
from llmgw.gateway.ledger import Ledger
from llmgw.gateway.pool import Pool
from llmgw.gateway.records import AccessLog, Books
from llmgw.gateway.replica_lines import ReplicaLines
from llmgw.gateway.serve import Serve
from llmgw.gateway.settings import Options
from llmgw.gateway.shared import Shared
from llmgw.gateway.stats import Stats
from llmgw.gateway.usage import passed_on

if TYPE_CHECKING:
    from llmgw.gateway.protocol import Client
    from llmgw.gateway.relay import Relay


_LOG = logging.getLogger("llmgw.gateway")
_OPEN_MAX = 200
_MANY = 100


class Plane:
    """The shared state of the data plane; only the event loop's thread touches it.

    Args:
        now: seconds on a clock that only goes forward.
    """

    def __init__(
        self, options: Options, admin_path: str, now: Callable[[], float], shared: Shared | None = None
    ) -> None:
        self.options = options
        self.quick = min(QUICK, options.max_body_bytes)
        self.admin_path = admin_path
        self.now = now
        self.stats = Stats()
        self.keys = Keys(now, shared.limits if shared is not None else None, 1.0 / max(1, options.workers))
        self.shared = shared
        self.balance = Balance(options, now, shared)
        self.books = Books(AccessLog(options.access_log, options.access_log_sample))
        self.ledger = Ledger(self.stats, self.books, now)
        self.heads = Heads()
        self.cors = cors_lines(options.cors_origins)
        self.pool = Pool(options, now)
        self.lines = ReplicaLines()
        self.clients: set[Client] = set()
        self.active: set[Relay] = set()
        self.control_connected = False
        self.draining = False
        self._ids = itertools.count(1)
        self._id_prefix = os.urandom(5).hex().encode("ascii")
        self._looked = 0.0

    def apply(self, table: RouteTable) -> None:
        """Take over a routing snapshot."""
        self.lines.clear()
        self.heads.clear()
        self.keys.apply(table)
        self.balance.apply(table)

    def new_request_id(self) -> bytes:
        """An id that no other request of any gateway has."""
        return b"%b-%x" % (self._id_prefix, next(self._ids))

    def finished(self, serve: Asking, model: str, now: float) -> None:
        """A request for a model has ended: count it, and what it used."""
        budget, tokens = serve.budget, serve.tokens
        serve.ended_model, serve.ended_at = model, now
        if budget is not None and budget.tpm is not None and (serve.status == 200 or serve.partial):
            used = (tokens.prompt or 0) if tokens is not None else 0
            if serve.partial:
                used += passed_on(serve.head.path, serve.events, tokens)
            elif tokens is not None:
                used += (tokens.completion or 0) * tokens.of
            budget.spend(now, used)
        self.ledger.add(serve)

    def sweep(self) -> None:
        """Judge every deadline, so no request needs a timer of its own."""
        now = self.now()
        self.balance.expire()
        self.pool.sweep()
        for relay in list(self.active):
            try:
                relay.check(now)
            except Exception as error:
                relay.broke(error)
        for client in list(self.clients):
            try:
                client.check(now)
            except Exception:
                _LOG.exception("a client's deadline could not be judged")
                client.abort()
        self.ledger.settle()
        for one in self.stats.models.values():
            one.gap.settle()
            one.total.settle()
        self.books.turn()
        if self.shared is not None and now - self._looked >= 1.0:
            self._looked = now
            self.shared.look_at_rows()

    def pause_s(self) -> float:
        """Until the next sweep: a tenth of a second, longer where there is much to look at."""
        return 0.1 if len(self.clients) < _MANY else 0.5

    def report(self) -> list[dict[str, Any]]:
        """What the control process is told: `stats`, `usage` it does not have, `requests` while somebody looks."""
        self.ledger.settle()
        messages: list[dict[str, Any]] = [
            {
                "type": "stats",
                "in_flight": self.balance.running(),
                "replicas": {name: count for name, count in self.balance.in_flight.items() if count},
                "queued": self.balance.queued(),
                "requests": self.stats.total,
            }
        ]
        usage = self.books.usage_message()
        if usage is not None:
            messages.append(usage)
        if self.books.watched:
            messages.append({"type": "requests", "ended": self.books.take_recent(), "open": self._open()})
        return messages

    def hear(self, kind: str, message: dict[str, Any]) -> None:
        """A message of the control process that is about usage and requests."""
        if kind == "usage-kept" and isinstance(message.get("batch"), int):
            self.books.acknowledged(message["batch"])
        elif kind == "watch":
            self.ledger.settle()
            self.books.watched = message.get("on") is True
            if not self.books.watched:
                self.books.recent.clear()

    def _open(self) -> list[dict[str, Any]]:
        now = self.now()
        serves = [relay for relay in self.active if isinstance(relay, Serve)][:_OPEN_MAX]
        for serve in serves:
            serve.fold()
        return [
            {
                "id": serve.request_id.decode("ascii"),
                "key": serve.key_name or None,
                "model": serve.model_name[:128],
                "path": serve.head.path,
                "stream": serve.stream,
                "replica": serve.last_replica if serve.replica is not None else None,
                "node": serve.last_node if serve.replica is not None else None,
                "ms": round((now - serve.began) * 1000),
                "events": serve.events,
            }
            for serve in serves
        ]


def cors_lines(origins: str) -> bytes:
    """The lines that let pages of other origins read answers and their headers; "" is none, `*` all."""
    if not origins:
        return b""
    origin = origins.encode("ascii", "replace")
    # without the second line a page sees neither request ids nor how long to wait
    return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n" % origin
