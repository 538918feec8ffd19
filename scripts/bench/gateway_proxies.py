"""The contenders of the gateway's benchmark: each a port, and the processes whose time counts."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gateway_traffic as traffic
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CORES = sorted(os.sched_getaffinity(0))
_DAY = datetime.timedelta(days=1)
PROXY_CORE, OTHER_CORE = CORES[-1], CORES[0]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def spawn(core: int, *argv: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(["taskset", "-c", str(core), *argv], text=True, **more)


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of the processes and their threads, from schedstat (nanoseconds) where the kernel has it."""
    total = 0.0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0]) / 1e9
            except OSError:
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def rss_bytes(pids: list[int]) -> int:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE")


def reachable(port: int, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port}")
        time.sleep(0.05)


def certificate(where: Path) -> Path:
    """A PEM file with a key (P-256) and a certificate that it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + _DAY)
    signed = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = where / "front.pem"
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form) + signed)
    return path


class Proxy:
    """One contender: a port and the processes whose time counts."""

    def __init__(self, name: str, work: Path, upstream: int, tls: Path | None = None) -> None:
        """`tls`: a PEM file with key and certificate to show to clients; None for plain HTTP."""
        self.name, self.work, self.upstream, self.tls = name, work, upstream, tls
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), 5)
        if self.tls is None:
            return sock
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context.wrap_socket(sock)

    def pids(self) -> list[int]:
        assert self.process is not None
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            todo += [int(child) for child in children]
        return found

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


class Direct(Proxy):
    def start(self) -> str:
        self.port = self.upstream
        return ""

    def pids(self) -> list[int]:
        return []


class Nginx(Proxy):
    def start(self) -> str:
        binary = shutil.which("nginx") or "/usr/sbin/nginx"
        if not Path(binary).exists():
            return "nginx is not installed: `apt-get install nginx-light`"
        conf = self.work / "nginx.conf"
        listen = f"127.0.0.1:{self.port}"
        if self.tls:
            listen += f" ssl; ssl_certificate {self.tls}; ssl_certificate_key {self.tls}; ssl_protocols TLSv1.3"
        conf.write_text(
            f"""daemon off; pid {self.work}/nginx.pid; error_log stderr crit; worker_processes 1;
worker_rlimit_nofile 20000;
events {{ worker_connections 16000; }}
http {{ access_log off; keepalive_requests 100000000;
  client_body_temp_path {self.work}/a; proxy_temp_path {self.work}/b; fastcgi_temp_path {self.work}/c;
  uwsgi_temp_path {self.work}/d; scgi_temp_path {self.work}/e;
  upstream engine {{ server 127.0.0.1:{self.upstream}; keepalive 1024; keepalive_requests 100000000; }}
  server {{ listen {listen}; location / {{ proxy_pass http://engine; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_buffering off; client_max_body_size 64m; }} }} }}
"""
        )
        self.process = spawn(PROXY_CORE, binary, "-p", str(self.work), "-c", str(conf))
        reachable(self.port)
        return ""


class Router(Proxy):
    def start(self) -> str:
        python = ROOT / ".cache" / "bench-router" / "bin" / "python"
        if not python.exists():
            with contextlib.suppress(subprocess.CalledProcessError, OSError):
                subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
                subprocess.run([str(python), "-m", "pip", "install", "-q", "sglang-router"], check=True)
        if subprocess.run([str(python), "-c", "import sglang_router"], check=False, capture_output=True).returncode:
            return "sglang-router cannot be had from the package index"
        log = (self.work / "router.log").open("w")
        self.process = spawn(
            PROXY_CORE, str(python), "-m", "sglang_router.launch_router", "--worker-urls",
            f"http://127.0.0.1:{self.upstream}", "--port", str(self.port), "--policy", "round_robin",
            "--log-level", "error", "--prometheus-port", str(free_port()), stdout=log, stderr=log,
            env={**os.environ, "TOKIO_WORKER_THREADS": "1"},
        )  # fmt: skip
        try:
            reachable(self.port, 60)
            self._ready()
        except (TimeoutError, OSError) as error:
            return f"sglang-router did not come up: {error}"
        return ""

    def _ready(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as sock:
                sock.settimeout(5)
                sock.sendall(traffic.request(False))
                if sock.recv(65536).startswith(b"HTTP/1.1 200"):
                    return
            time.sleep(0.3)
        raise TimeoutError(f"no request passes; its log is {self.work}/router.log")


class Gateway(Proxy):
    workers = 1

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def stop(self) -> None:
        for process in self.processes:
            self.process = process
            super().stop()

    def start(self) -> str:
        self.processes: list[subprocess.Popen[str]] = []
        table = {
            "type": "routes", "seq": 1, "keys_required": True,
            "keys": [{"name": "bench", "sha256": hashlib.sha256(traffic.KEY.encode()).hexdigest(),
                      "models": [traffic.MODEL], "rpm": 100_000_000, "tpm": 10_000_000_000}],
            "models": [{"name": traffic.MODEL, "aliases": [], "engine": "llama.cpp", "state": "ready", "words": "",
                        "context": 4096, "endpoints": ["/v1/chat/completions"], "replicas": [
                            {"replica_id": f"{traffic.MODEL}#{n}", "node_id": f"node-{n}", "host": "127.0.0.1",
                             "port": self.upstream, "slots": 100_000, "ready": True} for n in range(2)]}],
        }  # fmt: skip
        line = json.dumps(table).encode() + b"\n"
        control = socket.socket(socket.AF_UNIX)
        control.bind(str(self.work / "control.sock"))
        control.listen(4)
        threading.Thread(target=self._control, args=(control, line), daemon=True).start()
        log = (self.work / "gateway.log").open("w")
        tls = ("--tls-cert", str(self.tls), "--tls-key", str(self.tls)) if self.tls else ()
        for index in range(self.workers):
            self.processes.append(
                spawn(
                    PROXY_CORE, sys.executable, "-m", "llmgw", "gateway",
                    "--control", str(self.work / "control.sock"), "--admin", str(self.work / "admin.sock"),
                    "--listen", f"127.0.0.1:{self.port}", "--workers", str(self.workers), "--index", str(index),
                    *ACCESS, str(self.work / "access.log"), *tls, stdout=log, stderr=log,
                )
            )  # fmt: skip
        deadline = time.monotonic() + 30
        good = 0
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), self.connect() as sock:
                sock.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
                good = good + 1 if sock.recv(65536).startswith(b"HTTP/1.1 200") else 0
                if good > 8 * (self.workers - 1):
                    return ""
            time.sleep(0.05)
        return f"the gateway did not come up: {(self.work / 'gateway.log').read_text()[-500:]}"

    @staticmethod
    def _control(control: socket.socket, line: bytes) -> None:
        while True:
            peer, _ = control.accept()
            peer.sendall(line)
            threading.Thread(
                target=lambda p=peer: [None for _ in iter(lambda: p.recv(65536), b"")], daemon=True
            ).start()


ACCESS = ("--access-log",)
