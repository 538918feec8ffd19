"""Who waits for a slot gets one as soon as there is one, whatever changed meanwhile."""

from __future__ import annotations

import random
from collections.abc import Set
from typing import Any

import pytest
from gateway_fakes import model, replica

from llmgw.domain.routing import PickReason, RouteModel, RouteReplica, RouteTable, choose
from llmgw.gateway.balance import Balance
from llmgw.gateway.errors import Answer
from llmgw.gateway.settings import Options


class Asks:
    """A request that notes what becomes of it."""

    def __init__(self, model_name: str = "m", tried: Set[str] = frozenset(), key_name: str = "") -> None:
        self.model_name, self.key_name, self.prefix, self.tried = model_name, key_name, b"", tried
        self.model, self.at, self.status = "", "", 0

    def start(self, model: RouteModel, replica: RouteReplica, reason: PickReason | None) -> None:
        assert not self.at
        self.model, self.at, self.tried = model.name, replica.replica_id, {*self.tried, replica.replica_id}

    def refused(self, answer: Answer) -> None:
        assert not self.at
        assert not self.status
        self.status = answer.status

    def exhausted(self, model: RouteModel) -> None:
        assert not self.at
        self.status = 503


class Table:
    """A balance with a clock that stands still."""

    def __init__(self, *models: RouteModel, **options: Any) -> None:
        self.now = 0.0
        self.balance = Balance(Options(**options), lambda: self.now)
        self.apply(*models)

    def apply(self, *models: RouteModel) -> None:
        self.balance.apply(RouteTable(1, models))

    def admit(self, *asks: Asks) -> None:
        for each in asks:
            self.balance.admit(each)

    def fail(self, one: Asks, of: RouteReplica) -> None:
        """The replica could not begin: as `Asking` says so."""
        one.at = ""
        self.balance.failed(of, "it cannot be reached")
        self.balance.release(one.model, of.replica_id, one.key_name)
        self.balance.admit(one)


ZERO, ONE = replica(1, "m#0", slots=1), replica(2, "m#1", slots=1)


def test_who_waits_gets_a_replica_whose_ejection_is_over() -> None:
    """The other one is busy for long, and nothing else happens that could wake the queue."""
    table = Table(model(ZERO, ONE))
    first, second, third = Asks(), Asks(), Asks()
    table.admit(first, second)
    where = {first.at: first, second.at: second}
    assert set(where) == {"m#0", "m#1"}
    table.fail(where["m#1"], ONE)
    table.admit(third)
    assert not third.at
    table.now = 1.1
    table.balance.expire()
    assert third.at == "m#1"


def test_who_can_use_what_is_free_does_not_wait_behind_who_cannot() -> None:
    table = Table(model(ZERO, ONE))
    busy, again, fresh = Asks(), Asks(tried={"m#1"}), Asks()
    table.balance.in_flight["m#0"] = 0
    table.admit(busy)
    if busy.at == "m#1":
        table.balance.release("m", "m#1")
        busy.at = ""
        table.admit(busy)
    assert busy.at == "m#0"
    table.admit(again, fresh)
    assert not again.at
    assert fresh.at == "m#1"
    late = Asks()
    table.admit(late)
    assert not late.at
    table.balance.release("m", "m#0")
    assert again.at == "m#0", "the one that came first"
    table.balance.release("m", "m#1")
    assert late.at == "m#1"


def test_who_was_tried_keeps_its_turn_among_those_who_wait_for_the_same_replica() -> None:
    table = Table(model(ZERO, ONE))
    busy = Asks(tried={"m#1"})
    again = [Asks(tried={"m#1"}) for _ in range(3)]
    table.admit(busy, *again)
    assert [each.at for each in again] == ["", "", ""]
    for done in again:
        for _ in range(3):
            table.apply(*table.balance.table.models)  # each look finds no slot for them
        table.balance.release("m", "m#0")
        assert done.at == "m#0"


def test_who_waits_follows_an_alias_to_another_model() -> None:
    old, new = model(ZERO, aliases=("a",)), model(ONE, name="n")
    table = Table(old, new)
    asks = [Asks("m"), Asks("a"), Asks("m"), Asks("n"), Asks("n")]
    table.admit(*asks)
    first, moved, behind, other, waits = asks
    assert [each.at for each in asks] == ["m#0", "", "", "m#1", ""]
    table.apply(model(ZERO), model(ONE, name="n", aliases=("a",)))
    assert table.balance.queued() == {"m": 1, "n": 2}
    table.balance.release(first.model, "m#0")
    assert behind.at == "m#0", "it waits for its own model only"
    table.balance.release(other.model, "m#1")
    table.balance.release("n", "m#1")
    assert (moved.at, waits.at) == ("m#1", "m#1")
    assert table.balance.queued() == {}


def test_who_waits_keeps_its_deadline_when_its_alias_moves() -> None:
    table = Table(model(ZERO, aliases=("a",)), model(ONE, name="n"), queue_timeout_s=30.0)
    moved = Asks("a")
    table.admit(Asks("m"), Asks("n"), moved)
    table.now = 29.0
    table.apply(model(ZERO), model(ONE, name="n", aliases=("a",)))
    table.balance.expire()
    assert not moved.status
    table.now = 30.0
    table.balance.expire()
    assert moved.status == 503


def test_a_replica_that_loses_many_answers_at_once_has_failed_once() -> None:
    table = Table(model(ZERO, ONE))
    for _ in range(32):
        table.balance.failed(ZERO, "it closed the connection")
    assert table.balance.sick["m#0"].until == 1.0
    table.now = 1.0
    for _ in range(32):
        table.balance.failed(ZERO, "it cannot be reached")
    assert table.balance.sick["m#0"].until == 3.0


