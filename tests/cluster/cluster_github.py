"""A stand-in for GitHub under its real names: the release API, the download redirect, the signed asset address.

cluster_github.py ADDRESS CERTIFICATE RELEASE_DIR      port 443; one line per request on stdout
"""

from __future__ import annotations

import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Answers as the three hosts do, each only under its own name."""

    protocol_version = "HTTP/1.1"
    release = Path()

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        path = self.path.partition("?")[0]
        print(host, self.path, flush=True)
        files = {entry.name for entry in self.release.iterdir()}
        name = path.rpartition("/")[2]
        if host == "api.github.com" and path == "/repos/ggml-org/llama.cpp/releases/tags/b1":
            self._answer(200, (self.release / "release-b1.json").read_bytes(), "application/json; charset=utf-8")
        elif host == "github.com" and path.startswith("/ggml-org/llama.cpp/releases/download/b1/") and name in files:
            where = f"https://release-assets.githubusercontent.com/github-production-release-asset/1/{name}?sig=x"
            self._answer(302, b"", "text/html", Location=where)
        elif host == "release-assets.githubusercontent.com" and "sig=x" in self.path and name in files:
            self._answer(200, (self.release / name).read_bytes(), "application/octet-stream", ETag='"1"')
        else:
            self._answer(404, b'{"message": "Not Found"}', "application/json; charset=utf-8")

    def _answer(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    address, certificate, release = sys.argv[1:4]
    Handler.release = Path(release)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ThreadingHTTPServer((address, 443), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
