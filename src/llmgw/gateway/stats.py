"""What this gateway process has done so far: for the control process and for Prometheus."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter

from llmgw import __version__
from llmgw.domain.routing import RouteModel
from llmgw.gateway.balance import Balance

FIRST_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
TOTAL_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Counts per bucket and the sum, in seconds; bounds are inclusive from above.

    Attributes:
        fresh: observations that `settle` will count; who has very many appends them here.
    """

    __slots__ = ("bounds", "counts", "fresh", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.fresh: list[float] = []

    def add(self, seconds: float) -> None:
        """One observation."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def settle(self) -> None:
        """Count what is `fresh`."""
        fresh = self.fresh
        if not fresh:
            return
        self.sum += sum(fresh)
        fresh.sort()
        before = 0
        for at, bound in enumerate(self.bounds):
            upto = bisect_right(fresh, bound)
            self.counts[at] += upto - before
            before = upto
        self.counts[-1] += len(fresh) - before
        fresh.clear()


class ModelStats:
    """The figures of one model."""

    __slots__ = ("codes", "completion", "first", "gap", "partial", "prompt", "total", "unknown")

    def __init__(self) -> None:
        self.codes: Counter[int] = Counter()
        self.first = Histogram(FIRST_BOUNDS)
        self.gap = Histogram(GAP_BOUNDS)
        self.total = Histogram(TOTAL_BOUNDS)
        self.prompt = self.completion = self.partial = self.unknown = 0


class Stats:
    """Counters since the start of the process. The model is "" where no known model was named."""

    def __init__(self) -> None:
        self.models: dict[str, ModelStats] = {}
        self.total = 0
        self.retries = 0
        self.broken = 0
        self.gone = 0

    def of(self, model: str) -> ModelStats:
        """The figures of a model, made at its first request."""
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelStats()
        return found

    def count(self, model: str, status: int) -> None:
        """One request under /v1 got its answer's status (499: the client went before there was one)."""
        self.total += 1
        self.of(model).codes[status] += 1


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
        for model, one in sorted(stats.models.items())
        for code, count in sorted(one.codes.items())
    ]
    for name, words, values in (
        ("in_flight", "Requests at an engine, by model.", balance.running()),
        ("queued", "Requests waiting for a slot or a loading replica, by model.", balance.queued()),
    ):
        lines += [f"# HELP llmgw_{name} {words}", f"# TYPE llmgw_{name} gauge"]
        lines += [
            f'llmgw_{name}{{model="{_label(model.name)}"}} {values.get(model.name, 0)}' for model in _models(balance)
        ]
    lines += _tokens(stats)
    for name, words in (
        ("first", "time_to_first_token_seconds From the request's arrival to the first token of a stream."),
        ("gap", "inter_token_seconds Between two reads of a stream's tokens."),
        ("total", "request_seconds From the request's arrival to the end of its answer."),
    ):
        lines += _histogram(stats, name, words)
    for name, words, value in (
        ("retries_total", "Requests sent again to another replica before any byte of an answer.", stats.retries),
        ("ejections_total", "Times a replica was passed over after a failed connection.", balance.ejections),
        ("broken_answers_total", "Answers an engine broke off.", stats.broken),
        ("clients_gone_total", "Requests whose client went away before the end of the answer.", stats.gone),
    ):
        lines += [f"# HELP llmgw_{name} {words}", f"# TYPE llmgw_{name} counter", f"llmgw_{name} {value}"]
    lines += ["# HELP llmgw_clients Open client connections.", "# TYPE llmgw_clients gauge", f"llmgw_clients {clients}"]
    return "\n".join([*lines, ""]).encode()


def _tokens(stats: Stats) -> list[str]:
    lines = [
        "# HELP llmgw_tokens_total Tokens by model, as engines counted them; partial: counted here until the abort.",
        "# TYPE llmgw_tokens_total counter",
    ]
    for model, one in sorted(stats.models.items()):
        for kind in ("prompt", "completion", "partial"):
            lines.append(f'llmgw_tokens_total{{model="{_label(model)}",kind="{kind}"}} {getattr(one, kind)}')
    lines += [
        "# HELP llmgw_usage_unknown_total Answers of 200 without any word about tokens.",
        "# TYPE llmgw_usage_unknown_total counter",
    ]
    lines += [
        f'llmgw_usage_unknown_total{{model="{_label(model)}"}} {one.unknown}'
        for model, one in sorted(stats.models.items())
    ]
    return lines


def _histogram(stats: Stats, which: str, words: str) -> list[str]:
    name, _, text = words.partition(" ")
    lines = [f"# HELP llmgw_{name} {text}", f"# TYPE llmgw_{name} histogram"]
    for model, one in sorted(stats.models.items()):
        kept: Histogram = getattr(one, which)
        kept.settle()
        label = f'model="{_label(model)}"'
        so_far = 0
        for bound, count in zip((*map(str, kept.bounds), "+Inf"), kept.counts, strict=True):
            so_far += count
            lines.append(f'llmgw_{name}_bucket{{{label},le="{bound}"}} {so_far}')
        lines += [f"llmgw_{name}_sum{{{label}}} {kept.sum:.6f}", f"llmgw_{name}_count{{{label}}} {so_far}"]
    return lines


def _models(balance: Balance) -> tuple[RouteModel, ...]:
    return balance.table.models if balance.table else ()
