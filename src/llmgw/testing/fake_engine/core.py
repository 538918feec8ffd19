"""What the fake engine's handlers share: counters, its log, its ways to end."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


class Engine:
    """What the handlers share; counters only change under `lock`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lock = threading.Lock()
        self.slots = threading.Semaphore(args.slots)
        self.started = time.monotonic()
        self.loading = False
        self.stopping = False
        self.requests: Counter[str] = Counter()
        self.in_flight = self.max_in_flight = self.tokens = self.finished = self.client_disconnects = 0
        self.last: dict[str, Any] = {}
        self.key = Path(args.api_key_file).read_text().strip() if args.api_key_file else ""

    def is_loading(self) -> bool:
        return self.loading or time.monotonic() - self.started < self.args.load_seconds

    def stats(self) -> dict[str, Any]:
        with self.lock:
            return {
                "pid": os.getpid(),
                "requests": dict(self.requests),
                "in_flight": self.in_flight,
                "max_in_flight": self.max_in_flight,
                "tokens": self.tokens,
                "finished": self.finished,
                "client_disconnects": self.client_disconnects,
                "last": self.last,
            }

    @contextlib.contextmanager
    def one_request(self, path: str, headers: dict[str, str], body: Any) -> Iterator[None]:
        """Counts a generation request from its arrival to its end."""
        with self.lock:
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            self.last = {"path": path, "headers": headers, "body": body}
        try:
            yield
            with self.lock:
                self.finished += 1
        except (ClientGoneError, OSError):
            log("client disconnected")
            with self.lock:
                self.client_disconnects += 1
            raise
        finally:
            with self.lock:
                self.in_flight -= 1

    def count_token(self) -> None:
        """Counts one token, or ends the process when its time has come."""
        with self.lock:
            if self.args.crash_after_tokens is not None and self.tokens >= self.args.crash_after_tokens:
                crash(self.args.crash_code, f"fake engine: crashing after {self.tokens} tokens")
            self.tokens += 1


def log(text: str) -> None:
    """One line to stderr in one write, as an engine's log."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def crash(code: int, words: str) -> None:
    """Ends the process at once: `code` is an exit code, or a signal when negative."""
    log(words)
    if code < 0:
        with contextlib.suppress(ValueError, OSError):  # only the main thread may, and not for every signal
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(5)
    os._exit(code)
