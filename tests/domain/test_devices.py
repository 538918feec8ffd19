"""When a device's memory counts as back: tables."""

from __future__ import annotations

import pytest

from llmgw.domain.devices import Awaited, Back, DeviceMemory, Left, StillTaken, judge_memory

GB = 10**9
LEFT = Left("GPU-1", "old#0", free_before=23 * GB, gone_at=100.0, until=160.0)


def read(free: float, total: int | None = 24 * GB, at: float = 101.0) -> DeviceMemory:
    return DeviceMemory(int(free), total, at)


@pytest.mark.parametrize(
    ("free", "total"),
    [(23 * GB, 24 * GB), (24 * GB, 24 * GB), (23 * GB - (256 << 20), 24 * GB), (23 * GB - (256 << 20), None)],
)
def test_memory_is_back_when_as_much_is_free_as_before_give_or_take_a_little(free: int, total: int | None) -> None:
    assert judge_memory(LEFT, read(free, total), 102.0) == Back()


def test_the_little_grows_with_the_device() -> None:
    left = Left("GPU-1", "old#0", 140 * GB, 100.0, 160.0)
    assert judge_memory(left, read(138.6 * GB, 141 * GB), 102.0) == Back()
    assert isinstance(judge_memory(left, read(138.5 * GB, 141 * GB), 102.0), Awaited)


@pytest.mark.parametrize("now", [101.0, 200.0, 1e6])
def test_memory_that_cannot_be_read_keeps_nobody_waiting(now: float) -> None:
    assert judge_memory(LEFT, None, now) == Back()


@pytest.mark.parametrize(("total", "words"), [(24 * GB, "3.2 GB of 24 GB still taken"), (None, "3.2 GB still taken")])
def test_missing_memory_is_waited_for_with_its_size(total: int | None, words: str) -> None:
    verdict = judge_memory(LEFT, read(19.8 * GB, total), 159.9)
    assert verdict == Awaited(f"waiting until `GPU-1` has its memory back ({words})")


@pytest.mark.parametrize("free", [0, 23 * GB])
def test_a_reading_that_began_before_the_engine_was_gone_says_nothing(free: int) -> None:
    verdict = judge_memory(LEFT, read(free, at=99.9), 101.0)
    assert verdict == Awaited("waiting until `GPU-1` has its memory back (not read since `old#0` left it)")


def test_after_the_deadline_the_words_say_what_to_do() -> None:
    assert judge_memory(LEFT, read(19.8 * GB, at=159.0), 160.0) == StillTaken(
        "`GPU-1` did not get its memory back: 3.2 GB of 24 GB still taken 1m after `old#0` left it; end the process "
        "that holds it (`nvidia-smi --query-compute-apps=pid,used_memory --format=csv` lists them), and if none does, "
        "reset the GPU or restart the node"
    )


def test_readings_that_stopped_are_given_up_too() -> None:
    assert judge_memory(LEFT, read(23 * GB, at=90.0), 160.0) == StillTaken(
        "the memory of `GPU-1` has not been read for 1m, since `old#0` left it: see whether `nvidia-smi` answers on "
        "this node"
    )
