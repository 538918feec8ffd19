#!/usr/bin/env python3
"""One installation, replacement or removal, to be killed by crash_points.py: the agent's own pipeline, nothing faked.

install_once.py ENGINES_DIR RELEASE_DIR {install|remove}
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from pathlib import Path

from llmgw.domain.engines import EngineSpec
from llmgw.domain.facts import CpuFacts, Finding, MemoryFacts, NodeFacts, NvidiaFacts, OsFacts, Truth
from llmgw.install.packages import NodePackages
from llmgw.install.pipeline import Pipeline
from llmgw.install.prove import Prover
from llmgw.install.store import Store
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.sources import fetch_asset, make_source
from llmgw.system.clock import RealClock
from llmgw.system.commands import RealRunner
from llmgw.system.http import Http

NAME, VERSION = "llama.cpp", "b1"


def facts() -> NodeFacts:
    """This machine, as far as the choice of a CPU build asks."""
    family, libc = "debian", platform.libc_ver()[1] or None
    return NodeFacts(
        hostname=platform.node(),
        boot_id="",
        os=OsFacts(family, "", platform.system(), family, os.uname().release, libc, None),
        cpu=CpuFacts(platform.machine(), os.cpu_count() or 1),
        memory=MemoryFacts(1 << 30),
        nvidia=NvidiaFacts(Finding(Truth.NO, "no NVIDIA driver is loaded")),
        gpus=(),
    )


def pipeline(root: Path, http: Http) -> Pipeline:
    """The agent's pipeline over a directory."""
    clock, runner = RealClock(), RealRunner()

    def fetch(asset, dest_dir, *, progress, stop):  # type: ignore[no-untyped-def]
        return fetch_asset(asset, dest_dir, http, progress=progress, stop=stop)

    return Pipeline(
        Store(root, clock),
        lambda text: make_source(text, http),
        fetch,
        NodePackages(runner, clock),
        Prover(runner, http, clock),
        clock,
    )


def main() -> None:
    """Do the one thing."""
    root, release, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    with Http(use_proxies=False) as http:
        made = pipeline(root, http)
        if what == "remove":
            for record in made.records():
                made.collect(made.store.engine(record))
            return
        source = release if "://" in release else f"file://{release}"
        spec = EngineSpec(NAME, VERSION, sources=(source,))
        made.install(spec, LlamaCpp(), facts(), lambda *_: None, threading.Event())


if __name__ == "__main__":
    main()
