"""Operators by certificate: what it opens, what it does not, and that the files are followed."""

from __future__ import annotations

import http.client
import os
import shutil
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flows_cluster import MODULE, Cluster, sweep
from security_helpers import wait_for

from llmgw.pki import authority


class Front:
    """A server whose HTTP side has TLS and takes operators' certificates."""

    def __init__(self, root: Path) -> None:
        self.cluster = Cluster(root, MODULE)
        self.pki = self.cluster.pki
        for name in ("anna", "berta"):
            authority.issue_operator(self.pki, name, now=time.time())
        authority.issue_node(self.pki, "node-a", now=time.time())
        authority.issue_operator(self.pki, "nobody", now=time.time())
        authority.revoke(self.pki, "nobody", now=time.time())
        tls = {
            "cert": str(self.pki / "server.pem"),
            "key": str(self.pki / "server-key.pem"),
            "client_ca": str(self.pki / "ca.pem"),
            "client_crl": str(self.pki / "crl.pem"),
        }
        listen = f"127.0.0.1:{self.cluster.http_port}"
        token = str(self.cluster.token_file)
        config = self.cluster.configure_server(http={"listen": listen, "admin_token_file": token, "tls": tls})
        self.cluster.start("server", "server", "-c", str(config))
        wait_for(lambda: self.status("anna") == 200, self.cluster.log("server"), 40)

    def ask(self, who: str | None, method: str, path: str, **headers: str) -> tuple[int, bytes, str]:
        """Status, body, and serial of the server's certificate."""
        context = ssl.create_default_context(cafile=str(self.pki / "ca.pem"))
        if who is not None:
            context.load_cert_chain(self.pki / f"{who}.pem", self.pki / f"{who}-key.pem")
        connection = http.client.HTTPSConnection("127.0.0.1", self.cluster.http_port, timeout=20, context=context)
        try:
            connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
            assert isinstance(connection.sock, ssl.SSLSocket)
            serial = str((connection.sock.getpeercert() or {})["serialNumber"])
            answer = connection.getresponse()
            return answer.status, answer.read(), serial
        finally:
            connection.close()

    def status(self, who: str | None, **headers: str) -> int:
        try:
            return self.ask(who, "GET", "/api/v1/status", **headers)[0]
        except OSError:
            return 0


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    made = Front(tmp_path / "c")
    yield made
    for process in made.cluster.processes.values():
        process.terminate()
        process.wait(20)
    sweep(made.cluster.root)


@pytest.mark.timeout(120)
def test_an_operators_certificate_opens_the_admin_api_and_nothing_else_does(front: Front) -> None:
    assert front.status("anna") == 200
    assert front.status(None) == 401
    assert front.status("node-a") == 401, "a node is no operator"
    assert front.status(None, X_Forwarded_Operator="anna") == 401, "a header of the client is not believed"
    assert front.status("node-a", X_Forwarded_Operator="anna") == 401
    token = front.cluster.token_file.read_text().strip()
    assert front.status(None, Authorization=f"Bearer {token}") == 200
    assert front.status("nobody") == 0, "revoked"

    # a browser shows the certificate by itself, so another site's page must not change anything
    path = "/api/v1/profiles/none"
    assert front.ask("anna", "DELETE", path, Origin="https://evil.example")[0] == 403
    assert front.ask("anna", "DELETE", path, Sec_Fetch_Site="cross-site")[0] == 403
    assert front.ask("anna", "DELETE", path)[0] == 404

    # revoked while the server runs; and a new certificate of the server's own
    authority.revoke(front.pki, "anna", now=time.time())
    wait_for(lambda: front.status("anna") == 0, front.cluster.log("server"), 5)
    assert front.status("berta") == 200
    before = front.ask("berta", "GET", "/api/v1/status")[2]
    shutil.copytree(front.pki, front.pki.parent / "work")
    fresh = authority.renew(front.pki.parent / "work", "server", now=time.time())
    os.replace(fresh.key, front.pki / "server-key.pem")
    os.replace(fresh.cert, front.pki / "server.pem")
    wait_for(lambda: front.ask("berta", "GET", "/api/v1/status")[2] != before, front.cluster.log("server"), 5)
