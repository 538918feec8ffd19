"""The access log on a disk that becomes full, and is cleared again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.gateway.records import AccessLog


@contextlib.contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file of this process becomes larger: a write takes what fits, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 105, 110, 111, 499])
def test_no_line_is_half_there_and_lost_ones_are_counted(
    size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path))
    lines = [json.dumps({"id": f"{number:03}"}).encode() for number in range(60)]
    assert len(lines[0]) == 13

    def write(*numbers: int) -> None:
        for number in numbers:
            log.add(lines[number])
        log.flush()

    with caplog.at_level(logging.WARNING), full_at(size):
        write(*range(5))
        write(*range(5, 50))
        write(50)
        write(51, 52)
    write(53, 54)
    write(55)
    log.reopen()
    got = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    # a line that had begun when the disk was full is finished later
    there = -(-size // 14)
    assert got == [f"{number:03}" for number in (*range(there), 53, 54, 55)]
    assert caplog.text.count("cannot be written") == 1
    assert f"can be written again; {53 - there} lines were lost" in caplog.text


def test_a_log_that_is_moved_away_or_removed_is_begun_anew_without_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path))

    def write(line: bytes) -> None:
        log.add(line)
        log.flush()

    write(b"1")
    path.rename(tmp_path / "access.log.1")
    write(b"2")
    write(b"3")
    assert (tmp_path / "access.log.1").read_text() == "1\n"
    assert path.read_text() == "2\n3\n"
    path.unlink()
    write(b"4")
    assert path.read_text() == "4\n"
    log.reopen()


def test_a_pipe_that_nobody_reads_holds_nothing_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    log = AccessLog(str(path))

    def write() -> None:
        for number in range(5):
            for _ in range(1000):
                log.add(b'{"id":"%05d"}' % number * 3)
            log.flush()

    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = threading.Thread(target=write, daemon=True)
    with caplog.at_level(logging.WARNING):
        writer.start()
        writer.join(10)
        held_up = writer.is_alive()
        os.close(reader)  # frees one that waits
        writer.join(10)
    log.reopen()
    assert not held_up
    assert "cannot be written" in caplog.text
