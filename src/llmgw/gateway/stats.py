"""What this gateway process has done so far: for the control process and for Prometheus."""

from __future__ import annotations

from collections import Counter

from llmgw import __version__
from llmgw.domain.routing import RouteModel
from llmgw.gateway.balance import Balance


class Stats:
    """Counters since the start of the process. `model` is "" where no known model was named."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.total = 0
        self.retries = 0
        self.broken = 0
        self.gone = 0

    def count(self, model: str, status: int) -> None:
        """One request under /v1 got its answer's status (499: the client went before there was one)."""
        self.total += 1
        self.requests[(model, status)] += 1


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def prometheus(stats: Stats, balance: Balance, clients: int) -> bytes:
    """The counters and the number of open client connections in Prometheus' text format, version 0.0.4."""
    lines = [
        "# HELP llmgw_build_info The version of this gateway.",
        "# TYPE llmgw_build_info gauge",
        f'llmgw_build_info{{version="{__version__}"}} 1',
        "# HELP llmgw_requests_total Requests under /v1 by model and status of the answer.",
        "# TYPE llmgw_requests_total counter",
    ]
    lines += [
        f'llmgw_requests_total{{model="{_label(model)}",code="{code}"}} {count}'
        for (model, code), count in sorted(stats.requests.items())
    ]
    for name, words, values in (
        ("in_flight", "Requests at an engine, by model.", balance.busy),
        ("queued", "Requests waiting for a slot or a loading replica, by model.", balance.queued()),
    ):
        lines += [f"# HELP llmgw_{name} {words}", f"# TYPE llmgw_{name} gauge"]
        lines += [
            f'llmgw_{name}{{model="{_label(model.name)}"}} {values.get(model.name, 0)}' for model in _models(balance)
        ]
    for name, words, value in (
        ("retries_total", "Requests sent again to another replica before any byte of an answer.", stats.retries),
        ("ejections_total", "Times a replica was passed over after a failed connection.", balance.ejections),
        ("broken_answers_total", "Answers an engine broke off.", stats.broken),
        ("clients_gone_total", "Requests whose client went away before the end of the answer.", stats.gone),
    ):
        lines += [f"# HELP llmgw_{name} {words}", f"# TYPE llmgw_{name} counter", f"llmgw_{name} {value}"]
    lines += ["# HELP llmgw_clients Open client connections.", "# TYPE llmgw_clients gauge", f"llmgw_clients {clients}"]
    return "\n".join([*lines, ""]).encode()


def _models(balance: Balance) -> tuple[RouteModel, ...]:
    return balance.table.models if balance.table else ()
