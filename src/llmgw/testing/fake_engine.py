"""A fake engine: a real process that speaks just enough HTTP to stand in for an inference server, and fails on demand.

Run it as `python -m llmgw.testing.fake_engine …` or by its path; it needs nothing outside the standard library.

Flags of an ordinary engine:
    --host, --port            where to listen (default 127.0.0.1, required port)
    --alias NAME              model name in answers and in `/v1/models`
    --model PATH              must be a readable file, else the last words of an engine and exit 1
    --api-key-file FILE       requests need `Authorization: Bearer KEY`, except `/health` and `/fake/*`
    --slots N                 requests generated in parallel, others wait (default 4)
    --tokens N                tokens per answer when the request has no `max_tokens` (default 8)
    --token-interval S        seconds between tokens (default 0)
    --load-seconds S          listens at once and answers 503 `Loading model` this long, logging progress
    --quiet-load              does not log while loading

Failure flags:
    --crash-at-start CODE     prints its last words and exits with CODE; negative: kills itself by that signal
    --crash-after-tokens N    ends in the middle of an answer after N tokens over its whole life
    --crash-code CODE         how that ends (default 1; negative: a signal)
    --answer-status N         generation requests get this status and an OpenAI-shaped error
    --hang-health             accepts `/health` and never answers
    --never-bind              runs and never listens
    --ignore-term             SIGTERM is logged and ignored
    --flood N                 logs N numbered lines (`flood 0`, `flood 1`, …) per second
    --grandchild              starts a child in a session of its own that lives until killed

The tokens are numbered: `t0 t1 t2 …` (each chunk `"t<i> "`), so a reader can prove that none is missing or doubled.
`stream: true` ends with a finish chunk, with `stream_options.include_usage` a chunk of `usage` and `timings`, then
`data: [DONE]`. Endpoints: `/health`, `/props`, `/v1/models`, `/metrics`, `/v1/chat/completions`, `/v1/completions`,
`/v1/embeddings`.

`GET /fake/stats` answers `{pid, requests: {path: n}, in_flight, max_in_flight, tokens, finished, client_disconnects,
last: {path, headers, body}}`. `POST /fake/set` with JSON changes it while it runs: `hang_health`, `answer_status`,
`token_interval`, `loading` (true: 503 again), `crash` (exit code, at once).

SIGTERM: stops accepting, exits 0 when the open requests are done; a second one exits 1 at once.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

_BODY_LIMIT = 64 << 20
_GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


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


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: an engine logs what it does, not every request."""

    def do_GET(self) -> None:
        path = self._count()
        if path in ("/health", "/v1/health"):
            self._health()
        elif path == "/fake/stats":
            self._json(200, self.engine.stats())
        elif not self._allowed():
            self._error(401, "Invalid API Key", "authentication_error")
        elif self.engine.is_loading():
            self._loading()
        elif path == "/props":
            self._json(200, {"model_alias": self.engine.args.alias, "total_slots": self.engine.args.slots})
        elif path == "/v1/models":
            entry = {"id": self.engine.args.alias, "object": "model", "created": 0, "owned_by": "fake"}
            self._json(200, {"object": "list", "data": [entry]})
        elif path == "/metrics":
            text = f"# TYPE fake:tokens_predicted_total counter\nfake:tokens_predicted_total {self.engine.tokens}\n"
            self._send(200, text.encode(), "text/plain; version=0.0.4")
        else:
            self._error(404, "File Not Found", "not_found_error")

    def do_POST(self) -> None:
        path = self._count()
        try:
            body = json.loads(self._body() or b"{}")
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            self._error(400, f"cannot parse the body: {error}", "invalid_request_error")
            return
        if path == "/fake/set":
            self._set(body)
        elif not self._allowed():
            self._error(401, "Invalid API Key", "authentication_error")
        elif self.engine.is_loading():
            self._loading()
        elif path not in _GENERATE:
            self._error(404, "File Not Found", "not_found_error")
        elif self.engine.args.answer_status:
            with self.engine.one_request(path, dict(self.headers), body):
                self._error(self.engine.args.answer_status, "failing as told", "server_error")
        else:
            try:
                with self.engine.one_request(path, dict(self.headers), body), self._slot():
                    self._generate(path, body)
            except (ClientGoneError, OSError):
                self.close_connection = True

    # -- answers

    def _generate(self, path: str, body: dict[str, Any]) -> None:
        if path == "/v1/embeddings":
            self._embeddings(body)
            return
        wanted = body.get("max_tokens") or body.get("max_completion_tokens")
        count = wanted if isinstance(wanted, int) and wanted > 0 else self.engine.args.tokens
        if body.get("stream"):
            self._stream(path, body, count)
        else:
            self._whole(path, body, count)

    def _whole(self, path: str, body: dict[str, Any], count: int) -> None:
        began = time.monotonic()
        text = "".join(self._tokens(count))
        chat = path == "/v1/chat/completions"
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        answer = {
            "id": "fake-0",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.engine.args.alias,
            "choices": [{"index": 0, "finish_reason": "length", **said}],
            **_usage(body, count, began),
        }
        self._json(200, answer)

    def _stream(self, path: str, body: dict[str, Any], count: int) -> None:
        began = time.monotonic()
        chat = path == "/v1/chat/completions"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        base = {
            "id": "fake-0",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.engine.args.alias,
        }

        def chunk(delta: dict[str, Any], text: str, finish: str | None) -> None:
            part = {"delta": delta} if chat else {"text": text}
            self._event({**base, "choices": [{"index": 0, "finish_reason": finish, **part}]})

        if chat:
            chunk({"role": "assistant", "content": None}, "", None)
        for token in self._tokens(count):
            chunk({"content": token}, token, None)
        chunk({}, "", "length")
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            self._event({**base, "choices": [], **_usage(body, count, began)})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _embeddings(self, body: dict[str, Any]) -> None:
        given = body.get("input", "")
        texts = given if isinstance(given, list) else [given]
        data = [
            {"object": "embedding", "index": i, "embedding": [len(str(text)) / 100, *([0.125] * 7)]}
            for i, text in enumerate(texts)
        ]
        words = sum(len(str(text).split()) for text in texts)
        usage = {"prompt_tokens": words, "total_tokens": words}
        self._json(200, {"object": "list", "model": self.engine.args.alias, "data": data, "usage": usage})

    def _tokens(self, count: int) -> Iterator[str]:
        for i in range(count):
            self._pause(self.engine.args.token_interval if i else 0.0)
            self.engine.count_token()
            yield f"t{i} "

    def _pause(self, seconds: float) -> None:
        """Waits, and notices a client that has gone meanwhile."""
        readable, _, _ = select.select([self.connection], [], [], seconds)
        if readable:
            try:
                gone = self.connection.recv(1, socket.MSG_PEEK) == b""
            except OSError:
                gone = True
            if gone:
                raise ClientGoneError
            time.sleep(seconds)

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        while not self.engine.slots.acquire(timeout=0.05):
            self._pause(0.0)
        try:
            yield
        finally:
            self.engine.slots.release()

    def _health(self) -> None:
        while self.engine.args.hang_health:
            time.sleep(0.05)
        if self.engine.is_loading():
            self._loading()
        else:
            self._json(200, {"status": "ok"})

    def _set(self, body: dict[str, Any]) -> None:
        for name in ("hang_health", "answer_status", "token_interval"):
            if name in body:
                setattr(self.engine.args, name, body[name])
        if "loading" in body:
            self.engine.loading = bool(body["loading"])
        self._json(200, {"ok": True})
        if "crash" in body:
            crash(int(body["crash"]), f"fake engine: crashing with {body['crash']} as told")

    # -- the plain of HTTP

    def _count(self) -> str:
        path = self.path.split("?", 1)[0]
        with self.engine.lock:
            self.engine.requests[path] += 1
        return path

    def _allowed(self) -> bool:
        if not self.engine.key:
            return True
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.engine.key.encode())

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            parts: list[bytes] = []
            while size := int(self.rfile.readline(20).split(b";")[0], 16):
                if size > _BODY_LIMIT:
                    raise ValueError("too large")
                parts.append(self.rfile.read(size))
                self.rfile.readline(3)
            self.rfile.readline(3)
            return b"".join(parts)
        length = int(self.headers.get("Content-Length", "0"))
        if not 0 <= length <= _BODY_LIMIT:
            raise ValueError("too large")
        return self.rfile.read(length)

    def _loading(self) -> None:
        self._error(503, "Loading model", "unavailable_error")

    def _error(self, status: int, message: str, kind: str) -> None:
        self._json(status, {"error": {"code": status, "message": message, "type": kind}})

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _event(self, value: Any) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def _usage(body: dict[str, Any], count: int, began: float) -> dict[str, Any]:
    messages = body.get("messages")
    said = " ".join(str(m.get("content", "")) for m in messages) if isinstance(messages, list) else body.get("prompt")
    prompt = len(str(said or "").split())
    ms = (time.monotonic() - began) * 1000
    return {
        "usage": {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count},
        "timings": {"prompt_n": prompt, "predicted_n": count, "predicted_ms": ms},
    }


class Server(ThreadingHTTPServer):
    """Daemon threads, a long backlog, and no traceback when a client vanishes."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log(f"handler failed: {error!r}")


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
        time.sleep(0.01)


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


if __name__ == "__main__":
    sys.exit(main())
