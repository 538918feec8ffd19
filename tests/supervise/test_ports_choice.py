"""Which ports engines get."""

from __future__ import annotations

import random
import socket

import pytest

from llmgw.agent.ports import Ports, candidates
from llmgw.errors import ReplicaError
from llmgw.system.clock import RealClock


class Later(RealClock):
    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class Picks(random.Random):
    """Chooses what the test says, the last one for ever."""

    def __init__(self, *picks: int) -> None:
        super().__init__(1)
        self.picks = list(picks)

    def choice(self, seq: object) -> int:
        return self.picks.pop(0) if len(self.picks) > 1 else self.picks[0]


@pytest.mark.parametrize(
    ("ephemeral", "expected"),
    [
        ((32768, 60999), range(15000, 32768)),
        ((1024, 60999), range(61000, 65536)),
        ((15500, 64999), range(1024, 15500)),
        ((1024, 65535), range(1024, 15000)),
    ],
)
def test_candidates_avoid_the_kernels_range_where_there_is_room(ephemeral: tuple[int, int], expected: range) -> None:
    assert candidates(ephemeral) == expected


def test_a_port_in_use_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
        other.close()
        ports = Ports(RealClock(), Picks(taken.getsockname()[1], free))
        assert ports.take("127.0.0.1") == free


def test_a_port_given_back_rests_a_minute() -> None:
    clock = Later()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ports = Ports(clock, Picks(port))
    assert ports.take("127.0.0.1") == port
    ports.give_back(port)
    with pytest.raises(ReplicaError, match="found no free port"):
        ports.take("127.0.0.1")
    clock.ahead = 61.0
    assert ports.take("127.0.0.1") == port


def test_an_address_of_another_machine_is_said() -> None:
    with pytest.raises(ReplicaError) as failed:
        Ports(RealClock()).take("192.0.2.1")
    assert "Cannot assign requested address" in failed.value.words()
    assert "management address" in failed.value.hint
