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
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaSpec
from llmgw.domain.report import NodeView, Presence
from llmgw.domain.rollout import Assignment, Plan, Start, moves_held, plan
from llmgw.domain.routing import RouteKey, RouteModel, RouteTable
from llmgw.domain.standing import Standing, judge, route
from llmgw.errors import LlmgwError, UsageError
from llmgw.server.chronicle import Chronicle
from llmgw.server.events import KEPT as EVENTS_KEPT
from llmgw.server.events import Events
from llmgw.server.finishing import Finishing
from llmgw.server.fleet import Fleet
from llmgw.server.state import State, StoredKey, StoredProfile
from llmgw.server.telling import HandOn, Teller
from llmgw.system.clock import Clock
from llmgw.units import format_duration

log = logging.getLogger(__name__)

__all__ = ["Deploy", "HandOn", "Outlook"]

TICK_S = 1.0
_GRACE_BEATS_S = 15.0
_STALL_S = 3.0
_LONGEST_PAUSE_S = 2.0
_READINGS_SHARE = 0.05


@frozen
class Outlook:
    """What the last pass saw and decided; a snapshot."""

    nodes: tuple[NodeView, ...] = ()
    standings: tuple[Standing, ...] = ()
    routes: RouteTable = field(factory=lambda: RouteTable(0, ()))
    assignments: tuple[Assignment, ...] = ()


