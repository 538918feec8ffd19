"""Real llama-servers, started and asked as the tests and `scripts/usage_gateway` need them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from gateway_fakes import fetch, free_port, wait_for


@frozen
class Llama:
    """A real engine."""

    port: int

    def busy(self) -> int:
        """Slots at work, as the engine itself says."""
        return sum(slot["is_processing"] for slot in json.loads(fetch(self.port, "GET", "/slots")[2]))

    def counter(self, *names: str) -> int:
        """The sum of its own Prometheus counters of these names."""
        text = fetch(self.port, "GET", "/metrics")[2].decode()
        wanted = {f"llamacpp:{name}" for name in names}
        found = [line.split() for line in text.splitlines() if line.split(" ")[0] in wanted]
        assert {line[0] for line in found} == wanted, text
        return sum(int(float(line[1])) for line in found)

    def prompt(self) -> int:
        """Prompt tokens so far: those it read, and those it had in its cache."""
        return self.counter("prompt_tokens_total", "prompt_tokens_cached_total")

    def predicted(self) -> int:
        """Tokens it has made so far."""
        return self.counter("tokens_predicted_total")


def start_llama(engine_dir: Path, gguf: Path, log_path: Path, *flags: str) -> tuple[subprocess.Popen[bytes], Llama]:
    """A llama-server that answers; the caller ends the process."""
    port = free_port()
    argv = [str(engine_dir / "llama-server"), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--metrics", "--no-ui", "--offline", "--sse-ping-interval", "2", *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env={"GGML_NO_BACKTRACE": "1"})
    try:
        wait_for(lambda: _healthy(process, port), "llama-server", 60)
    except BaseException:
        end([process])
        raise
    return process, Llama(port)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill them all, then wait for each."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _healthy(process: subprocess.Popen[bytes], port: int) -> bool:
    assert process.poll() is None, f"llama-server ended with {process.returncode}"
    try:
        return fetch(port, "GET", "/health")[0] == 200
    except OSError:
        return False