@pytest.mark.parametrize("now_there", [(replica(3, "m#0", slots=1), ONE), (ONE,)])
def test_what_fails_at_an_address_that_is_over_says_nothing_about_the_new_one(now_there: tuple[Any, ...]) -> None:
    table = Table(model(ZERO, ONE))
    table.apply(model(*now_there))
    table.balance.failed(ZERO, "it closed the connection")
    assert not table.balance.sick


def test_a_replica_that_is_ready_anew_is_not_passed_over_for_what_it_did_before() -> None:
    table = Table(model(ZERO, ONE))
    table.balance.failed(ZERO, "it closed the connection")
    table.apply(model(ZERO, ONE))
    assert table.balance.sick
    table.apply(model(replica(1, "m#0", slots=1, ready=False), ONE))
    assert table.balance.sick
    table.apply(model(ZERO, ONE))
    assert not table.balance.sick


class Told(Asks):
    """Keeps how long it is told to wait."""

    retry_after = ""

    def refused(self, answer: Answer) -> None:
        super().refused(answer)
        self.retry_after = dict(answer.headers)["Retry-After"]


def test_who_finds_the_queue_full_is_told_to_come_back_when_it_will_not_be() -> None:
    table = Table(model(ZERO), queue=4)

    def one_more() -> str:
        told = Told()
        table.admit(told)
        assert told.status == 429
        return told.retry_after

    def pass_on(after_s: float) -> None:
        table.now += after_s
        table.balance.release("m", "m#0")
        table.admit(Asks())

    table.admit(*(Asks() for _ in range(5)))
    assert one_more() == "1", "nothing is known yet"
    table.now += 2.0
    assert one_more() == "8", "nobody has come out of it for 2 s"
    pass_on(1.0)
    for _ in range(2):
        pass_on(3.0)
    assert one_more() == "12", "four wait, and one goes every 3 s"
    for _ in range(40):
        pass_on(0.1)
    assert one_more() == "1"
    for _ in range(5):
        table.balance.release("m", "m#0")
    table.now += 1000.0
    table.admit(*(Asks() for _ in range(5)))
    assert one_more() == "1", "what passed while nobody waited is no pace"
    for _ in range(40):
        pass_on(60.0)
    assert one_more() == "30", "it may be mistaken"


class Walker(Asks):
    """A request of the random walk."""

    gone = False
    of: RouteReplica | None = None

    def start(self, model: RouteModel, replica: RouteReplica, reason: PickReason | None) -> None:
        super().start(model, replica, reason)
        self.of = replica


def some_routes(rng: random.Random) -> list[RouteModel]:
    """Anything a snapshot may say: aliases that are models' names, replicas that moved, no slots told."""
    found = []
    for name in rng.sample(("m", "n", "o"), rng.randrange(4)):
        names = rng.sample([f"{name}#{number}" for number in range(4)], rng.randrange(4))
        replicas = [
            replica(rng.choice((1, 2)), each, slots=rng.randrange(3), ready=rng.random() < 0.8) for each in names
        ]
        aliases = tuple(rng.sample(("a", "b", "m", "n"), rng.randrange(2)))
        state = rng.choice(("ready", "loading", "refused", "failed"))
        found.append(model(*replicas, name=name, aliases=aliases, state=state))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_every_slot_is_given_back_and_nobody_is_forgotten(seed: int) -> None:
    for part in range(40):
        _walk(random.Random(f"{seed}/{part}"))


def _walk(rng: random.Random) -> None:
    table = Table(queue=3, queue_timeout_s=5.0)
    balance, every = table.balance, list[Walker]()

    def ends(one: Walker) -> None:
        assert one.of is not None
        every.remove(one)
        balance.release(one.model, one.of.replica_id, one.key_name)

    for _ in range(60):
        what = rng.random()
        active = [each for each in every if each.at]
        waiting = [each for each in every if not (each.at or each.status or each.gone)]
        if what < 0.15:
            table.apply(*some_routes(rng))
        elif what < 0.5:
            every.append(Walker(rng.choice("mnoab"), key_name=rng.choice("xy")))
            balance.admit(every[-1])
        elif what < 0.7 and active:
            ends(rng.choice(active))
        elif what < 0.8 and active:
            one = rng.choice(active)
            assert one.of is not None
            table.fail(one, one.of)
        elif what < 0.9 and waiting:
            one = rng.choice(waiting)
            one.gone = True
            balance.leave(one)
        else:
            table.now += rng.choice((0.5, 1.5, 6.0))
            balance.expire()
            _nobody_waits_for_what_is_free(balance)
        queues = balance._queues
        queued = [each for queue in queues.values() for each, _ in queue.all()]
        assert len(queued) == len(set(queued))
        assert set(queued) == {each for each in every if not (each.at or each.status or each.gone)}
        for name, queue in queues.items():
            assert queue.size == len(queue.all())
            assert queue.again == sum(1 for each, _ in queue.all() if each.tried)
            assert all(balance.models[each.model_name].name == name for each, _ in queue.all())
        assert sum(balance.in_flight.values()) == sum(1 for each in every if each.at)
        assert min(balance.in_flight.values(), default=0) >= 0
    for _ in range(2):
        table.now += 100.0
        balance.expire()
        while active := [each for each in every if each.at]:
            ends(active[0])
    assert not balance.queued()
    assert not any(balance.in_flight.values())
    assert not balance.running()


def _nobody_waits_for_what_is_free(balance: Balance) -> None:
    for name, queue in balance._queues.items():
        if queue.size > queue.again:
            assert choose(balance.models[name], balance.in_flight, (), balance._ejected())[0] is None
