"""The real listener in a process of its own, so that its memory and threads can be measured from outside.

As a program: `python -m wire_lib.server DIRECTORY` makes a CA there, listens, prints `{"port", "plain_port"}`, and ends
when its standard input does. Faults go to DIRECTORY/log.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

HERE = Path(__file__).resolve().parent.parent


class Sink:
    """A fleet that forgets."""

    def admit(self, node_id: str, hello: Any, address: str, agent: Any) -> None: ...
    def certified(self, node_id: str, certificate: Any) -> None: ...
    def reported(self, node_id: str, report: Any) -> None: ...
    def left(self, node_id: str, instance_id: str, words: str) -> None: ...


def serve(directory: Path) -> None:
    from llmgw.pki import authority
    from llmgw.server.listener import Listener
    from llmgw.system.clock import RealClock
    from llmgw.wire.conn import LinkLimits
    from llmgw.wire.tls import TlsFiles

    logging.basicConfig(filename=directory / "log", level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    pki = directory / "pki"
    authority.init_ca(pki, now=time.time())
    made = authority.issue_server(pki, "server", ["127.0.0.1"], now=time.time())
    tls = TlsFiles(str(made.ca), str(made.cert), str(made.key))
    given: dict[str, Any] = {"sink": Sink(), "clock": RealClock(), "server_id": "s", "epoch": 1}
    given |= {"heartbeat_interval_s": 5.0, "limits": LinkLimits(per_address=4096)}
    listeners = [Listener("127.0.0.1", 0, tls=each, **given) for each in (tls, None)]
    for each in listeners:
        each.start()
    sys.stdout.write(json.dumps({"port": listeners[0].port, "plain_port": listeners[1].port}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for each in listeners:
        each.stop()


@frozen
class Server:
    """A running one."""

    directory: Path
    pid: int
    port: int
    plain_port: int

    @property
    def rss_bytes(self) -> int:
        return _status(self.pid, "VmRSS") * 1024

    @property
    def threads(self) -> int:
        return _status(self.pid, "Threads")

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def cpu_s(self) -> float:
        parts = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")

    def faults(self) -> list[str]:
        """Lines of tracebacks and faults in its log."""
        text = (self.directory / "log").read_text(errors="replace")
        return [line for line in text.splitlines() if "Traceback" in line or "fault" in line]


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(name)


@contextmanager
def running(directory: Path) -> Iterator[Server]:
    """Start one; ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "wire_lib.server", str(directory)],
        cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = json.loads(process.stdout.readline())
        yield Server(directory, process.pid, said["port"], said["plain_port"])
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
