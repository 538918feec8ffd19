"""A gateway with keys in front of a real llama-server."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmgw.domain.routing import RouteKey
from llmgw.providers.llamacpp import LlamaCpp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gateway"))
from gateway_fakes import Gateway, gateway, model, replica
from real_engines import Llama, end, start_llama

KEY = "sk-llmgw-clients-0123456789abcdef"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
PATHS = LlamaCpp.capabilities.endpoints


@pytest.fixture(scope="session")
def llama(real_engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Llama]]:
    """`llama(gguf, "-np", "2")`: a llama-server that answers."""
    running: list[subprocess.Popen[bytes]] = []

    def start(gguf: Path, *flags: str) -> Llama:
        log = tmp_path_factory.mktemp("llama") / "log"
        process, made = start_llama(real_engine_dir, gguf, log, "-c", "2048", "--jinja", *flags)
        running.append(process)
        return made

    yield start
    end(running)


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
