"""What `llmgw ctl` says when TLS stands between it and the server: which file, why, and what to do."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ctl_server import serving

from llmgw.ctl import contexts
from llmgw.ctl.client import Client
from llmgw.errors import Unreachable
from llmgw.pki.authority import init_ca, issue_operator, issue_server
from llmgw.system.http import Http

DAY = 86400.0


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pki")
    now = time.time()
    init_ca(made, None, days=10, now=now - 3 * DAY)
    issue_server(made, "localhost", (), days=3, now=now)
    issue_server(made, "old", ("localhost",), days=1, now=now - 2 * DAY)
    issue_server(made, "elsewhere", (), days=3, now=now)
    issue_operator(made, "anna", days=3, now=now)
    issue_operator(made, "olaf", days=1, now=now - 2 * DAY)
    return made


@contextmanager
def tls_server(pki: Path, name: str) -> Iterator[int]:
    """Shakes hands and closes; nothing is ever answered."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / f"{name}.pem", pki / f"{name}-key.pem")
    listener = socket.create_server(("127.0.0.1", 0))
    closed = threading.Event()

    def accept() -> None:
        while not closed.is_set():
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                try:
                    context.wrap_socket(peer, server_side=True).close()
                except OSError:
                    continue

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        closed.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def refused(home: Path, server: str, **files: str) -> Unreachable:
    """What is said when asking there, as with a context `lab` of these files."""
    path = home / ".config" / "llmgw" / "ctl.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    more = "".join(f', {key}: "{value}"' for key, value in files.items())
    path.write_text(f'contexts:\n  lab: {{server: "{server}"{more}}}\n')
    where = contexts.find({"HOME": str(home)}, context="lab", default_token_file="/nonexistent/t")
    with Http(ca_file=where.ca, certificate=where.certificate) as http, pytest.raises(Unreachable) as caught:
        Client(where, http).get("nodes")
    return caught.value


def test_a_server_whose_ca_is_not_trusted_is_not_called_absent(home: Path, pki: Path) -> None:
    with tls_server(pki, "localhost") as port:
        said = refused(home, f"https://localhost:{port}")
    assert said.message == f"no secure connection to `https://localhost:{port}`"
    assert f"the certificate of `localhost:{port}` is not trusted" in said.cause
    assert said.hint.startswith("trusted are the CAs of this machine's own; name its CA under `ca`")


def test_an_expired_certificate_and_a_wrong_name_say_what_to_do(home: Path, pki: Path) -> None:
    with tls_server(pki, "old") as port:
        said = refused(home, f"https://localhost:{port}", ca=f"{pki}/ca.pem")
    assert "certificate has expired" in said.cause
    assert said.hint.startswith("give the server a new certificate")
    with tls_server(pki, "elsewhere") as port:
        by_name = refused(home, f"https://localhost:{port}", ca=f"{pki}/ca.pem")
        by_address = refused(home, f"https://127.0.0.1:{port}", ca=f"{pki}/ca.pem")
    for said in (by_name, by_address):
        assert "mismatch" in said.cause
        assert said.hint == "ask at a name or address its certificate was issued for"


def test_https_to_a_server_without_tls_and_the_other_way_round(home: Path, pki: Path) -> None:
    with serving(lambda *_: (200, {})) as url:
        said = refused(home, url.replace("http://", "https://"))
    assert "does not speak TLS: write `http://`" in said.hint
    with tls_server(pki, "localhost") as port:
        said = refused(home, f"http://localhost:{port}")
    assert "if it serves TLS, write `https://`" in said.hint


def test_a_file_that_cannot_be_used_is_named_before_anybody_is_asked(home: Path, pki: Path, tmp_path: Path) -> None:
    said = refused(home, "https://localhost:1", ca="/nonexistent/ca.pem")
    assert said.message == "cannot read the authorities in `/nonexistent/ca.pem`"
    assert said.cause == "No such file or directory"
    assert "context `lab`" in said.hint
    (tmp_path / "ca.pem").write_text("nothing\n")
    said = refused(home, "https://localhost:1", ca=f"{tmp_path}/ca.pem")
    assert said.cause.startswith("it holds nothing of that kind in PEM form")
    said = refused(home, "https://localhost:1", cert=f"{pki}/anna.pem", key=f"{pki}/localhost-key.pem")
    assert said.message == f"cannot use the certificate `{pki}/anna.pem` with the key `{pki}/localhost-key.pem`"
    assert said.cause == "the key does not belong to the certificate"


def test_a_server_that_leaves_after_it_saw_our_certificate_is_not_called_absent(home: Path, pki: Path) -> None:
    with tls_server(pki, "localhost") as port:
        server = f"https://localhost:{port}"
        said = refused(home, server, ca=f"{pki}/ca.pem", cert=f"{pki}/olaf.pem", key=f"{pki}/olaf-key.pem")
    assert said.message == f"no secure connection to `{server}`"
    assert f"it may not accept the certificate `{pki}/olaf.pem` (expired on " in said.hint