class Deploy:
    """Keeps replicas assigned, nodes told, routes current.

    Args:
        engines: what nodes are told to have.
        capabilities: what each provider's engine can do, where known.
        mass_loss_fraction: of the nodes silent at once, at or above which nothing is moved.
        keys_required: clients need an API key.
        publish: called with a new route table whenever it differs from the last.
        wake: set by whoever knows of a change that may matter.
        hand_on: engines of a node -> what it is told of their releases, and where their archives are served.
        events: where what happens is told; without it nobody is told.
        in_flight: requests at each replica by the gateways' counts, None when no gateway is connected.
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
        hand_on: HandOn = lambda _: ((), ""),
        events: Events | None = None,
        in_flight: Callable[[], Mapping[str, int] | None] = lambda: None,
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
        self._rollbacks = {item.profile: item for item in state.rollbacks()}
        self._events = events or Events(clock)
        self._chronicle = Chronicle(self._events)
        self._teller = Teller(self._engines, state.epoch, hand_on)
        self._finishing = Finishing(in_flight)
        self._outlook = Outlook()
        self._wake = wake
        self._stopping = False
        self._passes = threading.Condition()
        self._begun = self._done = 0
        self._thread = threading.Thread(target=self._run, name="reconcile", daemon=True)
        now = clock.monotonic()
        self._last_pass, self._slack_s, self._replan_at = now, 0.0, 0.0
        self._grace_until, self._grace_words = now + _GRACE_BEATS_S, "has just started and waits for its nodes"
        self._inputs: tuple[object, ...] = ()
        self._stored: tuple[StoredProfile, ...] | None = None
        self._keys: tuple[StoredKey, ...] | None = None
        self._restless = True

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """The engines nodes are told to have."""
        return tuple(self._engines.values())

    @property
    def events(self) -> Events:
        """What happened lately."""
        return self._events

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
            replicas = f"{profile.replicas} replica{'s' if profile.replicas != 1 else ''}"
            self._events.record("profile", profile.name, f"applied: {replicas} on {profile.engine}")
            self.poke()
        return changed

    def scale(self, name: str, replicas: int) -> Profile | None:
        """Change how many replicas a profile has; None when there is no such profile (or alias)."""
        for stored in self._state.profiles():
            if name in (stored.profile.name, *stored.profile.aliases):
                profile = evolve(stored.profile, replicas=replicas)
                self.apply(profile)
                return profile
        return None

    def drain(self, node_id: str, draining: bool) -> bool:
        """Empty a node, or let it take replicas again; kept over restarts. False when there is no such node."""
        if not self._fleet.knows(node_id):
            return False
        if any(view.node_id == node_id and view.draining == draining for view in self._fleet.views()):
            return True  # said again
        self._state.set_draining(node_id, self._clock.now() if draining else None)
        self._fleet.set_draining(node_id, draining)
        words = "is being drained: its replicas go elsewhere" if draining else "takes replicas again"
        log.info("node %s %s", node_id, words)
        self._events.record("node", node_id, words)
        return True

    def forget(self, node_id: str) -> bool:
        """Forget a node that is gone for good; False when it is connected."""
        if not self._fleet.forget(node_id):
            return False
        self._state.remove_node(node_id)
        log.info("node %s is forgotten", node_id)
        self._events.record("node", node_id, "is forgotten")
        return True

    def delete(self, name: str) -> bool:
        """Forget a profile and stop its replicas; False when there was none."""
        deleted = self._state.delete_profile(name)
        if deleted:
            log.info("profile %s deleted", name)
            self._events.record("profile", name, "deleted")
            self.poke()
        return deleted

    def pass_once(self, *, woken: bool = True) -> Outlook:
        """One pass: plan, keep, tell nodes, publish routes. Only the owner thread, or a test, calls it.

        Args:
            woken: False when only time has passed: then a pass in which nothing can have changed ends early.
        """
        began = self._watch_stall()
        fleet = self._fleet.views()
        stored, keys = self._state.profiles(), self._state.client_keys()
        held = self._held(fleet, began)
        same = stored is self._stored and keys is self._keys
        inputs = (self._fleet.revision, held)
        pending = any(item.refusal is not None for item in self._outlook.standings) and began >= self._replan_at
        if not (woken or self._restless or pending or inputs != self._inputs or not same):
            self._outlook = evolve(self._outlook, nodes=fleet)
            return self._outlook
        profiles = [item.profile for item in stored]
        by_id = {node.node_id: node for node in fleet}
        decided = self._finishing.hold_back(self._plan(profiles, fleet, held), by_id, began)
        self._carry_out(decided)
        assigned = tuple(self._assignments.values())
        told = self._teller.tell(fleet, self._fleet.agents(), assigned, self._rollbacks.values())
        standings = self._standings(profiles, by_id, decided)
        self._remember_endpoints(standings)
        self._outlook = Outlook(fleet, standings, self._routes(standings, stored, keys), assigned)
        self._chronicle.observe(fleet, standings, assigned, held if began >= self._grace_until else "")
        self._keep_events()
        away = (by_id.get(item.node_id) for item in assigned)
        away_now = any(node is None or node.presence is not Presence.CONNECTED for node in away)
        self._restless = away_now or not told or bool(self._finishing.leaving)
        self._inputs, self._stored, self._keys = inputs, stored, keys
        took = self._clock.monotonic() - began
        self._slack_s = min(_LONGEST_PAUSE_S, 4 * took)
        self._replan_at = began + took / _READINGS_SHARE
        return self._outlook

    def _run(self) -> None:
        woken = True
        while not self._stopping:
            self._wake.clear()
            with self._passes:
                self._begun += 1
            try:
                self.pass_once(woken=woken)
            except LlmgwError as error:
                self._restless = True
                log.error("cannot reconcile: %s", error.words())
            except Exception:
                self._restless = True
                log.exception("cannot reconcile")
            with self._passes:
                self._done = self._begun
                self._passes.notify_all()
                # a storm of changes is taken in by few passes: most of the time goes to those who bring them
                self._passes.wait_for(lambda: self._stopping, self._slack_s)
            woken = self._clock.wait(self._wake, TICK_S)
        self._keep_events()

    def _watch_stall(self) -> float:
        """Notice when this process itself stood still: nobody else can be blamed for that silence."""
        now = self._clock.monotonic()
        gap = now - self._last_pass - self._slack_s
        if gap > _STALL_S:
            words = f"stood still for {format_duration(gap)}: no replica is moved for a while"
            log.warning("this server %s", words)
            self._events.record("server", "", words)
            self._fleet.stood_still()
            self._grace_until, self._grace_words = now + _GRACE_BEATS_S, f"has just stood still for {gap:.0f} s"
        self._last_pass = now
        return now

    def _held(self, fleet: Sequence[NodeView], now: float) -> str:
        held = moves_held(fleet, self._assignments.values(), self._fraction)
        return held or (f"this server {self._grace_words}" if now < self._grace_until else "")

    def _plan(self, profiles: Sequence[Profile], fleet: Sequence[NodeView], held: str) -> Plan:
        assigned = tuple(self._assignments.values())
        return plan(
            profiles, self._engines, fleet, assigned, held=held, formats=self._formats, rollbacks=self._rollbacks
        )

    def _carry_out(self, decided: Plan) -> None:
        if decided.rollbacks:
            self._state.put_rollbacks(decided.rollbacks)
            self._rollbacks |= {item.profile: item for item in decided.rollbacks}
            for back in decided.rollbacks:
                log.error("%s", back.words)
                self._events.record("profile", back.profile, back.words)
        if not decided.starts and not decided.stops:
            return
        first = self._state.next_epoch(len(decided.starts)) if decided.starts else 0
        made = [self._assignment(start, first + number) for number, start in enumerate(decided.starts)]
        stops = [stop.assignment.spec.replica_id for stop in decided.stops]
        self._state.reassign(made, stops)
        for stop in decided.stops:
            self._assignments.pop(stop.assignment.spec.replica_id, None)
            self._say_replica(stop.assignment, f"leaves node {stop.assignment.node_id}: {stop.words}")
        for start, item in zip(decided.starts, made, strict=True):
            self._assignments[item.spec.replica_id] = item
            self._say_replica(item, f"goes to node {item.node_id}, epoch {item.spec.epoch}: {start.words}")

    def _say_replica(self, item: Assignment, words: str) -> None:
        log.info("replica %s %s", item.spec.replica_id, words)
        self._events.record("replica", item.spec.replica_id, words)

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
        placed = start.placement
        return Assignment(start.index, placed.node_id, spec, placed.memory_bytes, before=start.before)

    def _standings(
        self, profiles: Sequence[Profile], fleet: Mapping[str, NodeView], decided: Plan
    ) -> tuple[Standing, ...]:
        mine: dict[str, list[Assignment]] = {}
        for item in self._assignments.values():
            mine.setdefault(item.spec.profile, []).append(item)
        refusals, notes = decided.refusals, decided.notes
        return tuple(
            judge(each, mine.get(each.name, ()), fleet, refusals.get(each.name), notes.get(each.name, ""))
            for each in profiles
        )

    def _keep_events(self) -> None:
        made = self._events.unsaved()
        if not made:
            return
        try:
            self._state.add_events(made, EVENTS_KEPT)
        except LlmgwError as error:
            log.error("the last %d events are not kept: %s", len(made), error.words())

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

    def _routes(
        self, standings: Sequence[Standing], stored: Sequence[StoredProfile], kept: Sequence[StoredKey]
    ) -> RouteTable:
        created = {item.profile.name: int(item.created) for item in stored}
        models = tuple(self._model(item, created.get(item.profile.name, 0)) for item in standings)
        keys: tuple[RouteKey, ...] = tuple(item.key for item in kept)
        last = self._outlook.routes
        if last.seq and (last.models, last.keys) == (models, keys):
            return last
        table = RouteTable(last.seq + 1, models, keys, self._keys_required)
        self._publish(table)
        return table

    def _model(self, standing: Standing, created: int) -> RouteModel:
        known = self._capabilities.get(standing.profile.engine)
        endpoints = known.endpoints if known is not None else ()
        return route(standing, endpoints, created, self._finishing.leaving)
