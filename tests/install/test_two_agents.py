"""Two agents on one engines_dir: one works, the other says who does, and then takes what the first has proven."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from install_fakes import facts
from install_small import NoPackages

from llmgw.agent.converge import Converge
from llmgw.domain.engines import EngineSpec, EngineState
from llmgw.install.pipeline import Pipeline
from llmgw.install.prove import Prover
from llmgw.install.store import Store
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.providers.registry import Registry
from llmgw.sources import make_source
from llmgw.system.clock import RealClock
from llmgw.system.commands import RealRunner
from llmgw.system.http import Http

ONCE = Path(__file__).resolve().parents[2] / "scripts/chaos_install/install_once.py"
Until = Callable[..., Any]


class Mirror(ThreadingHTTPServer):
    """A mirror that holds an archive back until it is told to go on."""

    def __init__(self, directory: Path) -> None:
        self.go_on, self.asked = threading.Event(), threading.Event()
        self.served: list[str] = []
        mirror = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(directory))

            def do_GET(self) -> None:
                mirror.served.append(self.path)
                if self.path.endswith(".tar.gz"):
                    mirror.asked.set()
                    assert mirror.go_on.wait(60)
                super().do_GET()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def mirror(release_dir: Path) -> Iterator[Mirror]:
    made = Mirror(release_dir)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.go_on.set()
    made.shutdown()
    thread.join()
    made.server_close()


def test_the_second_says_who_is_at_work_and_takes_over_what_was_proven(
    mirror: Mirror, tmp_path: Path, until: Until
) -> None:
    root, address = tmp_path / "engines", f"http://127.0.0.1:{mirror.server_port}/"
    first = subprocess.Popen([sys.executable, ONCE, root, address, "install"], stderr=subprocess.PIPE)
    clock = RealClock()
    with Http(use_proxies=False) as http:
        second = Converge(
            (),
            Registry({"llama.cpp": LlamaCpp()}),  # type: ignore[dict-item]
            Pipeline(
                Store(root, clock),
                lambda text: make_source(text, http),
                lambda *args, **kwargs: pytest.fail("the second agent fetches nothing"),  # type: ignore[arg-type]
                NoPackages(),
                Prover(RealRunner(), http, clock),
                clock,
            ),
            lambda probe, *, quick: pytest.fail("nothing is named"),  # type: ignore[arg-type]
            facts,
            frozenset,
            clock,
            lambda: None,
        )
        try:
            assert mirror.asked.wait(30), "the first agent holds the lock and fetches"
            second.start()
            second.set_desired((EngineSpec("llama.cpp", "b1", sources=(address,)),))
            words = until(lambda: next((s.words for s in second.statuses() if s.state is EngineState.FAILED), ""), 30)
            assert words.startswith(
                "failed: another agent installs engines into the same directory: "
                f"`{root}/.lock` is held by llmgw agent (pid {first.pid})"
            )
            assert "stop the other one, or give this one its own directory" in words
            assert "; next try at " in words
            mirror.go_on.set()
            assert first.wait(60) == 0
            second.recheck_now()
            until(lambda: second.statuses()[0].state is EngineState.READY, 30, "ready without an installation")
        finally:
            second.stop()
            first.kill()
            first.communicate()
    assert sum(path.endswith(".tar.gz") for path in mirror.served) == 1
