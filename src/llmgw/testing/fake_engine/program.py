"""The fake engine's command line and its life."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from llmgw.testing.fake_engine.core import Engine, crash, log
from llmgw.testing.fake_engine.handler import Handler, Server


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fake_engine", allow_abbrev=False, description="a fake engine for tests")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", default="fake")
    parser.add_argument("--model", default="")
    parser.add_argument("--api-key-file", default="")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--token-interval", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--quiet-load", action="store_true")
    parser.add_argument("--crash-at-start", type=int, default=None, metavar="CODE")
    parser.add_argument("--crash-after-tokens", type=int, default=None, metavar="N")
    parser.add_argument("--crash-code", type=int, default=1, metavar="CODE")
    parser.add_argument("--answer-status", type=int, default=0, metavar="N")
    parser.add_argument("--hang-health", action="store_true")
    parser.add_argument("--never-bind", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--flood", type=float, default=0.0, metavar="LINES_PER_SECOND")
    parser.add_argument("--burn-cpu", action="store_true")
    parser.add_argument("--log-tokens", action="store_true")
    parser.add_argument("--grandchild", action="store_true")
    return parser.parse_args(argv)


def _start_grandchild() -> None:
    if os.fork():
        return
    os.setsid()
    log(f"grandchild {os.getpid()} in a session of its own")
    while True:
        time.sleep(3600)


def _flood(per_second: float) -> None:
    count, began = 0, time.monotonic()
    while True:
        due = int((time.monotonic() - began) * per_second)
        while count < due:
            log(f"flood {count}")
            count += 1
        time.sleep(max(0.01, min(0.2, 0.5 / per_second)))


def _burn() -> None:
    """About a fifth of a core, as an engine at work on a long prompt."""
    while True:
        until = time.monotonic() + 0.01
        while time.monotonic() < until:
            pass
        time.sleep(0.04)


def _load_noise(engine: Engine) -> None:
    step = 0
    while engine.is_loading():
        log(f"load_tensors: step {step}")
        step += 1
        time.sleep(0.2)
    log("main: model loaded")


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop; returns the exit code."""
    args = _parse(argv)
    terms = 0
    asked_to_stop = threading.Event()

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        nonlocal terms
        terms += 1
        if args.ignore_term:
            log("SIGTERM ignored")
        elif terms > 1:
            log("second SIGTERM: leaving at once")
            os._exit(1)
        else:
            log("SIGTERM: stopping")
            asked_to_stop.set()

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_term)
    log(f"fake engine {os.getpid()} for `{args.alias}`")
    if args.grandchild:
        _start_grandchild()
    if args.crash_at_start is not None:
        crash(args.crash_at_start, f"fake engine: cannot start, leaving with {args.crash_at_start}")
    if args.model and not Path(args.model).is_file():
        crash(1, f"failed to open `{args.model}`: no such file")
    if args.never_bind:
        while not asked_to_stop.wait(0.5):
            pass
        return 0
    engine = Engine(args)
    handler = type("BoundHandler", (Handler,), {"engine": engine})
    try:
        server = Server((args.host, args.port), handler)
    except OSError as error:
        log(f"couldn't bind HTTP server socket, hostname: {args.host}, port: {args.port}: {error.strerror}")
        return 1
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    if args.flood:
        threading.Thread(target=_flood, args=(args.flood,), daemon=True).start()
    if args.burn_cpu:
        threading.Thread(target=_burn, daemon=True).start()
    if args.load_seconds and not args.quiet_load:
        threading.Thread(target=_load_noise, args=(engine,), daemon=True).start()
    log(f"listening on http://{args.host}:{args.port}")
    while not asked_to_stop.wait(0.5):
        pass
    server.shutdown()
    server.server_close()
    while engine.stats()["in_flight"]:
        time.sleep(0.02)
    log("stopped")
    return 0
