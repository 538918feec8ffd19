"""A CA in a directory: `ca.pem`, `ca-key.pem`, and `NAME.pem`, `NAME-key.pem` for each certificate it issues.

ECDSA P-256 throughout; the CA signs leaves only (path length 0). A certificate says what its holder is by a URI among
its alternative names, `llmgw:node:NAME`, `llmgw:operator:NAME` or `llmgw:server:NAME`, and by extended key usage, so
that a node's certificate can be used neither as a server's nor as an operator's.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.domain.ids import check_node_id
from llmgw.errors import PkiError
from llmgw.system.files import make_dir, write_atomic

CA_DAYS = 3650
LEAF_DAYS = 365
# A node whose clock is a little behind must be able to use a fresh certificate.
_BACKDATED = datetime.timedelta(hours=1)
# RFC 5280 appendix A, ub-common-name
_LONGEST_NAME = 64
_DNS = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@frozen
class Issued:
    """What was written: the certificate, its key (mode 0600), and the CA's certificate to go with them."""

    name: str
    cert: Path
    key: Path
    ca: Path


def init_ca(directory: Path, name: str = "llmgw CA", *, days: int = CA_DAYS, now: float) -> Issued:
    """Make a CA.

    Args:
        directory: created with mode 0700 when it is missing.
        name: common name of the CA.
        days: how long it is valid.
        now: seconds since the epoch.

    Raises:
        PkiError: the directory holds one already.
        FileError: it cannot be written to.
    """
    make_dir(directory, 0o700)
    cert, key = directory / "ca.pem", directory / "ca-key.pem"
    _refuse_existing(cert, key)
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, subject, private.public_key(), days, now)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    _write(key, cert, private, builder.sign(private, hashes.SHA256()))
    return Issued(name, cert, key, cert)


def issue_server(
    directory: Path, name: str, sans: Sequence[str] = (), *, days: int = LEAF_DAYS, replace: bool = False, now: float
) -> Issued:
    """Issue a server's certificate for the host names and IP addresses agents dial.

    Args:
        sans: names and addresses; `name` itself is always one of them.
        replace: write over the certificate of that name, with a new key.

    Raises:
        PkiError: no CA there, a name is not usable, or one is there already.
        FileError: the directory cannot be written to.
    """
    names = [_san(text) for text in dict.fromkeys([name, *sans])]
    return _issue(directory, name, "server", ExtendedKeyUsageOID.SERVER_AUTH, names, days, replace, now)


def issue_node(directory: Path, node_id: str, *, days: int = LEAF_DAYS, replace: bool = False, now: float) -> Issued:
    """Issue a node's certificate: the agent of `node_id` shows it to the server.

    Raises:
        PkiError: no CA there, the name is not usable, or one is there already.
        FileError: the directory cannot be written to.
    """
    return _issue(directory, node_id, "node", ExtendedKeyUsageOID.CLIENT_AUTH, [], days, replace, now)


def issue_operator(directory: Path, name: str, *, days: int = LEAF_DAYS, replace: bool = False, now: float) -> Issued:
    """Issue an operator's certificate.

    Raises:
        PkiError: no CA there, the name is not usable, or one is there already.
        FileError: the directory cannot be written to.
    """
    return _issue(directory, name, "operator", ExtendedKeyUsageOID.CLIENT_AUTH, [], days, replace, now)


def _issue(
    directory: Path,
    name: str,
    role: str,
    usage: x509.ObjectIdentifier,
    names: list[x509.GeneralName],
    days: int,
    replace: bool,
    now: float,
) -> Issued:
    _check_name(name)
    ca_cert, ca_key = _load_ca(directory)
    cert, key = directory / f"{name}.pem", directory / f"{name}-key.pem"
    if not replace:
        _refuse_existing(cert, key)
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, ca_cert.subject, private.public_key(), days, now, ca_cert.not_valid_after_utc)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    uri = x509.UniformResourceIdentifier(f"llmgw:{role}:{name}")
    builder = builder.add_extension(x509.SubjectAlternativeName([*names, uri]), critical=False)
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = builder.add_extension(issuer_id, critical=False)
    _write(key, cert, private, builder.sign(ca_key, hashes.SHA256()))
    return Issued(name, cert, key, directory / "ca.pem")


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    days: int,
    now: float,
    not_beyond: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    start = datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0)
    end = start + datetime.timedelta(days=days)
    if not_beyond is not None:
        end = min(end, not_beyond)
        if end <= start:
            raise PkiError("the CA has expired", cause=f"on {not_beyond:%Y-%m-%d}", hint="make a new one")
    builder = x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=public,
        serial_number=secrets.randbits(128) or 1,
        not_valid_before=start - _BACKDATED,
        not_valid_after=end,
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _load_ca(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    cert, key = directory / "ca.pem", directory / "ca-key.pem"
    try:
        with key.open("rb") as handle:
            mode = stat.S_IMODE(os.fstat(handle.fileno()).st_mode)
            if mode & 0o077:
                raise PkiError(
                    f"the CA's key `{key}` can be read by other users",
                    cause=f"its mode is {mode:04o}",
                    hint=f"`chmod 600 {key}`, and think about who may have read it",
                )
            private = serialization.load_pem_private_key(handle.read(), None)
        certificate = x509.load_pem_x509_certificate(cert.read_bytes())
    except FileNotFoundError as error:
        raise PkiError(
            f"no CA in `{directory}`",
            cause=f"`{Path(error.filename).name}` is not there",
            hint=f"`llmgw ctl cert init --dir {directory}`",
        ) from error
    except OSError as error:
        raise PkiError(f"cannot read the CA in `{directory}`", cause=error.strerror or str(error)) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise PkiError(f"cannot read the CA in `{directory}`", cause=str(error).split("\n")[0][:200]) from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != certificate.public_key():
        raise PkiError(f"cannot use the CA in `{directory}`", cause="`ca-key.pem` is not the key of `ca.pem`")
    return certificate, private


def _check_name(name: str) -> None:
    check_node_id(name)
    if len(name) > _LONGEST_NAME:
        raise PkiError(f"`{name}` is too long", cause=f"a common name has at most {_LONGEST_NAME} characters")
    if name == "ca" or name.endswith("-key"):
        raise PkiError(f"`{name}` cannot be used", cause="its files would be taken for those of another certificate")


def _san(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not _DNS.fullmatch(text):
        raise PkiError(f"`{text[:80]!a}` is neither a host name nor an IP address")
    return x509.DNSName(text)


def _refuse_existing(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise PkiError(f"`{path}` is there already", hint="choose another name, or say `--replace` for a leaf")


def _write(key: Path, cert: Path, private: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_atomic(key, pem, 0o600)
    write_atomic(cert, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
