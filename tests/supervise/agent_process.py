"""An agent as a process of its own, to be killed: runs a supervisor with one replica until it dies.

Usage: agent_process.py ROOT FLAGS…; prints the engine's pid and port as JSON once it is ready.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from supervise_fakes import Bench, spec, wait_for

from llmgw.domain.replicas import ReplicaState


def main() -> None:
    bench = Bench(Path(sys.argv[1]))
    supervisor = bench.supervisor(*sys.argv[2:])
    supervisor.set_desired([spec(bench)], 1)
    status = wait_for(supervisor, ReplicaState.READY)
    print(json.dumps({"pid": status.pid, "port": status.port}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
