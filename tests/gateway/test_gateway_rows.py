"""The files that gateway processes share: rows of those that come, go and are more or fewer than before."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateway_fakes import model, replica

from llmgw.gateway.shared import Shared

SERVED = model(replica(1, "m#0"), replica(2, "m#1"))


class Others:
    """Processes that each have a row and a request at `m#0`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._children: list[int] = []

    def start(self, workers: list[int]) -> None:
        """Start them at the same instant; each counts on `workers[i]` being there."""
        there, go = os.pipe(), os.pipe()
        for count in workers:
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    os.close(go[1])
                    os.read(go[0], 1)  # ends for all of them at once
                    shared = Shared(self._path, count)
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
