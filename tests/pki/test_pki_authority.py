"""The CA issues what it should, and nothing by accident."""

from __future__ import annotations

import datetime
import os
import stat
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import crypto

from llmgw.errors import LlmgwError, PkiError
from llmgw.pki import authority
from llmgw.pki.issuer import Issuer
from llmgw.pki.keys import load_key, new_key
from llmgw.pki.listing import list_certificates
from llmgw.wire.identity import Identity, peer_identity

NOW = 1_800_000_000.0


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    authority.init_ca(tmp_path / "pki", now=NOW)
    return tmp_path / "pki"


def _load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_ca_signs_leaves_only(pki: Path) -> None:
    ca = _load(pki / "ca.pem")
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.crl_sign, usage.digital_signature) == (True, True, False)
    assert isinstance(ca.public_key(), ec.EllipticCurvePublicKey)
    assert ca.public_key().curve.name == "secp256r1"


def test_keys_and_the_directory_are_their_owners_alone(pki: Path) -> None:
    before = os.umask(0)
    try:
        made = authority.issue_node(pki, "node-a", now=NOW)
    finally:
        os.umask(before)
    assert stat.S_IMODE(pki.stat().st_mode) == 0o700
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    assert stat.S_IMODE((pki / "ca-key.pem").stat().st_mode) == 0o600
    assert (made.cert.name, made.key.name, made.ca) == ("node-a.pem", "node-a-key.pem", pki / "ca.pem")


def test_a_leaf_says_what_it_is_and_may_sign_nothing(pki: Path) -> None:
    node = _load(authority.issue_node(pki, "node-a", now=NOW).cert)
    server = _load(authority.issue_server(pki, "gw.test", ["10.0.0.1", "::1", "gw"], now=NOW).cert)
    operator = _load(authority.issue_operator(pki, "anna", now=NOW).cert)
    assert peer_identity(node) == Identity("node-a", "node")
    assert peer_identity(operator) == Identity("anna", "operator")
    for leaf, usage in (
        (node, ExtendedKeyUsageOID.CLIENT_AUTH),
        (operator, ExtendedKeyUsageOID.CLIENT_AUTH),
        (server, ExtendedKeyUsageOID.SERVER_AUTH),
    ):
        assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [usage]
        constraints = leaf.extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert not constraints.value.ca
        leaf.verify_directly_issued_by(_load(pki / "ca.pem"))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["gw.test", "gw"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "::1"]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["llmgw:server:gw.test"]


def test_serials_are_long_and_never_the_same(pki: Path) -> None:
    serials = [_load(authority.issue_node(pki, f"n{n}", now=NOW).cert).serial_number for n in range(20)]
    assert len(set(serials)) == 20
    assert all(serial < 1 << 128 for serial in serials)
    assert max(serials) > 1 << 120


def test_validity_begins_an_hour_back_and_ends_no_later_than_the_ca(tmp_path: Path) -> None:
    authority.init_ca(tmp_path / "pki", days=10, now=NOW)
    leaf = _load(authority.issue_node(tmp_path / "pki", "n", days=365, now=NOW).cert)
    start = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    assert leaf.not_valid_before_utc == start - datetime.timedelta(hours=1)
    assert leaf.not_valid_after_utc == start + datetime.timedelta(days=10)
    with pytest.raises(PkiError, match="the CA has expired"):
        authority.issue_node(tmp_path / "pki", "later", now=NOW + 11 * 86400)


def test_a_leaf_cannot_act_as_a_ca(pki: Path) -> None:
    node = authority.issue_node(pki, "node-a", now=time.time())
    fake = pki.parent / "fake"
    fake.mkdir()
    (fake / "ca.pem").write_bytes(node.cert.read_bytes())
    (fake / "ca-key.pem").write_bytes(node.key.read_bytes())
    (fake / "ca-key.pem").chmod(0o600)
    with pytest.raises(PkiError, match="is not a CA's"):
        authority.issue_node(fake, "node-b", now=time.time())
    key = new_key()
    forged = Issuer(_load(node.cert), load_key(node.key)).issue(  # type: ignore[arg-type]
        "node-b", "node", key.public_key(), life_s=86400, now=time.time()
    )
    store = crypto.X509Store()
    store.add_cert(crypto.X509.from_cryptography(_load(pki / "ca.pem")))
    store.set_time(datetime.datetime.fromtimestamp(NOW + 60, datetime.UTC).replace(tzinfo=None))
    chain = [crypto.X509.from_cryptography(_load(node.cert))]
    with pytest.raises(crypto.X509StoreContextError):
        crypto.X509StoreContext(store, crypto.X509.from_cryptography(forged), chain).verify_certificate()


