"""The decisions about one profile's replicas: what leaves, what comes, what waits, and which version was a mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from llmgw.domain.assignments import Assignment, Rollback, Start, Stop, status_of, wanted_digest
from llmgw.domain.engines import EngineSpec, EngineState
from llmgw.domain.ids import replica_id
from llmgw.domain.placement import Claim, Memo, Refusal, label_words, place
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaSpec, ReplicaState
from llmgw.domain.report import NodeView, Presence

_COMING = (ReplicaState.PENDING, ReplicaState.FETCHING, ReplicaState.STARTING, ReplicaState.LOADING)
_UP = (ReplicaState.READY, ReplicaState.UNRESPONSIVE, ReplicaState.DRAINING)


class Desk:
    """What one run of `plan` has decided so far; later decisions see the claims of earlier ones."""

    def __init__(
        self,
        engines: Mapping[str, EngineSpec],
        fleet: Sequence[NodeView],
        by_id: Mapping[str, NodeView],
        formats: Mapping[str, Sequence[str]],
        kept: Sequence[Assignment],
        rolled_back: Mapping[str, Rollback],
    ) -> None:
        self.engines = engines
        self.fleet = sorted(fleet, key=lambda node: node.node_id)
        self.by_id = by_id
        self.formats = formats
        self.rolled_back = rolled_back
        self.claims: dict[str, dict[str, Claim]] = {}
        self.starts: list[Start] = []
        self.stops: list[Stop] = []
        self.refusals: dict[str, Refusal] = {}
        self.notes: dict[str, str] = {}
        self.rollbacks: list[Rollback] = []
        self.memo = Memo()
        self.leftovers = _leftovers(fleet, kept)
        for item in kept:
            self._claim(_claim(item, by_id))

    def _claim(self, claim: Claim) -> None:
        self.claims.setdefault(claim.node_id, {})[claim.replica_id] = claim

    def spec(self, profile: Profile) -> EngineSpec | None:
        """The engine the profile is to run on: as wanted, or at the version it was rolled back to."""
        spec = self.engines.get(profile.engine)
        back = self.rollback(profile)
        return evolve(spec, version=back.good) if spec is not None and back is not None else spec

    def rollback(self, profile: Profile) -> Rollback | None:
        """The rollback of this profile that holds now."""
        back, spec = self.rolled_back.get(profile.name), self.engines.get(profile.engine)
        if back is None or spec is None:
            return None
        same = (back.engine, back.bad, back.digest) == (spec.name, spec.version, wanted_digest(profile))
        return back if same else None

    def stop(self, item: Assignment, words: str) -> None:
        """Take a replica back; what it takes counts as taken until it is gone."""
        self.stops.append(Stop(item, words))

    def place(self, profile: Profile, index: int, replaces: Assignment | None, words: str, before: str = "") -> bool:
        """Place one replica; False, with the refusal kept, when no node takes it.

        Args:
            replaces: it leaves first, so what it takes counts as free; None for one more.
        """
        name = replica_id(profile.name, index)
        old = self.claims.get(replaces.node_id, {}).get(replaces.spec.replica_id) if replaces is not None else None
        if old is not None:
            self._claim(evolve(old, leaving=True))
        outcome = place(
            profile, self.spec(profile), self.fleet, self.claims, self.formats.get(profile.engine), self.memo
        )
        if isinstance(outcome, Refusal):
            self.refusals[profile.name] = outcome
            if old is not None:
                self._claim(old)
            return False
        if old is not None:
            del self.claims[old.node_id][old.replica_id]
        self.starts.append(Start(profile, index, outcome, wanted_digest(profile), replaces, words, before))
        self._claim(Claim(name, profile.name, outcome.node_id, outcome.gpus, outcome.memory_bytes))
        return True


def _claim(item: Assignment, by_id: Mapping[str, NodeView]) -> Claim:
    status = status_of(item, by_id.get(item.node_id))
    settled = status is not None and status.state in _UP
    return Claim(
        item.spec.replica_id, item.spec.profile, item.node_id, item.spec.gpus, item.memory_bytes, settled=settled
    )


def _leftovers(fleet: Sequence[NodeView], kept: Sequence[Assignment]) -> dict[str, str]:
    """By profile: a replica that some node still runs though it is assigned no more, in words."""
    assigned = {(item.spec.replica_id, item.spec.epoch) for item in kept}
    found: dict[str, str] = {}
    for node in fleet:
        if node.report is None or node.presence is not Presence.CONNECTED:
            continue
        for status in node.report.replicas:
            ended = status.state in (ReplicaState.STOPPED, ReplicaState.FAILED)
            if not ended and (status.replica_id, status.epoch) not in assigned:
                found[status.profile] = f"{status.replica_id} on node {node.node_id}"
    return found


class Roll:
    """The decisions about one profile.

    A replica is lost (its node is), idle (it does not serve) or ready, and stale when it is not as wanted.
    """

    def __init__(self, desk: Desk, profile: Profile, mine: Sequence[Assignment], held: str) -> None:
        self.desk = desk
        self.profile = profile
        self.mine = list(mine)
        self.held = held
        self.digest = wanted_digest(profile)
        self.lost = [item for item in mine if is_lost(item, desk.by_id)]
        self.status = {item.index: status_of(item, desk.by_id.get(item.node_id)) for item in mine}
        self._judge()

    def _judge(self) -> None:
        there = [item for item in self.mine if item not in self.lost]
        self.reasons = {item.index: _why_stale(self.desk, self.profile, self.digest, item) for item in there}

    def decide(self) -> None:
        """Note what is to be done now."""
        if not self.held:
            self._give_up_version()
        self._take_back()
        self._note_rollback()
        for item in [item for item in self.lost if item in self.mine]:
            self._move(item)
        for _ in range(self.profile.replicas - len(self.mine)):
            index = self._free_index()
            if not self.desk.place(self.profile, index, None, "wanted and not placed yet"):
                break
            self.mine.append(_placeholder(self.desk.starts[-1]))
        self._replace()

    def _is_ready(self, item: Assignment) -> bool:
        status = self.status.get(item.index)
        return item not in self.lost and status is not None and status.state is ReplicaState.READY

    def _give_up_version(self) -> None:
        """A replica that failed twice with a new engine version: back to the version before."""
        spec = self.desk.spec(self.profile)
        for item in self.mine:
            status = self.status.get(item.index)
            if status is None or spec is None or item in self.lost or not item.before or item.before == spec.version:
                continue
            failed = status.state is ReplicaState.FAILED and (status.restarts >= 2 or status.next_try is None)
            if not failed or self.reasons.get(item.index) or item.spec.engine_version != spec.version:
                continue
            words = (
                f"engine `{spec.name}` {spec.version} did not become ready for `{self.profile.name}`, which stays with "
                f"{item.before}: replica {item.spec.replica_id} on node {item.node_id}: {status.words}; "
                "another version in server.yaml, or a change of the profile, is tried again"
            )
            back = Rollback(self.profile.name, spec.name, spec.version, item.before, self.digest, words)
            self.desk.rollbacks.append(back)
            self.desk.rolled_back = {**self.desk.rolled_back, self.profile.name: back}
            self._judge()
            return

    def _note_rollback(self) -> None:
        back = self.desk.rollback(self.profile)
        if back is not None:
            self.desk.notes[self.profile.name] = back.words

    def _take_back(self) -> None:
        """Stop what is more than wanted; a serving one only while as many as are wanted go on serving."""
        wanted = self.profile.replicas

        def rank(item: Assignment) -> tuple[bool, bool, bool, int]:
            stale = bool(self.reasons.get(item.index))
            return (item not in self.lost, not stale, self._is_ready(item), item.index if stale else -item.index)

        surplus = len(self.mine) - wanted
        if surplus <= 0:
            return
        ready = sum(self._is_ready(item) for item in self.mine)
        rolls = any(self.reasons.values())
        for item in sorted(self.mine, key=rank):
            if surplus == 0:
                break
            if self._is_ready(item) and ready <= wanted and rolls:
                break
            if item in self.lost and self.held and not self._spare(item):
                continue
            if not self._is_ready(item) and rolls and not self.reasons.get(item.index) and item not in self.lost:
                break  # the replacement, on its way
            self.desk.stop(item, self._why_surplus(item, surplus))
            ready -= self._is_ready(item)
            self.mine.remove(item)
            surplus -= 1

    def _spare(self, item: Assignment) -> bool:
        """Whether the profile has as many others that serve, so that a lost replica is not missed."""
        return sum(self._is_ready(other) for other in self.mine if other is not item) >= self.profile.replicas

    def _why_surplus(self, item: Assignment, surplus: int) -> str:
        reason = self.reasons.get(item.index)
        if reason and surplus == 1 and any(self._is_ready(other) and other is not item for other in self.mine):
            return f"{reason}; another replica serves in its place"
        return f"`{self.profile.name}` wants {self.profile.replicas} replicas"

    def _free_index(self) -> int:
        used = {item.index for item in self.mine}
        # an index that is given back in this very plan is not given again: its engine is still there
        used |= {stop.assignment.index for stop in self.desk.stops if stop.assignment.spec.profile == self.profile.name}
        return next(index for index in range(len(used) + 1) if index not in used)

    def _move(self, item: Assignment) -> None:
        name = item.spec.replica_id
        if self.held:
            self._note(f"replica {name} stays on node {item.node_id}: {self.held}")
        elif not self.desk.place(self.profile, item.index, item, f"node {item.node_id} is lost"):
            self._note(f"replica {name} stays on lost node {item.node_id}: no other node takes it")

    def _replace(self) -> None:
        """Replace what is not as wanted: idle ones at once, one serving one when nothing else is on its way."""
        stale = [item for item in self.mine if self.reasons.get(item.index)]
        if not stale:
            return
        idle = [item for item in stale if not self._is_ready(item)]
        for item in idle:
            if not self.desk.place(self.profile, item.index, item, self.reasons[item.index], self._before(item)):
                self._note_stays(item)
        serving = [item for item in stale if item not in idle]
        if not serving or self._is_moving():
            return
        for item in self.mine:
            if item not in stale and not self._is_ready(item):
                self._note_waits(item, len(serving))
                return
        item = serving[0]
        words = self.reasons[item.index]
        if self.desk.place(self.profile, self._free_index(), None, f"{words}; {item.spec.replica_id} serves until it "
                           "is ready", self._before(item)):  # fmt: skip
            return
        if self.desk.place(
            self.profile, item.index, item, f"{words}; no room for both, so the old one stops first", self._before(item)
        ):
            self.desk.refusals.pop(self.profile.name, None)
            return
        self._note_stays(item)

    def _is_moving(self) -> bool:
        """Whether something of this profile starts, or has yet to leave: room is counted anew after that."""
        if any(start.profile.name == self.profile.name for start in self.desk.starts):
            return True
        if any(stop.assignment.spec.profile == self.profile.name for stop in self.desk.stops):
            return True
        leaving = self.desk.leftovers.get(self.profile.name)
        if leaving:
            self._note(f"the next replica of `{self.profile.name}` is replaced when {leaving} has stopped")
        return bool(leaving)

    def _before(self, item: Assignment) -> str:
        """The version that was known to serve, when only the engine's version is why a replica is replaced."""
        spec = self.desk.spec(self.profile)
        same = item.spec.digest == self.digest
        if (
            spec is None
            or not same
            or item.spec.engine_version in ("", spec.version)
            or self.desk.rollback(self.profile)
        ):
            return ""
        return item.spec.engine_version if self._is_ready(item) else item.before

    def _note_waits(self, coming: Assignment, left: int) -> None:
        waits = f"{left} of {self.profile.replicas} replicas still run as before"
        status = self.status.get(coming.index)
        if status is not None and status.state not in _COMING:
            waits += f", because replica {coming.spec.replica_id} on node {coming.node_id}: {status.words}"
        self._note(waits)

    def _note_stays(self, item: Assignment) -> None:
        node = self.desk.by_id[item.node_id]
        where = f"draining node {item.node_id}" if node.draining else f"node {item.node_id} as before"
        self._note(f"replica {item.spec.replica_id} stays on {where}: no other node takes it")

    def _note(self, words: str) -> None:
        self.desk.notes.setdefault(self.profile.name, words)


