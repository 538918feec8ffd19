"""A client that goes takes its request with it: upstream is closed at once, a real engine's slot free."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import ask, gateway, model, post, read_until, replica, wait_for


@pytest.fixture(scope="module")
def slow(llama: Callable[..., Any], slow_gguf: Path) -> Any:
    return llama(slow_gguf, "-np", "1")


@pytest.mark.parametrize("stream", [True, False])
def test_the_slot_of_a_real_engine_is_free_again(slow: Any, tmp_path: Path, stream: bool) -> None:
    with gateway(tmp_path) as made:
        made.routes(model(replica(slow.port, slots=1), name="slow"))
        with made.connect() as sock, made.connect() as queued:
            sock.sendall(post("/v1/chat/completions", ask("slow", stream=stream, max_tokens=400, ignore_eos=True)))
            wait_for(lambda: slow.busy() == 1, "the engine to work", 30)
            if stream:
                read_until(sock, b'"content":"')
            queued.sendall(post("/v1/chat/completions", ask("slow")))
            wait_for(lambda: made.metric('llmgw_queued{model="slow"}') == 1, "the second to wait")
            queued.close()
            wait_for(lambda: made.metric('llmgw_queued{model="slow"}') == 0, "the queue to be empty")
            pid = made.process.pid
            assert _connections(pid, slow.port) == 1
            sock.close()
            gone = time.monotonic()
            wait_for(lambda: _connections(pid, slow.port) == 0, "the upstream connection to be closed")
            took = time.monotonic() - gone
        # 50 ms on an idle machine; here others run beside it
        assert took < 0.5
        wait_for(lambda: slow.busy() == 0, "the slot to be free", 20)


def _connections(pid: int, port: int) -> int:
    """Established TCP connections of a process to a local port, as the kernel has them."""
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    inodes = {fields[9] for fields in lines if fields[2].endswith(f":{port:04X}") and fields[3] == "01"}
    held = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held += each.readlink().name.removeprefix("socket:[").rstrip("]") in inodes
        except OSError:
            continue
    return held
