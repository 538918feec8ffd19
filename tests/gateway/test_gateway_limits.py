"""Limits per minute: what a key was promised, no more and no less, whichever of several processes it meets."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateway_fakes import Gateway, ask, model, post, replica, wait_for

from llmgw.domain.routing import RouteKey, RouteTable
from llmgw.gateway.keys import Keys
from llmgw.gateway.limits import _COLUMNS, Budget, Limits, SharedBudget, _name_of


def key(name: str, rpm: int | None = None, tpm: int | None = None) -> RouteKey:
    return RouteKey(name, hashlib.sha256(name.encode()).hexdigest(), rpm=rpm, tpm=tpm)


def taken(budget: Budget, now: float, tries: int) -> int:
    return sum(budget.take(now) is None for _ in range(tries))


# -- one process


def test_a_minutes_requests_may_come_at_once_and_then_evenly() -> None:
    budget = Budget(60, None)
    assert taken(budget, 100.0, 70) == 60
    which, wait_s = budget.take(100.0) or ("", 0.0)
    assert which == "rpm"
    assert wait_s == pytest.approx(1.0, abs=1e-3)
    assert taken(budget, 101.0, 5) == 1
    assert taken(budget, 131.0, 99) == 30
    assert taken(budget, 900.0, 99) == 60


def test_tokens_may_be_overdrawn_once_and_the_debt_is_waited_for() -> None:
    budget = Budget(None, 600)
    assert budget.take(100.0) is None
    budget.spend(100.0, 900)
    which, wait_s = budget.take(100.0) or ("", 0.0)
    assert which == "tpm"
    assert wait_s == pytest.approx(30.1, abs=1e-3)
    assert budget.take(129.0) is not None
    assert budget.take(130.1) is None


def test_a_refused_request_costs_nothing_of_the_other_limit() -> None:
    budget = Budget(2, 60)
    budget.spend(100.0, 100)
    assert [budget.take(100.0) for _ in range(5)].count(None) == 0
    assert taken(budget, 150.0, 5) == 2


@pytest.mark.parametrize(("rpm", "share", "at_once"), [(10, 0.5, 5), (1, 0.25, 1)])
def test_a_process_that_cannot_count_with_others_gives_a_part(rpm: int, share: float, at_once: int) -> None:
    budget = Budget(rpm, None, share)
    assert taken(budget, 100.0, 20) == at_once
    assert taken(budget, 100.0 + 60 / (rpm * share) + 0.01, 20) == 1


def test_a_limit_of_nothing_lets_nothing_through() -> None:
    assert Budget(0, None).take(5.0) is not None


def test_what_is_left_stays_over_a_snapshot_and_a_changed_limit_begins_anew() -> None:
    now = [100.0]
    keys = Keys(lambda: now[0])
    keys.apply(RouteTable(1, (), (key("k", rpm=3),)))
    budget = keys.budget(key("k"))
    assert budget is not None
    assert taken(budget, 100.0, 2) == 2
    keys.apply(RouteTable(2, (), (key("k", rpm=3), key("other", rpm=9))))
    assert taken(keys.budget(key("k")) or budget, 100.0, 9) == 1
    keys.apply(RouteTable(3, (), (key("k", rpm=4),)))
    assert taken(keys.budget(key("k")) or budget, 100.0, 9) == 4


# -- over several processes


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Limits, Limits]]:
    """Two rows of one file, as two processes have them."""
    both = Limits(tmp_path / "limits", 0, 4), Limits(tmp_path / "limits", 1, 4)
    yield both
    for each in both:
        each.close()


def of(limits: Limits, wanted: RouteKey, now: float = 0.0) -> SharedBudget:
    return limits.budgets([wanted], now)[wanted.name]


def test_one_process_alone_gives_the_whole_limit(pair: tuple[Limits, Limits]) -> None:
    mine, _ = (of(each, key("k", rpm=10)) for each in pair)
    assert taken(mine, 100.0, 20) == 10
    assert taken(mine, 106.0, 20) == 1


def test_processes_give_the_limit_together_and_not_more(pair: tuple[Limits, Limits]) -> None:
    both = [of(each, key("k", rpm=60)) for each in pair]
    assert sum(taken(both[turn % 2], 100.0, 1) for turn in range(200)) == 60
    assert sum(taken(both[turn % 2], 100.0 + turn / 10, 1) for turn in range(300)) == 29
    assert taken(both[0], 500.0, 99) == 60
    assert taken(both[1], 500.0, 99) == 0


def test_a_high_limit_is_taken_in_parts_and_holds_to_a_part_of_each_process(pair: tuple[Limits, Limits]) -> None:
    rpm = 120_000  # 2000 a second, so parts of 10
    both = [of(each, key("k", rpm=rpm)) for each in pair]
    assert sum(taken(both[turn % 2], 100.0, 1) for turn in range(rpm + 10_000)) == rpm
    # 10 s later, in small steps: what has come due since, less or more a part of each
    due = sum(taken(both[turn % 2], 100.0 + turn / 4000, 1) for turn in range(40_000))
    assert abs(due - 20_000) <= 20
    assert taken(of(pair[0], key("alone", rpm=rpm)), 100.0, rpm + 10_000) == rpm


def test_many_small_uses_of_tokens_are_all_counted(pair: tuple[Limits, Limits]) -> None:
    first, second = (of(each, key("k", tpm=600_000)) for each in pair)
    for _ in range(10_001):
        first.spend(100.0, 60)
    assert second.take(100.0) is not None
    assert second.take(101.0) is None


def test_tokens_are_counted_together(pair: tuple[Limits, Limits]) -> None:
    first, second = (of(each, key("k", tpm=600)) for each in pair)
    first.spend(100.0, 400)
    assert second.take(100.0) is None
    second.spend(100.0, 500)
    assert first.take(100.0) is not None
    assert first.take(129.0) is not None
    assert first.take(130.1) is None


def test_what_a_dead_process_let_through_counts_until_its_minute_is_over(pair: tuple[Limits, Limits]) -> None:
    dead, alive = (of(each, key("k", rpm=60)) for each in pair)
    assert taken(dead, 100.0, 99) == 60
    assert taken(alive, 100.0, 9) == 0
    assert taken(alive, 130.0, 99) == 30
    assert taken(alive, 200.0, 99) == 60


def test_a_new_limit_begins_anew_in_all_processes(pair: tuple[Limits, Limits]) -> None:
    assert taken(of(pair[0], key("k", rpm=5)), 100.0, 9) == 5
    assert taken(of(pair[1], key("k", rpm=7)), 100.0, 9) == 7
    assert taken(of(pair[0], key("k", rpm=7)), 100.0, 9) == 0


def test_keys_whose_hashes_meet_do_not_pay_for_each_other(pair: tuple[Limits, Limits]) -> None:
    seen: dict[int, RouteKey] = {}
    for number in range(10_000):
        one = key(f"k{number}", rpm=3)
        other = seen.setdefault(_name_of(one)[0] % _COLUMNS, one)
        if other is not one:
            break
    first = pair[0].budgets([one, other], 0.0)
    second = pair[1].budgets([other, one], 0.0)
    assert taken(first[one.name], 100.0, 9) == 3
    assert taken(second[one.name], 100.0, 9) == 0
    assert taken(second[other.name], 100.0, 9) == 3


def test_more_keys_than_columns_are_counted_by_each_process(
    pair: tuple[Limits, Limits], caplog: pytest.LogCaptureFixture
) -> None:
    many = [key(f"k{number}", rpm=4) for number in range(_COLUMNS + 3)]
    assert len(pair[0].budgets(many, 0.0)) == _COLUMNS
    assert "3 keys' limits are counted by each process alone" in caplog.text
    keys = Keys(lambda: 0.0, pair[0], 0.5)
    keys.apply(RouteTable(1, (), tuple(many)))
    budgets = [keys.budget(each) for each in many]
    assert [type(each) for each in budgets].count(Budget) == 3
    assert [taken(each, 1.0, 9) for each in budgets if type(each) is Budget] == [2, 2, 2]


def test_a_column_is_given_away_when_its_key_has_nothing_to_remember(pair: tuple[Limits, Limits]) -> None:
    many = [key(f"k{number}", rpm=4) for number in range(_COLUMNS)]
    old = pair[0].budgets(many, 0.0)
    busy, idle = old["k0"], [old[f"k{number}"] for number in range(1, _COLUMNS)]
    assert taken(busy, 100.0, 4) == 4
    fresh = [key(f"new{number}", rpm=4) for number in range(_COLUMNS)]
    new = pair[1].budgets(fresh, 100.0)
    # all but the busy one's, and its count is untouched
    assert len(new) == _COLUMNS - 1
    assert taken(busy, 100.0, 4) == 0
    # who still holds an old one counts alone, and takes nothing from the new key
    for each in idle[:50]:
        assert taken(each, 100.0, 9) == 4
    assert all(taken(each, 100.0, 9) == 4 for each in new.values())


def test_times_of_an_earlier_boot_are_forgotten(tmp_path: Path) -> None:
    first = Limits(tmp_path / "limits", 0, 4)
    assert taken(of(first, key("k", rpm=5)), 1e9, 9) == 5
    first.close()
    second = Limits(tmp_path / "limits", 1, 4)
    assert taken(of(second, key("k", rpm=5)), 1.0, 9) == 5
    second.close()


def test_a_file_of_another_form_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    there, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        held = Limits(path, 0, 4)
        os.truncate(path, held.names.nbytes + held.cells.nbytes + 4096)
        os.write(there[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    try:
        assert os.read(there[0], 1) == b"x"
        with pytest.raises(OSError, match="another form"):
            Limits(path, 1, 4)
    finally:
        os.write(go_on[1], b"x")
        os.waitpid(child, 0)
        for end in (*there, *go_on):
            os.close(end)


def test_processes_that_flood_at_the_same_time_do_not_get_more_in_the_long_run(tmp_path: Path) -> None:
    """Without locks: two processes that ask far more often than the limit, together 6000 at once and 100 a second."""
    rpm, lasts = 6000, 2.0
    began = time.monotonic() + 0.3
    pipes = []
    for row in range(2):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            limits = Limits(tmp_path / "limits", row, 4)
            while time.monotonic() < began:
                pass
            budget = of(limits, key("k", rpm=rpm))
            count = 0
            while (now := time.monotonic()) < began + lasts:
                count += budget.take(now) is None
                sum(range(500))  # a request is some work too
            os.write(write, b"%d" % count)
            os._exit(0)
        os.close(write)
        pipes.append((child, read))
    total = 0
    for child, read in pipes:
        total += int(os.read(read, 32))
        os.waitpid(child, 0)
        os.close(read)
    promised = rpm + rpm / 60 * lasts
    print(f"{total} of {promised:.0f}")
    # one more for the other process that takes at the same instant
    assert 0.9 * promised <= total <= promised + 2, (total, promised)


# -- real processes


@contextlib.contextmanager
def workers(start: Callable[..., Gateway], *flags: str) -> Iterator[Gateway]:
    """Two gateway processes behind one address."""
    flags = ("--workers", "2", *flags)
    first = start(*flags)
    second = Gateway(first.work, *flags, "--index", "1", "--listen", f"127.0.0.1:{first.port}", control=False)
    try:
        wait_for(lambda: first.control and len(first.control.hellos) == 2, "the second process", 40)
        yield first
    finally:
        second.close()


def one_answer(sock: socket.socket, request: bytes) -> tuple[int, bytes]:
    """The status, and which process answered: the beginning of the ids that it gives."""
    sock.sendall(request)
    head = b""
    while b"\r\n\r\n" not in head:
        head += sock.recv(65536)
    head, _, body = head.partition(b"\r\n\r\n")
    lower = head.lower()
    length = int(lower.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return int(head.split(b" ")[1]), lower.partition(b"x-request-id: ")[2].partition(b"-")[0]


def chat(name: str) -> bytes:
    return post("/v1/chat/completions", ask(max_tokens=1), f"Authorization: Bearer {name}")


def test_a_connection_gets_the_whole_limit_and_two_processes_no_more(start: Callable[..., Gateway]) -> None:
    rpm = 20
    keys = (key("alone", rpm=rpm), key("both", rpm=rpm), key("free"))
    with workers(start) as made, contextlib.ExitStack() as stack:
        upstream = made.engine()
        made.routes(model(replica(upstream)), keys=keys, required=True)
        found: dict[bytes, socket.socket] = {}

        def both() -> bool:
            sock = stack.enter_context(made.connect())
            status, who = one_answer(sock, chat("free"))
            if status == 200:
                found[who] = sock
            return len(found) == 2

        wait_for(both, "connections to both processes that know the routes", 30)
        socks = list(found.values())

        began = time.monotonic()
        statuses = [one_answer(socks[0], chat("alone"))[0] for _ in range(rpm + 15)]
        refilled = (time.monotonic() - began) * rpm / 60
        assert statuses[:rpm] == [200] * rpm
        assert statuses.count(200) <= rpm + refilled + 1
        # the other process knows it
        assert one_answer(socks[1], chat("alone"))[0] == 429 or time.monotonic() - began > 60 / rpm

        counts = [0, 0]
        together = threading.Barrier(2)

        def flood(which: int) -> None:
            together.wait(10)
            for _ in range(rpm + 15):
                counts[which] += one_answer(socks[which], chat("both"))[0] == 200

        began = time.monotonic()
        threads = [threading.Thread(target=flood, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refilled = (time.monotonic() - began) * rpm / 60
        # one more for each other process that took at the same instant
        assert rpm <= sum(counts) <= rpm + refilled + 1
