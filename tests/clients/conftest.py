"""A gateway with keys in front of a real llama-server."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import frozen

from llmgw.domain.routing import RouteKey
from llmgw.providers.llamacpp import LlamaCpp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gateway"))
from gateway_fakes import Gateway, fetch, free_port, gateway, model, replica, wait_for

KEY = "sk-llmgw-clients-0123456789abcdef"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
PATHS = LlamaCpp.capabilities.endpoints


@frozen
class Llama:
    """A real engine."""

    port: int

    def busy(self) -> int:
        import json

        return sum(slot["is_processing"] for slot in json.loads(fetch(self.port, "GET", "/slots")[2]))

    def counter(self, name: str) -> float:
        text = fetch(self.port, "GET", "/metrics")[2].decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"llamacpp:{name} "))


@pytest.fixture(scope="session")
def llama(real_engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Llama]]:
    """`llama(gguf, "-np", "2")`: a llama-server that answers."""
    running: list[subprocess.Popen[bytes]] = []

    def start(gguf: Path, *flags: str) -> Llama:
        port = free_port()
        argv = [str(real_engine_dir / "llama-server"), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
        argv += ["-c", "2048", "--metrics", "--no-ui", "--offline", "--sse-ping-interval", "2", "--jinja", *flags]
        log = (tmp_path_factory.mktemp("llama") / "log").open("wb")
        process = subprocess.Popen(argv, stdout=log, stderr=log, env={"GGML_NO_BACKTRACE": "1"})
        log.close()
        running.append(process)
        wait_for(lambda: _healthy(port), "llama-server", 60)
        return Llama(port)

    yield start
    for process in running:
        process.kill()
        process.wait()


def _healthy(port: int) -> bool:
    try:
        return fetch(port, "GET", "/health")[0] == 200
    except OSError:
        return False


@pytest.fixture(scope="session")
def front(
    llama: Callable[..., Llama], tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Gateway, Llama]]:
    """The gateway, and the engine behind its model `tiny` (also called `gpt-4o`)."""
    engine = llama(tiny_gguf, "-np", "4")
    with gateway(tmp_path_factory.mktemp("front")) as made:
        tiny = model(replica(engine.port), name="tiny", aliases=("gpt-4o",), endpoints=PATHS)
        other = model(name="other", state="refused", words="no node has room", endpoints=("/v1/chat/completions",))
        made.routes(tiny, other, keys=(RouteKey("ann", DIGEST, ()),), required=True)
        yield made, engine
