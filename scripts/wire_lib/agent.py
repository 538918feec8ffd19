"""A good agent: a real session that has nothing to do but to connect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmgw.agent.session import Session
from llmgw.domain.report import NodeReport
from llmgw.system.clock import RealClock
from llmgw.wire.tls import TlsFiles

CLOCK = RealClock()


class Source:
    """Knows nothing."""

    def facts(self) -> None:
        return None

    def report(self, seq: int, generation: int | None, epoch: int | None, facts: Any) -> NodeReport:
        return NodeReport(seq, generation, epoch, None, facts, None)


@contextmanager
def agent(url: str, node_id: str, tls: TlsFiles | None, beat_s: float = 1.0) -> Iterator[Session]:
    """Runs for the block."""
    session = Session(
        servers=[url], node_id=node_id, tls=tls, version="0", boot_id="b", instance_id=node_id,
        heartbeat_interval_s=beat_s, reconnect_base_s=0.05, reconnect_max_s=0.5, source=Source(),
        on_desired=lambda _: None, answers={}, clock=CLOCK,
    )  # fmt: skip
    session.start()
    try:
        yield session
    finally:
        session.stop()


def seconds_to_join(url: str, node_id: str, tls: TlsFiles | None, deadline_s: float = 30.0) -> float:
    """How long a new agent takes from its start to the server's welcome."""
    began = time.monotonic()
    with agent(url, node_id, tls) as session:
        while session.status().state.value.value != "yes":
            if time.monotonic() - began > deadline_s:
                raise SystemExit(f"the good agent did not join: {session.status().state.words}")
            time.sleep(0.005)
        return time.monotonic() - began
