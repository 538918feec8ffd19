"""What the gateway's tests stand on: a real gateway process, a control process that speaks the contract, engines."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trustme

from free_ports import free_port
from llmgw.domain.routing import RouteKey, RouteModel, RouteReplica, RouteTable
from llmgw.wire.shapes import to_json

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}; last: {value!r}"
        time.sleep(0.01)


class FakeControl:
    """The control process's end of the control socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hellos: list[dict[str, Any]] = []
        self.stats: list[dict[str, Any]] = []
        self.watched: list[dict[str, Any]] = []
        self.batches: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.line = b""
        self._peers: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._server.bind(str(path))
        self._server.listen(8)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def publish(self, table: RouteTable) -> None:
        with self._lock:
            self.line = json.dumps({"type": "routes", **to_json(table)}).encode() + b"\n"
            peers = list(self._peers)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(self.line)

    def usage(self, name: str, **only: str) -> int:
        """A column of the usage told so far, summed up over the rows that are like `only`."""
        rows = [row for batch in list(self.batches.values()) for row in batch]
        return sum(row[name] for row in rows if all(row[key] == value for key, value in only.items()))

    def send(self, message: dict[str, Any] | bytes) -> None:
        data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
        for peer in self._peers:
            peer.sendall(data)

    def close(self) -> None:
        """Gone as after SIGKILL: the listening socket and every connection."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._lock:
            self._closed = True
            peers = list(self._peers)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as lines:
            try:
                self.hellos.append(json.loads(lines.readline() or b"{}"))
                with self._lock:
                    if self._closed:
                        return
                    self._peers.append(peer)
                    if self.line:
                        peer.sendall(self.line)
                for line in lines:
                    said = json.loads(line)
                    if said["type"] == "usage":
                        self.batches[said["run"], said["batch"]] = said["rows"]
                        peer.sendall(b'{"type":"usage-kept","batch":%d}\n' % said["batch"])
                    elif said["type"] == "requests":
                        self.watched.append(said)
                    else:
                        self.stats.append(said)
            except OSError:
                pass
            with self._lock, contextlib.suppress(ValueError):
                self._peers.remove(peer)


class Engine:
    """The fake engine as a real process."""

    def __init__(self, work: Path, *flags: str, key: str = "", slots: int = 4) -> None:
        self.port = free_port()
        self.key = key
        self.slots = slots
        argv = [sys.executable, "-m", "llmgw.testing.fake_engine", "--port", str(self.port), "--slots", str(slots)]
        if key:
            key_file = work / f"key-{self.port}"
            key_file.write_text(key)
            argv += ["--api-key-file", str(key_file)]
        self.log = (work / f"engine-{self.port}.log").open("wb")
        self.process = subprocess.Popen([*argv, *flags], stdout=self.log, stderr=self.log)
        wait_for(lambda: reachable(self.port), "the engine to listen", 40)

    def stats(self) -> dict[str, Any]:
        return json.loads(fetch(self.port, "GET", "/fake/stats")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.log.close()


class Scripted:
    """An upstream that does with each request exactly what `act(connection, request)` says, then closes."""

    def __init__(self, act: Callable[[socket.socket, bytes], None]) -> None:
        self.requests: list[bytes] = []
        self.ended = threading.Event()
        self.key = ""
        self.slots = 4
        self._act = act
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._threads: list[threading.Thread] = []
        accept = threading.Thread(target=self._accept, daemon=True)
        accept.start()
        self._threads.append(accept)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(20)
            request = read_request(connection)
            if request:
                self.requests.append(request)
                self._act(connection, request)
        self.ended.set()


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def reachable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def fetch(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout: float = 20,
    context: ssl.SSLContext | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own, over TLS with `context`: status, headers in lower case, body."""
    connection: http.client.HTTPConnection
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout, context=context)
    with contextlib.closing(connection):
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        connection.request(method, path, data, headers or ({"Content-Type": "application/json"} if data else {}))
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


