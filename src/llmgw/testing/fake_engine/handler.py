"""The fake engine's HTTP."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import select
import socket
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from llmgw.testing.fake_engine.core import ClientGoneError, Engine, crash, log

_BODY_LIMIT = 64 << 20
_GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


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
            self.wfile.write(_head(200, len(text), "text/plain; version=0.0.4") + text.encode())
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
                end = _refusal(self.engine.args.answer_status, "failing as told", "server_error")
            self.wfile.write(end)
        else:
            try:
                with self.engine.one_request(path, dict(self.headers), body), self._slot():
                    end = self._generate(path, body)
                # the slot is free when the client learns of the end, as a real engine's is
                self.wfile.write(end)
            except (ClientGoneError, OSError):
                self.close_connection = True

    # -- answers

    def _generate(self, path: str, body: dict[str, Any]) -> bytes:
        """Answers; returns the last bytes of a stream, or the whole of an answer that is none."""
        if path == "/v1/embeddings":
            return self._embeddings(body)
        wanted = body.get("max_tokens") or body.get("max_completion_tokens")
        count = wanted if isinstance(wanted, int) and wanted > 0 else self.engine.args.tokens
        if body.get("stream"):
            self._stream(path, body, count)
            return b"0\r\n\r\n"
        return self._whole(path, body, count)

    def _whole(self, path: str, body: dict[str, Any], count: int) -> bytes:
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
        return _packed(200, answer)

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
            if self.engine.args.log_tokens:
                log(f"sent {token}")
        chunk({}, "", "length")
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            self._event({**base, "choices": [], **_usage(body, count, began)})
        self._chunk(b"data: [DONE]\n\n")

    def _embeddings(self, body: dict[str, Any]) -> bytes:
        given = body.get("input", "")
        texts = given if isinstance(given, list) else [given]
        data = [
            {"object": "embedding", "index": i, "embedding": [len(str(text)) / 100, *([0.125] * 7)]}
            for i, text in enumerate(texts)
        ]
        words = sum(len(str(text).split()) for text in texts)
        usage = {"prompt_tokens": words, "total_tokens": words}
        return _packed(200, {"object": "list", "model": self.engine.args.alias, "data": data, "usage": usage})

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
        self.wfile.write(_refusal(status, message, kind))

    def _json(self, status: int, value: Any) -> None:
        self.wfile.write(_packed(status, value))

    def _event(self, value: Any) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def _refusal(status: int, message: str, kind: str) -> bytes:
    return _packed(status, {"error": {"code": status, "message": message, "type": kind}})


def _packed(status: int, value: Any) -> bytes:
    data = json.dumps(value).encode()
    return _head(status, len(data), "application/json") + data


def _head(status: int, length: int, kind: str) -> bytes:
    phrase = http.client.responses.get(status, "Unknown")
    lines = (f"HTTP/1.1 {status} {phrase}", "Server: fake-engine", f"Content-Type: {kind}", f"Content-Length: {length}")
    return "\r\n".join((*lines, "", "")).encode()


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
