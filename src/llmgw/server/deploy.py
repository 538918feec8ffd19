"""The reconciler: what is wanted against what is assigned, on every change that could matter.

One thread owns it. Others `poke` it and read the last `Outlook`, which never changes once published.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, field, frozen

from llmgw.domain.engines import Capabilities, EngineSpec
from llmgw.domain.ids import replica_id
from llmgw.domain.placement import label_words
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaSpec
from llmgw.domain.report import Desired, NodeView
from llmgw.domain.rollout import Assignment, Plan, Start, moves_held, plan
from llmgw.domain.routing import RouteKey, RouteModel, RouteTable
from llmgw.domain.standing import Standing, judge, route
from llmgw.errors import LlmgwError, UsageError
from llmgw.server.fleet import AgentHandle, Fleet
from llmgw.server.state import State, StoredProfile
from llmgw.system.clock import Clock

log = logging.getLogger(__name__)

TICK_S = 1.0
_GRACE_BEATS_S = 15.0
_STALL_S = 5.0


@frozen
class Outlook:
    """What the last pass saw and decided; a snapshot."""

    nodes: tuple[NodeView, ...] = ()
    standings: tuple[Standing, ...] = ()
    routes: RouteTable = field(factory=lambda: RouteTable(0, ()))


class Deploy:
    """Keeps replicas assigned, nodes told, routes current.

    Args:
        engines: what nodes are told to have.
        capabilities: what each provider's engine can do, where known.
        mass_loss_fraction: of the nodes silent at once, at or above which nothing is moved.
        keys_required: clients need an API key.
        publish: called with a new route table whenever it differs from the last.
        wake: set by whoever knows of a change that may matter.
    """

    def __init__(
        self,
        state: State,
        fleet: Fleet,
        clock: Clock,
        engines: Sequence[EngineSpec],
        capabilities: Mapping[str, Capabilities],
        *,
        mass_loss_fraction: float,
        keys_required: bool,
        publish: Callable[[RouteTable], None],
        wake: threading.Event,
    ) -> None:
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._engines = {spec.name: spec for spec in engines}
        self._capabilities = capabilities
        self._formats = {name: item.formats for name, item in capabilities.items()}
        self._fraction = mass_loss_fraction
        self._keys_required = keys_required
        self._publish = publish
        self._assignments = {item.spec.replica_id: item for item in state.assignments()}
        self._sent: dict[str, tuple[AgentHandle, Desired]] = {}
        self._generation = 0
        self._outlook = Outlook()
        self._wake = wake
        self._stopping = False
        self._passes = threading.Condition()
        self._begun = self._done = 0
        self._thread = threading.Thread(target=self._run, name="reconcile", daemon=True)
        self._last_pass = clock.monotonic()
        self._grace_until = clock.monotonic() + _GRACE_BEATS_S

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """The engines nodes are told to have."""
        return tuple(self._engines.values())

    def outlook(self) -> Outlook:
        """The result of the last pass."""
        return self._outlook

    def start(self) -> None:
        """Begin to reconcile."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; nothing is taken back."""
        with self._passes:
            self._stopping = True
            self._passes.notify_all()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def poke(self) -> None:
        """Something changed: look again soon. Any thread, never blocks."""
        self._wake.set()

    def settle(self, timeout_s: float = 5.0) -> bool:
        """Look again now and wait until that is done, so that what was just changed is in the outlook."""
        with self._passes:
            wanted = self._begun + 1
            self._wake.set()
            return self._passes.wait_for(lambda: self._done >= wanted or self._stopping, timeout_s)

    def apply(self, profile: Profile) -> bool:
        """Keep a profile; False when nothing changed.

        Raises:
            UsageError: another profile has its name or one of its aliases.
            StateError: it could not be kept.
        """
        for other in (item.profile for item in self._state.profiles()):
            shared = {profile.name, *profile.aliases} & {other.name, *other.aliases}
            if other.name != profile.name and shared:
                raise UsageError(
                    f"cannot apply profile `{profile.name}`",
                    cause=f"profile `{other.name}` is called `{min(shared)}` already",
                    hint="choose another name, or delete the other profile first",
                    code="name-taken",
                )
        changed = self._state.put_profile(profile, self._clock.now())
        if changed:
            log.info("profile %s applied", profile.name)
            self.poke()
        return changed

    def delete(self, name: str) -> bool:
        """Forget a profile and stop its replicas; False when there was none."""
        deleted = self._state.delete_profile(name)
        if deleted:
            log.info("profile %s deleted", name)
            self.poke()
        return deleted

    def pass_once(self) -> Outlook:
        """One full pass: plan, keep, tell nodes, publish routes. Only the owner thread, or a test, calls it."""
        now = self._clock.monotonic()
        if now - self._last_pass > _STALL_S:
            log.warning("this server stood still for %.0f s: no replica is moved for a while", now - self._last_pass)
            self._grace_until = now + _GRACE_BEATS_S
        self._last_pass = now
        fleet = self._fleet.views()
        stored = self._state.profiles()
        profiles = [item.profile for item in stored]
        decided = self._plan(profiles, fleet, now)
        self._carry_out(decided)
        self._tell(fleet)
        by_id = {node.node_id: node for node in fleet}
        standings = tuple(self._standing(item, by_id, decided) for item in profiles)
        self._remember_endpoints(standings)
        self._outlook = Outlook(fleet, standings, self._routes(standings, stored))
        return self._outlook

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            with self._passes:
                self._begun += 1
            try:
                self.pass_once()
            except LlmgwError as error:
                log.error("cannot reconcile: %s", error.words())
            except Exception:
                log.exception("cannot reconcile")
            with self._passes:
                self._done = self._begun
                self._passes.notify_all()
            self._clock.wait(self._wake, TICK_S)

    def _plan(self, profiles: Sequence[Profile], fleet: Sequence[NodeView], now: float) -> Plan:
        assigned = tuple(self._assignments.values())
        held = moves_held(fleet, assigned, self._fraction)
        if now < self._grace_until:
            held = held or "this server has just started and waits for its nodes"
        return plan(profiles, self._engines, fleet, assigned, held=held, formats=self._formats)

    def _carry_out(self, decided: Plan) -> None:
        if not decided.starts and not decided.stops:
            return
        first = self._state.next_epoch(len(decided.starts)) if decided.starts else 0
        made = [self._assignment(start, first + number) for number, start in enumerate(decided.starts)]
        stops = [stop.assignment.spec.replica_id for stop in decided.stops]
        self._state.reassign(made, stops)
        for stop in decided.stops:
            self._assignments.pop(stop.assignment.spec.replica_id, None)
            log.info(
                "replica %s leaves node %s: %s", stop.assignment.spec.replica_id, stop.assignment.node_id, stop.words
            )
        for start, item in zip(decided.starts, made, strict=True):
            self._assignments[item.spec.replica_id] = item
            log.info(
                "replica %s goes to node %s, epoch %d: %s",
                item.spec.replica_id,
                item.node_id,
                item.spec.epoch,
                start.words,
            )

    def _assignment(self, start: Start, epoch: int) -> Assignment:
        profile = start.profile
        spec = ReplicaSpec(
            replica_id=replica_id(profile.name, start.index),
            epoch=epoch,
            profile=profile.name,
            model_name=profile.name,
            model=profile.model,
            engine=profile.engine,
            engine_version=start.placement.engine_version,
            context=profile.context,
            slots=profile.slots,
            gpus=start.placement.gpus,
            args=profile.args,
            env=profile.env,
            start_deadline_s=profile.start_deadline_s,
            api_key=secrets.token_urlsafe(32),
            digest=start.digest,
        )
        return Assignment(start.index, start.placement.node_id, spec, start.placement.memory_bytes)

    def _tell(self, fleet: Sequence[NodeView]) -> None:
        """Send each connected agent its full desired set, when it differs from what this connection was sent last."""
        agents = self._fleet.agents()
        self._sent = {node_id: sent for node_id, sent in self._sent.items() if node_id in agents}
        for node in fleet:
            agent = agents.get(node.node_id)
            if agent is None:
                continue
            engines = tuple(spec for spec in self._engines.values() if not label_words(spec.node_selector, node))
            mine = (item for _, item in sorted(self._assignments.items()) if item.node_id == node.node_id)
            replicas = tuple(item.spec for item in mine)
            sent = self._sent.get(node.node_id)
            if sent is not None and sent[0] is agent and (sent[1].engines, sent[1].replicas) == (engines, replicas):
                continue
            self._generation += 1
            desired = Desired(self._generation, self._state.epoch, engines, replicas)
            try:
                agent.send_desired(desired)
            except LlmgwError as error:
                log.warning("cannot tell node %s what to run: %s", node.node_id, error.words())
                continue
            self._sent[node.node_id] = (agent, desired)

    def _standing(self, profile: Profile, fleet: Mapping[str, NodeView], decided: Plan) -> Standing:
        mine = [item for item in self._assignments.values() if item.spec.profile == profile.name]
        return judge(profile, mine, fleet, decided.refusals.get(profile.name), decided.notes.get(profile.name, ""))

    def _remember_endpoints(self, standings: Sequence[Standing]) -> None:
        """Keep where replicas serve, so that the next server can route before its nodes have come back to it."""
        changed = []
        for item in (replica for standing in standings for replica in standing.replicas):
            if item.status is None:
                continue
            host, port = (item.status.host, item.status.port) if item.serves else (None, None)
            if (item.assignment.host, item.assignment.port) != (host, port):
                changed.append(evolve(item.assignment, host=host, port=port))
        if changed:
            self._state.reassign(changed, ())
            self._assignments.update({item.spec.replica_id: item for item in changed})

    def _routes(self, standings: Sequence[Standing], stored: Sequence[StoredProfile]) -> RouteTable:
        created = {item.profile.name: int(item.created) for item in stored}
        models = tuple(self._model(item, created.get(item.profile.name, 0)) for item in standings)
        keys: tuple[RouteKey, ...] = tuple(item.key for item in self._state.client_keys())
        last = self._outlook.routes
        if last.seq and (last.models, last.keys) == (models, keys):
            return last
        table = RouteTable(last.seq + 1, models, keys, self._keys_required)
        self._publish(table)
        return table

    def _model(self, standing: Standing, created: int) -> RouteModel:
        known = self._capabilities.get(standing.profile.engine)
        return route(standing, known.endpoints if known is not None else (), created)