def certified(work: Path) -> ssl.SSLContext:
    """Write `cert.pem` and `key.pem` of a front named `gateway`; a client's context that trusts it."""
    authority = trustme.CA()
    cert = authority.issue_cert("gateway", "127.0.0.1")
    cert.cert_chain_pems[0].write_to_path(work / "cert.pem")
    cert.private_key_pem.write_to_path(work / "key.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


class Gateway:
    """A real gateway process with its control and a directory of its own."""

    def __init__(self, work: Path, *flags: str, control: bool = True, secure: bool = False) -> None:
        """`secure`: clients come over TLS; `connect` and all that uses it do too."""
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        self.context = certified(work) if secure else None
        if secure:
            flags = (*flags, "--tls-cert", str(work / "cert.pem"), "--tls-key", str(work / "key.pem"))
        self.control_path, self.admin_path = work / "control.sock", work / "admin.sock"
        self.control = FakeControl(self.control_path) if control else None
        self._seq = 0
        self._closers: list[Callable[[], None]] = []
        self.log_path = work / "gateway.log"
        self._log = self.log_path.open("ab")
        listen = [] if "--listen" in flags else ["--listen", "127.0.0.1:0"]
        argv = ["--control", str(self.control_path), "--admin", str(self.admin_path), *listen, *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmgw", "gateway", *argv],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self.port = 0
        if self.control is not None:
            wait_for(lambda: self.control and self.control.hellos, f"a hello; log: {self.log_path}", 40)
            self.port = int(self.control.hellos[0]["listen"].rpartition(":")[2])

    def engine(self, *flags: str, key: str = "", slots: int = 4) -> Engine:
        engine = Engine(self.work, *flags, key=key, slots=slots)
        self._closers.append(engine.close)
        return engine

    def scripted(self, act: Callable[[socket.socket, bytes], None]) -> Scripted:
        upstream = Scripted(act)
        self._closers.append(upstream.close)
        return upstream

    def routes(self, *models: RouteModel, keys: tuple[RouteKey, ...] = (), required: bool = False) -> None:
        """Publish a snapshot and wait until the gateway goes by it."""
        assert self.control is not None
        self._seq += 1
        self.control.publish(RouteTable(self._seq, models, keys, required))
        wait_for(lambda: self.ready()["routes_seq"] == self._seq, "the snapshot to be taken over")

    def ready(self) -> dict[str, Any]:
        return json.loads(self.fetch("GET", "/readyz")[2])

    def fetch(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 20
    ) -> tuple[int, dict[str, str], bytes]:
        return fetch(self.port, method, path, body, headers, timeout, self.context)

    def chat(self, model: str = "m", timeout: float = 20, **more: Any) -> tuple[int, dict[str, str], bytes]:
        return self.fetch("POST", "/v1/chat/completions", ask(model, **more), timeout=timeout)

    def connect(self) -> socket.socket:
        return self.wrapped(socket.create_connection(("127.0.0.1", self.port), timeout=20))

    def wrapped(self, sock: socket.socket) -> socket.socket:
        """A connected socket as a client uses it."""
        return sock if self.context is None else self.context.wrap_socket(sock, server_hostname="gateway")

    def open_chat(self, model: str = "m", **more: Any) -> socket.socket:
        """Send a chat request and leave the answer to the caller."""
        sock = self.connect()
        sock.sendall(post("/v1/chat/completions", ask(model, **more)))
        return sock

    def metric(self, name: str) -> float:
        text = self.fetch("GET", "/metrics")[2].decode()
        return sum(float(x.rsplit(" ", 1)[1]) for x in text.splitlines() if x.startswith((f"{name} ", f"{name}{{")))

    def log(self) -> str:
        return self.log_path.read_text()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for closer in self._closers:
            closer()
        if self.control is not None:
            self.control.close()
        self._log.close()

    def forget(self) -> None:
        """Close the engines of the last test."""
        while self._closers:
            self._closers.pop()()


@contextlib.contextmanager
def gateway(work: Path, *flags: str, control: bool = True, secure: bool = False) -> Iterator[Gateway]:
    made = Gateway(work, *flags, control=control, secure=secure)
    try:
        yield made
    finally:
        made.close()
    assert "Traceback" not in made.log(), made.log()


def ask(model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


def post(path: str, body: Any, *lines: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: gateway", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*head, *lines, "", ""]).encode() + data


def replica(
    upstream: Engine | Scripted | int,
    name: str = "m#0",
    node: str = "node-a",
    ready: bool = True,
    slots: int | None = None,
) -> RouteReplica:
    port, key = (upstream, "") if isinstance(upstream, int) else (upstream.port, upstream.key)
    count = slots if slots is not None else 4 if isinstance(upstream, int) else upstream.slots
    return RouteReplica(name, node, "127.0.0.1", port, count, ready, key)


def model(
    *replicas: RouteReplica,
    name: str = "m",
    state: str = "ready",
    words: str = "",
    refusal: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    endpoints: tuple[str, ...] = PATHS,
    context: int | None = 4096,
) -> RouteModel:
    return RouteModel(name, aliases, "llama.cpp", state, words, context, endpoints, replicas, 1700000000, refusal)


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        try:
            more = sock.recv(65536)
        except TimeoutError:
            raise AssertionError(f"no {mark!r} came; so far {data[-2000:]!r}") from None
        if not more:
            break
        data += more
    return data


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(65536):
            data += more
    return data


def dechunk(raw: bytes) -> tuple[bytes, bool]:
    """The body of a chunked answer and whether it was properly ended."""
    out, rest = b"", raw
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            return out, rest == b"\r\n"
        assert rest[count : count + 2] == b"\r\n", "a chunk is longer or shorter than it says"
        out, rest = out + rest[:count], rest[count + 2 :]
    return out, False
