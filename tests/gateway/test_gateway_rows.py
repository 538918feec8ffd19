"""The files that gateway processes share: rows of those that come, go and are more or fewer than before."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest
from gateway_fakes import Gateway, ask, model, post, read_until, replica, wait_for
from test_gateway_limits import workers
from test_gateway_queue import Asks

from llmgw.domain.routing import RouteTable
from llmgw.gateway.balance import Balance
from llmgw.gateway.settings import Options
from llmgw.gateway.shared import Shared

SERVED = model(replica(1, "m#0"), replica(2, "m#1"))


class Others:
    """Processes that each have a row and a request at `m#0`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._children: list[int] = []

    def start(self, workers: list[int], waits: float = 0.0) -> None:
        """Start them at the same instant; each counts on `workers[i]` being there.

        `waits`: until then a request for `m` waits in each.
        """
        there, go = os.pipe(), os.pipe()
        for count in workers:
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    os.close(go[1])
                    os.read(go[0], 1)  # ends for all of them at once
                    shared = Shared(self._path, count)
                    shared.wait("m", waits)
                    shared.add("m#0", 1)
                    os.write(there[1], b"y")
                    signal.pause()
                os.write(there[1], b"n")
                os._exit(0)
            self._children.append(child)
        os.close(go[1])
        said = b""
        while len(said) < len(workers):
            said += os.read(there[0], 64)
        for end in (go[0], *there):
            os.close(end)
        assert said == b"y" * len(workers), "a process got no row"

    def kill(self, count: int) -> None:
        """SIGKILL for the first of them."""
        for child in self._children[:count]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        del self._children[:count]

    def close(self) -> None:
        self.kill(len(self._children))


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Others]:
    with contextlib.closing(Others(tmp_path / "counts")) as made:
        yield made


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[[int], Shared]]:
    with contextlib.ExitStack() as stack:
        yield lambda workers: stack.enter_context(contextlib.closing(Shared(tmp_path / "counts", workers)))


def at(shared: Shared) -> int:
    shared.look_at_rows()
    return shared.counts(SERVED)["m#0"]


def test_processes_that_start_at_the_same_instant_all_get_a_row(others: Others, join: Callable[[int], Shared]) -> None:
    others.start([8] * 8)
    assert at(join(8)) == 8


def test_fewer_processes_than_before_find_rows_and_count_those_that_still_finish(
    others: Others, join: Callable[[int], Shared]
) -> None:
    others.start([8] * 8)
    mine = join(1)
    assert at(mine) == 8
    others.kill(5)
    assert at(mine) == 3


def test_one_of_few_counts_those_of_many_that_come_later(others: Others, join: Callable[[int], Shared]) -> None:
    mine = join(1)
    others.start([8] * 8)
    assert at(mine) == 8


def test_rows_of_the_dead_are_given_out_again_and_empty(others: Others, join: Callable[[int], Shared]) -> None:
    mine = join(2)
    for _ in range(40):
        others.start([2, 2])
        others.kill(2)
    assert at(mine) == 0
    others.start([2])
    assert at(mine) == 1


def test_a_disk_without_room_is_known_at_the_start(join: Callable[[int], Shared], tmp_path: Path) -> None:
    """A hole in a mapped file ends the process that writes into it when the disk is full."""
    join(2)
    for path in tmp_path.iterdir():
        info = path.stat()
        assert info.st_blocks * 512 >= info.st_size, path.name


def test_replicas_whose_hashes_meet_are_counted_apart(others: Others, join: Callable[[int], Shared]) -> None:
    def place(name: str) -> int:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % 4096

    meets = {
        next(name for name in map("m#{}".format, range(1, 100_000)) if place(name) == place("m#0")),
        next(
            name
            for name in map("m#{}".format, range(1, 100_000))
            if crc32(name.encode()) % 4096 == crc32(b"m#0") % 4096
        ),
    }
    served = model(*(replica(1, name) for name in ("m#0", *meets)))
    mine = join(2)
    assert mine.counts(served) == dict.fromkeys(("m#0", *meets), 0)
    others.start([2])
    assert mine.counts(served) == {"m#0": 1, **dict.fromkeys(meets, 0)}
    mine.add(meets.pop(), 1)
    assert sorted(mine.counts(served).values())[-2:] == [1, 1]


def test_more_names_than_columns_are_counted_together_rather_than_not_at_all(join: Callable[[int], Shared]) -> None:
    mine = join(1)
    for number in range(4096):
        mine.add(f"old#{number}", 1)
    mine.add("m#0", 1)
    assert at(mine) >= 1
    mine.clear()
    assert mine.counts(model(replica(1, "old#5"))) in ({"old#5": 1}, {"old#5": 2})


# -- waiting


def test_a_slot_is_left_to_who_has_waited_longer_in_another_process(
    others: Others, join: Callable[[int], Shared]
) -> None:
    now = [100.0]
    shared = join(2)
    balance = Balance(Options(queue_timeout_s=30.0), lambda: now[0], shared)
    balance.apply(RouteTable(1, (model(replica(1, "m#0", slots=2)),)))
    others.start([2], waits=120.0)  # it came at 90
    shared.look_at_rows()
    mine, late = Asks(), Asks()
    balance.admit(mine)
    balance.admit(late)
    assert not mine.at
    now[0] += 0.1
    balance.expire()
    assert not mine.at
    # it has left the slot there long enough: it may be one that it cannot use
    now[0] += 0.15
    balance.expire()
    assert mine.at == "m#0"
    others.kill(1)
    shared.look_at_rows()
    balance.expire()
    assert late.at == "m#0"
    balance.release("m", "m#0")
    balance.release("m", "m#0")
    others.start([2], waits=now[0] + 29.95)
    shared.look_at_rows()
    early = Asks()
    balance.admit(early)
    assert early.at == "m#0", "the other one came at the same time"


def test_a_busy_process_does_not_keep_another_ones_requests_waiting(start: Callable[..., Gateway]) -> None:
    """Both wait for the one slot there is; who has it must not give it to its own for ever."""
    stop = threading.Event()

    def act(sock: socket.socket, _request: bytes) -> None:
        time.sleep(0.02)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def ask_once(sock: socket.socket) -> bytes:
        sock.sendall(post("/v1/chat/completions", ask()))
        return read_until(sock, b"}")

    def flood(sock: socket.socket) -> None:
        while not stop.is_set():
            ask_once(sock)

    with workers(start, "--queue-timeout", "10s") as made, contextlib.ExitStack() as stack:
        made.routes(model(replica(made.scripted(act), slots=1)))
        found: dict[bytes, list[socket.socket]] = {}

        def enough() -> bool:
            sock = stack.enter_context(made.connect())
            got = ask_once(sock)
            if got.startswith(b"HTTP/1.1 200 "):
                found.setdefault(got.partition(b"x-request-id: ")[2].partition(b"-")[0], []).append(sock)
            return len(found) == 2 and max(map(len, found.values())) > 3

        wait_for(enough, "connections to both processes", 30)
        few, many = sorted(found.values(), key=len)
        threads = [threading.Thread(target=flood, args=(sock,)) for sock in many]
        for thread in threads:
            thread.start()
        try:
            assert [ask_once(few[0])[:13] for _ in range(5)] == [b"HTTP/1.1 200 "] * 5
        finally:
            stop.set()
            for thread in threads:
                thread.join()
