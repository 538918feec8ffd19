"""Servers for tests, real sockets on loopback: plain files with every fault a network has, and one that behaves like
GitHub's API together with its host for release files.

FileServer(host="127.0.0.1", tls=None)      context manager; `.url` is its base; host may be "localhost" to be "another"
    .put("/path", data, **faults) -> Served   serve bytes there; change the returned object at any time
    .url_of("/path")                        full address
    .requests                               list of Asked(method, path, headers), in order
    Served faults (all optional):
        etag="\"…\""                        default: strong, from the bytes; "" sends none
        statuses=[503, 503]                 answered first, one each, with `retry_after` when set
        headers={}                          added to every answer
        content_type                        default application/octet-stream
        redirect="https://…"                302 with that Location
        cuts=[1000, …]                      the n-th answer is broken off after that many body bytes
        on_cut=callable                     called at each cut (to change the file between two attempts)
        ignore_range=True                   answers 200 with everything
        shift_range=7                       lies: the 206 begins that many bytes too early
        no_length=True                      no Content-Length; the end of the connection is the end of the file
        endless=True                        goes on for ever after the data (implies no_length)
        drip=(count, seconds)               that many bytes at a time
        silent=True                         accepts the request and never answers
        hold=threading.Event()              half of the body, then waits for the event

GithubServer(tls=None)                      context manager; API on 127.0.0.1, files on localhost (another port)
    .api                                    value for `LLMGW_GITHUB_API`
    .release(repo, tag, {name: bytes}, digests=True, states={name: "starter"}, broken_digests={name: hex})
        -> {name: Served}                   the Served is the file's: give it faults
    .pointer(repo, "v0.3.0", "b10621")      a release with `nightly-tag.txt` only
    .rate_limit(status=403, reset_at=epoch, retry_after=None)   every API answer from now on; .rate_limit(None) ends it
    .api_statuses = [502]                   answered first by the API
    .files, .api_server                     the two FileServers; both have `.requests`
    A file's address is on the API's server and answers 302 to `files` with a signature in the query, valid once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Served:
    data: bytes = b""
    etag: str | None = None
    statuses: list[int] = field(default_factory=list)
    retry_after: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"
    redirect: str | None = None
    cuts: list[int] = field(default_factory=list)
    on_cut: Callable[[], None] | None = None
    ignore_range: bool = False
    shift_range: int = 0
    no_length: bool = False
    endless: bool = False
    drip: tuple[int, float] | None = None
    silent: bool = False
    hold: threading.Event | None = None

    def tag(self) -> str:
        return f'"{hashlib.sha256(self.data).hexdigest()[:16]}"' if self.etag is None else self.etag


class _Quiet(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 32

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is what half of these tests are about."""