def test_nothing_is_written_over_unless_told(pki: Path) -> None:
    first = authority.issue_node(pki, "node-a", now=NOW)
    before = first.cert.read_bytes(), first.key.read_bytes()
    with pytest.raises(PkiError, match=r"`.*node-a.pem` is there already"):
        authority.issue_node(pki, "node-a", now=NOW)
    with pytest.raises(PkiError, match=r"`.*ca.pem` is there already"):
        authority.init_ca(pki, now=NOW)
    assert (first.cert.read_bytes(), first.key.read_bytes()) == before
    authority.issue_node(pki, "node-a", replace=True, now=NOW)
    assert first.key.read_bytes() != before[1]


@pytest.mark.parametrize("name", ["ca", "node-key", "../x", "a/b", "", "-rf", "a\nb", "x" * 65, "nöde"])
def test_a_name_that_is_no_file_or_another_file_is_refused(pki: Path, name: str) -> None:
    before = sorted(pki.iterdir())
    with pytest.raises(LlmgwError):
        authority.issue_node(pki, name, now=NOW)
    assert sorted(pki.iterdir()) == before


def test_a_san_that_is_no_host_is_refused(pki: Path) -> None:
    for san in ("https://x", "a b", "x/y", ""):
        with pytest.raises(PkiError, match="neither a host name nor an IP address"):
            authority.issue_server(pki, "gw", [san], now=NOW)


def test_a_ca_that_cannot_be_used_says_why(pki: Path, tmp_path: Path) -> None:
    with pytest.raises(PkiError, match="no CA in") as caught:
        authority.issue_node(tmp_path / "nowhere", "n", now=NOW)
    assert caught.value.hint.startswith("`llmgw ctl cert init --dir ")
    (pki / "ca-key.pem").chmod(0o644)
    with pytest.raises(PkiError, match="can be read by other users: its mode is 0644"):
        authority.issue_node(pki, "n", now=NOW)
    other = authority.init_ca(tmp_path / "other", now=NOW)
    (pki / "ca-key.pem").write_bytes(other.key.read_bytes())
    (pki / "ca-key.pem").chmod(0o600)
    with pytest.raises(PkiError, match=r"`ca-key.pem` is not the key of `ca.pem`"):
        authority.issue_node(pki, "n", now=NOW)
    (pki / "ca.pem").write_text("nonsense")
    with pytest.raises(PkiError, match=r"cannot use `.*ca.pem`"):
        authority.issue_node(pki, "n", now=NOW)


def test_the_list_says_how_each_certificate_stands(pki: Path) -> None:
    authority.issue_node(pki, "node-a", days=30, now=NOW)
    authority.issue_server(pki, "gw", ["10.0.0.1"], days=5, now=NOW)
    (pki / "broken.pem").write_text("nonsense")
    found = {Path(each.path).name: each for each in list_certificates(pki, NOW + 10 * 86400)}
    assert sorted(found) == ["broken.pem", "ca.pem", "gw.pem", "node-a.pem"]
    assert (found["ca.pem"].role, found["node-a.pem"].role, found["gw.pem"].role) == ("ca", "node", "server")
    assert found["node-a.pem"].words.endswith(", 20 days left")
    assert found["gw.pem"].words.startswith("expired on ")
    assert found["gw.pem"].sans == ("gw", "10.0.0.1")
    assert found["broken.pem"].words.startswith("not a certificate")
    assert found["broken.pem"].name is None
    assert list_certificates(pki, NOW - 86400)[1].words.startswith("not valid before ")
    with pytest.raises(PkiError, match="cannot read"):
        list_certificates(pki / "nowhere", NOW)
