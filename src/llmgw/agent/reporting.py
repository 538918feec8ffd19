"""What this node says of itself: facts from the probe, statuses from the owners of engines and replicas.

The probe runs in a thread of its own, again and again: a heartbeat takes what is known and never waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from llmgw.agent.converge import Converge
from llmgw.agent.supervisor import Supervisor
from llmgw.domain.facts import NodeFacts, NodeWarning, WeightsFile
from llmgw.domain.report import NodeReport
from llmgw.probe.registry import Registry
from llmgw.system.clock import Clock

_LOG = logging.getLogger("llmgw.agent.probe")
_AGAIN_S = 600.0


class Reporting:
    """The session's report source, and the thread that probes.

    Args:
        registry: finds out what the node is.
        standing: warnings that hold as long as this agent runs, such as a server dialled without TLS.
        on_facts: called from the probing thread after each probe.
        on_their_way: weights that are being fetched.
    """

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        standing: tuple[NodeWarning, ...],
        on_facts: Callable[[], None],
        on_their_way: Callable[[], tuple[WeightsFile, ...]] = tuple,
    ) -> None:
        self._on_their_way = on_their_way
        self._registry = registry
        self._clock = clock
        self._standing = standing
        self._on_facts = on_facts
        self._end = threading.Event()
        self._again = threading.Event()
        self._owners: tuple[Converge, Supervisor] | None = None
        self._thread = threading.Thread(target=self._probe, name="probe", daemon=True)

    def start(self, converge: Converge, supervisor: Supervisor) -> None:
        """Begin to probe; from now on reports carry these owners' statuses."""
        self._owners = (converge, supervisor)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a probe that hangs is left behind."""
        self._end.set()
        self._again.set()
        self._thread.join(5.0)

    def facts(self) -> NodeFacts | None:
        """The facts as known now, None before the first probe."""
        return self._registry.facts

    def report(self, seq: int, generation: int | None, epoch: int | None, facts: NodeFacts | None) -> NodeReport:
        """Everything as it is now. Before the first probe there are no readings: unknown, not zero."""
        assert self._owners is not None
        converge, supervisor = self._owners
        probed_at = self._registry.probed_at
        readings = self._registry.readings() if probed_at is not None else None
        warnings = self._registry.warnings(self._registry.facts, readings) if probed_at is not None else ()
        return NodeReport(
            seq=seq,
            generation=generation,
            epoch=epoch,
            probed_at=probed_at,
            facts=facts,
            readings=readings,
            engines=converge.statuses(),
            replicas=supervisor.statuses(),
            weights=(*self._registry.weights(), *self._on_their_way()) if probed_at is not None else (),
            warnings=(*self._standing, *warnings),
        )

    def _probe(self) -> None:
        while not self._end.is_set():
            try:
                self._registry.probe()
                self._on_facts()
            except Exception:  # one bad probe must not end probing: the node would stay as it was for ever
                _LOG.exception("probing failed, trying again in %d s", _AGAIN_S)
            self._clock.wait(self._again, _AGAIN_S)
            self._again.clear()