class FileServer:
    def __init__(self, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.host = host
        self.tls = tls
        self.files: dict[str, Served] = {}
        self.requests: list[Asked] = []
        self.answer: Callable[[Asked], Served | None] | None = None
        self.closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def setup(self) -> None:
                if outer.tls is not None:
                    self.request.settimeout(10)
                    self.request = outer.tls.wrap_socket(self.request, server_side=True)
                super().setup()
                outer._open.add(self.connection)

            def finish(self) -> None:
                outer._open.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()
                if outer.tls is not None:
                    self.request.close()

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError, ssl.SSLError):
                    outer._serve(self)

            do_POST = do_HEAD = do_GET

        self._open: set[Any] = set()
        self._server = _Quiet(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="file-server")

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    def url_of(self, path: str) -> str:
        return self.url + path

    def put(self, path: str, data: bytes = b"", **faults: Any) -> Served:
        self.files[path] = Served(data, **faults)
        return self.files[path]

    def __enter__(self) -> FileServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(2)
        self._server.server_close()
        self._thread.join()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length") or 0)
        if length:
            handler.rfile.read(length)
        asked = Asked(handler.command, handler.path, {k.lower(): v for k, v in handler.headers.items()})
        self.requests.append(asked)
        served = self.answer(asked) if self.answer else None
        if served is None:
            served = self.files.get(handler.path) or self.files.get(urlsplit(handler.path).path)
        if served is None:
            self._whole(handler, 404, b"not here\n", {"Content-Type": "text/plain"})
            return
        if served.silent:
            self.closing.wait(60)
            handler.close_connection = True
            return
        if served.statuses:
            extra = {} if served.retry_after is None else {"Retry-After": served.retry_after}
            self._whole(handler, served.statuses.pop(0), b"", {**served.headers, **extra})
            return
        if served.redirect is not None:
            self._whole(handler, 302, b"moved", {"Location": served.redirect, **served.headers})
            return
        self._file(handler, served, asked)

    def _whole(self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def _file(self, handler: BaseHTTPRequestHandler, served: Served, asked: Asked) -> None:
        data, start, status, end = served.data, 0, 200, len(served.data)
        wanted = asked.headers.get("range", "")
        fresh = asked.headers.get("if-range", served.tag()) == served.tag()
        if wanted and fresh and not served.ignore_range:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(data)) if last else len(data)
            if start >= len(data):
                self._whole(handler, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            start, status = max(0, start - served.shift_range), 206
        handler.send_response(status)
        if status == 206:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        if not served.no_length and not served.endless:
            handler.send_header("Content-Length", str(end - start))
        else:
            handler.send_header("Connection", "close")
        if served.tag():
            handler.send_header("ETag", served.tag())
        handler.send_header("Content-Type", served.content_type)
        for name, value in served.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        body = data[start:end]
        if served.cuts:
            handler.wfile.write(body[: served.cuts.pop(0)])
            handler.wfile.flush()
            handler.close_connection = True
            if served.on_cut is not None:
                served.on_cut()
            return
        self._body(handler, served, body)

    def _body(self, handler: BaseHTTPRequestHandler, served: Served, body: bytes) -> None:
        if served.hold is not None:
            half = len(body) // 2
            handler.wfile.write(body[:half])
            handler.wfile.flush()
            hold = served.hold
            while not hold.wait(0.05) and not self.closing.is_set():
                pass
            body = body[half:]
        if served.drip is None:
            handler.wfile.write(body)
        else:
            count, seconds = served.drip
            for at in range(0, len(body), count):
                handler.wfile.write(body[at : at + count])
                handler.wfile.flush()
                if self.closing.wait(seconds):
                    break
        while served.endless and not self.closing.is_set():
            handler.wfile.write(b"x" * 65536)
        if served.no_length or served.endless:
            handler.close_connection = True


class GithubServer:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.api_server = FileServer("127.0.0.1", tls)
        self.files = FileServer("localhost", tls)
        self.api_server.answer = self._answer
        self.files.answer = self._signed
        self.api_statuses: list[int] = []
        self._limit: dict[str, str] | None = None
        self._limit_status = 403
        self._releases: dict[str, dict[str, Any]] = {}
        self._blobs: dict[str, Served] = {}
        self._signatures: set[str] = set()

    @property
    def api(self) -> str:
        return self.api_server.url

    def __enter__(self) -> GithubServer:
        self.api_server.__enter__()
        self.files.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.files.__exit__()
        self.api_server.__exit__()

    def release(
        self,
        repo: str,
        tag: str,
        files: dict[str, bytes],
        *,
        digests: bool = True,
        states: dict[str, str] | None = None,
        broken_digests: dict[str, str] | None = None,
    ) -> dict[str, Served]:
        assets, served = [], {}
        for number, (name, data) in enumerate(files.items()):
            path = f"/{repo}/releases/download/{tag}/{name}"
            served[name] = self._blobs[path] = Served(data)
            digest = (broken_digests or {}).get(name) or hashlib.sha256(data).hexdigest()
            assets.append(
                {
                    "id": 1000 + number,
                    "name": name,
                    "size": len(data),
                    "state": (states or {}).get(name, "uploaded"),
                    "content_type": "application/gzip",
                    "digest": f"sha256:{digest}" if digests else None,
                    "browser_download_url": self.api_server.url_of(path),
                }
            )
        body = {"tag_name": tag, "name": tag, "draft": False, "prerelease": True, "assets": assets}
        self._releases[f"/repos/{repo}/releases/tags/{tag}"] = body
        return served

    def pointer(self, repo: str, tag: str, target: str) -> dict[str, Served]:
        return self.release(repo, tag, {"nightly-tag.txt": f"{target}\n".encode()})

    def rate_limit(
        self, status: int | None = 403, reset_at: float | None = None, retry_after: int | None = None
    ) -> None:
        if status is None:
            self._limit = None
            return
        self._limit_status = status
        self._limit = {"X-RateLimit-Limit": "60", "X-RateLimit-Remaining": "0"}
        if reset_at is not None:
            self._limit["X-RateLimit-Reset"] = str(int(reset_at))
        if retry_after is not None:
            self._limit["Retry-After"] = str(retry_after)

    def _answer(self, asked: Asked) -> Served | None:
        path = urlsplit(asked.path).path
        if path in self._blobs:
            signature = hashlib.sha256(f"{path}{time.monotonic_ns()}".encode()).hexdigest()
            self._signatures.add(signature)
            return Served(redirect=self.files.url_of(f"/blob{path}?sig={signature}&se=soon"))
        if not path.startswith("/repos/"):
            return None
        if self.api_statuses:
            return Served(statuses=[self.api_statuses.pop(0)])
        if self._limit is not None:
            return Served(statuses=[self._limit_status], headers=self._limit)
        release = self._releases.get(path)
        if release is None:
            return Served(statuses=[404])
        return Served(json.dumps(release).encode(), content_type="application/json; charset=utf-8")

    def _signed(self, asked: Asked) -> Served | None:
        parts = urlsplit(asked.path)
        signature = parts.query.partition("sig=")[2].partition("&")[0]
        if not parts.path.startswith("/blob/"):
            return None
        if signature not in self._signatures or "authorization" in asked.headers:
            return Served(statuses=[403])
        self._signatures.discard(signature)
        return self._blobs.get(parts.path.removeprefix("/blob"))