def _placeholder(start: Start) -> Assignment:
    """What was just decided, as an assignment without an epoch yet."""
    profile = start.profile
    name = replica_id(profile.name, start.index)
    spec = ReplicaSpec(
        name, 0, profile.name, profile.name, profile.model, profile.engine, start.placement.engine_version,
        profile.context, profile.slots, digest=start.digest,
    )  # fmt: skip
    return Assignment(start.index, start.placement.node_id, spec)


def is_lost(item: Assignment, by_id: Mapping[str, NodeView]) -> bool:
    node = by_id.get(item.node_id)
    return node is None or node.presence is Presence.LOST


def _why_stale(desk: Desk, profile: Profile, digest: str, item: Assignment) -> str:
    """Why a replica on a node that is there has to be replaced; empty when it is as wanted."""
    node = desk.by_id[item.node_id]
    if node.draining:
        return f"node {node.node_id} is draining"
    if item.spec.digest != digest:
        return f"`{profile.name}` was changed"
    labels = label_words(profile.node_selector, node) if node.facts is not None else ""
    if labels:
        return f"node {node.node_id} {labels}"
    spec = desk.spec(profile)
    said = node.report.engines if node.report is not None else ()
    named = any(status.name == profile.engine and status.state is EngineState.NAMED for status in said)
    if spec is not None and not named and item.spec.engine_version != spec.version:
        return f"engine `{profile.engine}` {spec.version} is wanted, it runs {item.spec.engine_version}"
    return ""
