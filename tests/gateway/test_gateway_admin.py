"""What is not the gateway's own is relayed to the admin socket as it is."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvicorn
from gateway_fakes import Gateway, gateway, read_all, read_until, wait_for
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route


class Admin:
    """A real uvicorn on a unix socket in a thread."""

    def __init__(self, path: Path) -> None:
        self.go_on = threading.Event()
        self.gone = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        routes = [
            Route("/api/v1/events", self.events),
            Route("/api/v1/redirect", lambda _: RedirectResponse("/login")),
            Route("/api/v1/empty", lambda _: Response(status_code=204)),
            Route("/{rest:path}", self.echo, methods=["GET", "POST", "PUT", "DELETE", "HEAD"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        wait_for(lambda: self._server.started, "uvicorn")

    async def echo(self, request: Request) -> Response:
        body = await request.body()
        seen = {
            "method": request.method,
            "url": str(request.url),
            "raw": request.scope["raw_path"].decode(),
            "headers": request.headers.items(),
            "body": len(body),
        }
        answer = JSONResponse(seen, headers={"X-Page": "1", "Connection": "X-Secret-Hop", "X-Secret-Hop": "1"})
        answer.set_cookie("session", "abc")
        return answer

    async def events(self, request: Request) -> Response:
        async def make() -> AsyncIterator[bytes]:
            try:
                yield b"data: one\n\n"
                while not self.go_on.is_set():
                    await asyncio.sleep(0.01)
                yield b"data: two\n\n"
                while not await request.is_disconnected():
                    await asyncio.sleep(0.01)
            finally:
                self.gone.set()

        return StreamingResponse(make(), media_type="text/event-stream")

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self._socket.close()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Admin]]:
    with gateway(tmp_path_factory.mktemp("admin")) as made:
        admin = Admin(made.admin_path)
        try:
            yield made, admin
        finally:
            admin.close()


def test_a_request_is_relayed_with_its_host_and_the_clients_address(both: tuple[Gateway, Admin]):
    headers = {
        "Host": "cluster.example:8080",
        "Authorization": "Bearer admin-token",
        "Cookie": "session=abc",
        "X-Forwarded-For": "6.6.6.6",
        "X-Forwarded-Host": "evil",
        "Connection": "X-Drop",
        "X-Drop": "1",
        "X-Keep": "1",
        "TE": "trailers",
    }
    status, got, body = both[0].fetch("PUT", "/api/v1/profiles/a%2Fb?x=1&y=%20", b"z" * 70_000, headers)
    seen = json.loads(body)
    sent = dict(seen["headers"])
    assert status == 200
    assert seen["method"] == "PUT"
    assert seen["body"] == 70_000
    assert seen["url"].startswith("http://cluster.example:8080/")
    assert seen["url"].endswith("?x=1&y=%20")
    assert seen["raw"] == "/api/v1/profiles/a%2Fb"
    assert (sent["authorization"], sent["cookie"], sent["x-keep"]) == ("Bearer admin-token", "session=abc", "1")
    assert (sent["x-forwarded-for"], sent["x-forwarded-proto"]) == ("127.0.0.1", "http")
    assert not {"x-drop", "te", "x-forwarded-host"} & set(sent)
    assert got["x-page"] == "1"
    assert got["set-cookie"].startswith("session=abc")
    assert "x-secret-hop" not in got


@pytest.mark.parametrize(
    ("path", "status"), [("/", 200), ("/login", 200), ("/page/x.js", 200), ("/api/v1/redirect", 307)]
)
def test_every_other_path_goes_to_the_control_process(both: tuple[Gateway, Admin], path: str, status: int):
    got, headers, _ = both[0].fetch("GET", path)
    assert got == status
    assert headers.get("location") == ("/login" if status == 307 else None)


def test_answers_without_a_body_keep_the_connection_in_step(both: tuple[Gateway, Admin]):
    with both[0].connect() as sock:
        for line in ("HEAD /", "GET /api/v1/empty", "HEAD /healthz", "GET /healthz"):
            sock.sendall(f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        sock.sendall(b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        got = read_all(sock)
    assert got.count(b"HTTP/1.1 ") == 5
    assert got.count(b"HTTP/1.1 204") == 1
    assert json.loads(got.rpartition(b"\r\n\r\n")[2])["url"] == "http://x/last"


def test_events_stream_and_stop_when_the_client_goes(both: tuple[Gateway, Admin]):
    made, admin = both
    with made.connect() as sock:
        sock.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        head = read_until(sock, b"data: one\n\n")
        assert b"text/event-stream" in head
        assert b"x-accel-buffering: no" in head
        admin.go_on.set()
        read_until(sock, b"data: two\n\n")
        assert not admin.gone.is_set()
    assert admin.gone.wait(3)


def test_without_the_control_process_it_says_so_and_models_go_on(tmp_path: Path):
    with gateway(tmp_path) as made:
        status, headers, body = made.fetch("GET", "/api/v1/nodes")
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "control-away")
        assert "models go on being served" in error["message"]
        assert int(headers["retry-after"]) > 0
        status, headers, body = made.fetch("GET", "/")
        assert status == 503
        assert headers["content-type"].startswith("text/plain")
        assert b"control process is away" in body


def test_a_control_process_that_breaks_off_is_a_502(tmp_path: Path):
    with gateway(tmp_path) as made:
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(made.admin_path))
        server.listen()

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        with server:
            assert made.fetch("GET", "/api/v1/nodes")[0] == 502
            thread.join(5)
