"""Every bad certificate is refused with its cause, on both ends, and nobody ever says "connected"."""

from __future__ import annotations

import datetime
import logging
import os
import shutil
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from wire_helpers import CLOCK, Authority, Fleet, running_agent, running_listener, wait_for

from llmgw.domain.facts import Truth
from llmgw.errors import TlsError
from llmgw.wire.identity import Identity, check_server_name, peer_identity
from llmgw.wire.messages import PROTOCOL, Hello, encode
from llmgw.wire.tls import TlsFiles, TlsSource

YEAR_S = 365 * 86400


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


@pytest.fixture
def rogue(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "rogue")


def _own_ca(files: TlsFiles, ca: Authority) -> TlsFiles:
    return evolve(files, ca=str(ca.dir / "ca.pem"))


Case = tuple[Callable[[Authority, Authority], TlsFiles], str, str]

AGENTS: dict[str, Case] = {
    "rogue CA": (lambda ca, rogue: _own_ca(rogue.node(), ca), "unknown ca", "unknown ca"),
    "expired": (
        lambda ca, rogue: ca.node(now=time.time() - 2 * YEAR_S, days=365), "certificate expired", "certificate expired",
    ),
    "not yet valid": (
        lambda ca, rogue: ca.node(now=time.time() + 86400, days=30), "bad certificate", "certificate not yet valid",
    ),
    "a server's": (
        lambda ca, rogue: ca.server("other", ("node-a",)), "certificate for another purpose",
        "certificate for another purpose",
    ),
    "an operator's": (
        lambda ca, rogue: ca.operator("node-a"), "the certificate is that of operator `node-a`, a node's is needed",
        "the certificate is that of operator `node-a`",
    ),
    "another node's": (
        lambda ca, rogue: ca.node("node-b"),
        "the certificate is for node `node-b`, the agent says it is node `node-a`",
        "the certificate is for node `node-b`",
    ),
    "name in other case": (
        lambda ca, rogue: ca.node("Node-A"), "the certificate is for node `Node-A`",
        "the certificate is for node `Node-A`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_with_a_bad_certificate_is_refused_and_told_why(
    name: str, ca: Authority, rogue: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    make, agent_words, server_words = AGENTS[name]
    fleet = Fleet()
    with (
        caplog.at_level(logging.WARNING, "llmgw.server.listener"),
        running_listener(fleet, tls=ca.server()) as listener,
        running_agent([f"https://127.0.0.1:{listener.port}"], tls=make(ca, rogue)) as agent,
    ):
        agent.wait_words(agent_words)
        wait_for(lambda: server_words in caplog.text, f"{server_words} in the server's log")
    assert fleet.hellos == []
    assert fleet.lefts == []


SERVERS: dict[str, Case] = {
    "another name": (
        lambda ca, rogue: ca.server("gateway.test", ("10.1.2.3",)),
        "the server's certificate is not for `127.0.0.1`: name mismatch, it is for `gateway.test`, `10.1.2.3`", "",
    ),
    "rogue CA": (
        lambda ca, rogue: _own_ca(rogue.server(), ca), "unknown ca: the peer's certificate is not accepted",
        "unknown ca",
    ),
    "expired": (
        lambda ca, rogue: ca.server(now=time.time() - 2 * YEAR_S), "certificate expired", "certificate expired",
    ),
    "a node's": (
        lambda ca, rogue: ca.node("mitm"), "certificate for another purpose", "certificate for another purpose",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_with_a_bad_certificate_hears_not_one_byte(
    name: str, ca: Authority, rogue: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    make, agent_words, server_words = SERVERS[name]
    fleet = Fleet()
    with (
        caplog.at_level(logging.INFO, "llmgw.server.listener"),
        running_listener(fleet, tls=make(ca, rogue)) as listener,
        running_agent([f"https://127.0.0.1:{listener.port}"], tls=ca.node()) as agent,
    ):
        agent.wait_words(agent_words)
        wait_for(lambda: server_words in caplog.text, f"{server_words} in the server's log")
    assert fleet.hellos == []


def test_an_agent_without_a_certificate_is_told_that_one_is_required(
    ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=str(ca.dir / "ca.pem"))
    with (
        caplog.at_level(logging.WARNING, "llmgw.server.listener"),
        running_listener(Fleet(), tls=ca.server()) as listener,
        socket.create_connection(("127.0.0.1", listener.port), timeout=10) as sock,
        context.wrap_socket(sock, server_hostname="127.0.0.1") as peer,
    ):
        peer.sendall(b"{}\n")
        with pytest.raises(ssl.SSLError, match="certificate required"):
            peer.recv(1)
        wait_for(lambda: "certificate required" in caplog.text, "the cause in the server's log")


def test_https_without_certificates_is_refused_before_dialling() -> None:
    with running_agent(["https://127.0.0.1:1"]) as agent:
        agent.wait_words("needs `tls` with `ca`, `cert` and `key`")


def test_tls_to_a_plain_server_and_plain_to_a_tls_server_say_so(ca: Authority) -> None:
    with running_listener(Fleet()) as plain, running_listener(Fleet(), tls=ca.server()) as secure:
        with running_agent([f"http://127.0.0.1:{secure.port}"]) as agent:
            agent.wait_words("a server that wants TLS is dialled with `https://`")
        with running_agent([f"https://127.0.0.1:{plain.port}"], tls=ca.node()) as agent:
            agent.wait_words("the peer does not speak TLS")


def test_tls_1_2_is_allowed(ca: Authority) -> None:
    files = ca.node()
    fleet = Fleet()
    with running_listener(fleet, tls=ca.server()) as listener:
        context = ssl.create_default_context(cafile=files.ca)
        context.load_cert_chain(files.cert, files.key)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection(("127.0.0.1", listener.port), timeout=10) as sock,
            context.wrap_socket(sock, server_hostname="127.0.0.1") as peer,
        ):
            assert peer.version() == "TLSv1.2"
            peer.sendall(encode(Hello(PROTOCOL, "node-a", "0.1.0", "b", "i", CLOCK.now(), 5.0)))
            assert b'"welcome"' in peer.recv(1000)
        wait_for(lambda: fleet.lefts, "left")


def _revoke(ca: Authority, files: TlsFiles) -> Path:
    certificate = x509.load_pem_x509_certificate((ca.dir / "ca.pem").read_bytes())
    key = serialization.load_pem_private_key((ca.dir / "ca-key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    serial = x509.load_pem_x509_certificate(Path(files.cert).read_bytes()).serial_number
    entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
    crl = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(certificate.subject)
        .last_update(now)
        .next_update(now + datetime.timedelta(days=1))
        .add_revoked_certificate(entry)
    )
    path = ca.dir / "crl.pem"
    path.write_bytes(crl.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


def test_a_revoked_certificate_is_refused_and_the_others_are_not(ca: Authority) -> None:
    revoked, good = ca.node("node-a"), ca.node("node-b")
    tls = evolve(ca.server(), crl=str(_revoke(ca, revoked)))
    with running_listener(Fleet(), tls=tls) as listener:
        url = f"https://127.0.0.1:{listener.port}"
        with running_agent([url], tls=revoked) as agent:
            agent.wait_words("certificate revoked")
        with running_agent([url], "node-b", tls=good) as agent:
            agent.wait_connected()


def test_new_certificates_are_used_by_the_next_connection_without_dropping_this_one(
    ca: Authority, rogue: Authority
) -> None:
    bad, fleet = _own_ca(rogue.node("node-b"), ca), Fleet()
    server = ca.server()
    with running_listener(fleet, tls=server) as listener:
        url = f"https://127.0.0.1:{listener.port}"
        with running_agent([url], tls=ca.node()) as stays, running_agent([url], "node-b", tls=bad) as agent:
            stays.wait_connected()
            agent.wait_words("unknown ca")
            good = ca.node("node-b")
            for source, target in ((good.key, bad.key), (good.cert, bad.cert)):
                shutil.copy(source, target + ".new")
                os.chmod(target + ".new", 0o600)
                os.replace(target + ".new", target)
            agent.wait_connected()
            fresh = ca.server(replace=True)
            assert fresh == server
            with running_agent([url], "node-c", tls=ca.node("node-c")) as third:
                third.wait_connected()
            assert stays.state is Truth.YES
    assert [hello.node_id for hello in fleet.hellos] == ["node-a", "node-b", "node-c"]


def _broken(ca: Authority, files: TlsFiles, how: str) -> TlsFiles:
    if how == "group-readable key":
        os.chmod(files.key, 0o640)
    elif how == "missing key":
        os.unlink(files.key)
    elif how == "key of another":
        return evolve(files, key=ca.node("stranger").key)
    elif how == "encrypted key":
        key = ec.generate_private_key(ec.SECP256R1())
        lock = serialization.BestAvailableEncryption(b"x")
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
        Path(files.key).write_bytes(pem)
    elif how == "no certificate":
        Path(files.cert).write_text("nonsense")
    elif how == "no CA":
        Path(files.ca).write_text("nonsense")
    elif how == "no CRL":
        return evolve(files, crl=files.ca)
    return files


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("group-readable key", r"the key `.*node-a-key.pem` can be read by other users: its mode is 0640"),
        ("missing key", r"cannot read `.*node-a-key.pem`: No such file"),
        ("key of another", r"cannot use `.*stranger-key.pem`: it is not the key of `.*node-a.pem`"),
        ("encrypted key", r"cannot use `.*node-a-key.pem`: Password was not given"),
        ("no certificate", r"cannot use `.*node-a.pem`: "),
        ("no CA", r"cannot use `.*ca.pem`: "),
        ("no CRL", r"cannot use `.*ca.pem`: it holds no PEM revocation list"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_reason(how: str, words: str, ca: Authority) -> None:
    files = _broken(ca, ca.node(), how)
    with pytest.raises(TlsError, match=words):
        TlsSource(files, "client").current()
    with running_agent(["https://127.0.0.1:1"], tls=files) as agent:
        agent.wait_words("can be read by" if how == "group-readable key" else "cannot ")


def test_a_context_is_kept_while_its_files_are_the_same(ca: Authority) -> None:
    source = TlsSource(ca.server(), "server")
    first = source.current()
    assert source.current() is first
    ca.server(replace=True)
    assert source.current() is not first


def _certificate(
    names: list[str], uris: list[str], usage: Any = ExtendedKeyUsageOID.CLIENT_AUTH, dns: list[str] | None = None
) -> x509.Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each) for each in names])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    sans: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    sans += [x509.DNSName(each) for each in dns or []]
    if sans:
        builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
    return builder.sign(key, hashes.SHA256())


def test_a_node_certificate_says_who_it_is() -> None:
    assert peer_identity(_certificate(["a"], ["llmgw:node:a"])) == Identity("a", "node")
    assert peer_identity(_certificate(["a"], [])) == Identity("a", None)


@pytest.mark.parametrize(
    ("certificate", "words"),
    [
        (_certificate(["a", "b"], ["llmgw:node:a"]), "2 common names"),
        (_certificate([], ["llmgw:node:a"]), "0 common names"),
        (_certificate(["a\0b"], ["llmgw:node:a"]), "NUL"),
        (_certificate(["a"], ["llmgw:node:b"]), "its role is for"),
        (_certificate(["a"], ["llmgw:node:a", "llmgw:operator:a"]), "more than one llmgw role"),
        (_certificate(["a"], ["llmgw:node:a"], ExtendedKeyUsageOID.SERVER_AUTH), "may not be used by a client"),
        (_certificate(["a"], ["llmgw:node:a"], None), "may not be used by a client"),
    ],
    ids=["two names", "no name", "NUL", "role of another", "two roles", "serverAuth", "no usage"],
)
def test_an_ambiguous_certificate_is_nobody(certificate: x509.Certificate, words: str) -> None:
    with pytest.raises(TlsError, match=words):
        peer_identity(certificate)


@pytest.mark.parametrize(
    ("dns", "host", "matches"),
    [
        ("gw.example.org", "gw.example.org", True),
        ("gw.example.org", "GW.Example.org.", True),
        ("*.example.org", "gw.example.org", True),
        ("*.example.org", "a.gw.example.org", False),
        ("*.example.org", "example.org", False),
        ("*.org", "example.org", False),
        ("*", "gw", False),
        ("g*.example.org", "gw.example.org", False),
        ("127.0.0.1", "127.0.0.1", False),
        ("gw.example.org", "gw.example.com", False),
    ],
)
def test_host_names_match_as_in_rfc_6125(dns: str, host: str, matches: bool) -> None:
    certificate = _certificate(["gw"], ["llmgw:server:gw"], ExtendedKeyUsageOID.SERVER_AUTH, [dns])
    if matches:
        check_server_name(certificate, host)
    else:
        with pytest.raises(TlsError, match="name mismatch"):
            check_server_name(certificate, host)


def test_a_common_name_is_no_host_name_and_a_node_is_no_server() -> None:
    with pytest.raises(TlsError, match="no host at all"):
        check_server_name(_certificate(["gw"], []), "gw")
    with pytest.raises(TlsError, match="certificate of a node, not of a server"):
        check_server_name(_certificate(["gw"], ["llmgw:node:gw"], dns=["gw"]), "gw")
