"""The ends of requests for models, counted in blocks: the same few lines run for many at once, out of warm caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmgw.gateway.records import Books, Row
from llmgw.gateway.stats import ModelStats, Stats
from llmgw.gateway.usage import passed_on

if TYPE_CHECKING:
    from llmgw.gateway.asking import Asking

_BLOCK = 128


class Ledger:
    """Takes requests that have ended. Whoever reads `stats` or `books` calls `settle` first.

    Args:
        now: seconds on a clock that only goes forward.
    """

    def __init__(self, stats: Stats, books: Books, now: Callable[[], float]) -> None:
        self._stats = stats
        self._books = books
        self._now = now
        self._ended: list[Asking] = []

    def add(self, serve: Asking) -> None:
        """This request has ended: everything it will ever say is set, `ended_at` and `ended_model` among it."""
        ended = self._ended
        ended.append(serve)
        if len(ended) >= _BLOCK:
            self.settle()

    def settle(self) -> None:
        """Count what there is."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        books = self._books
        lanes: dict[tuple[str, str], tuple[ModelStats, Row | None]] = {}
        self._stats.total += len(ended)
        for serve in ended:
            name = (serve.key_name, serve.ended_model)
            found = lanes.get(name)
            if found is None:
                found = lanes[name] = (self._stats.of(serve.ended_model), None)
            one, row = found
            one.codes[serve.status] += 1
            one.total.fresh.append(serve.ended_at - serve.began)
            if serve.status == 200 or serve.partial:
                if row is None:
                    row = books.row(*name)
                    lanes[name] = (one, row)
                _count(serve, one, row)
        if books.log.on or books.watched:
            books.note(ended, self._now())


def _count(serve: Asking, one: ModelStats, row: Row) -> None:
    tokens = serve.tokens
    prompt, completion = (tokens.prompt, tokens.completion) if tokens is not None else (None, None)
    row.requests += 1
    if prompt is not None:
        row.prompt += prompt
        one.prompt += prompt
    if serve.partial:
        row.partial_requests += 1
        made = passed_on(serve.head.path, serve.events, tokens)
        row.partial_completion += made
        one.partial += made
    elif completion is not None:
        row.completion += completion
        one.completion += completion
        if tokens is not None and tokens.of > 1:
            # the engine has told a part only, which must not pass for all
            row.unknown_requests += 1
            one.unknown += 1
    elif prompt is None and not serve.head.path.endswith("/count_tokens"):
        row.unknown_requests += 1
        one.unknown += 1
