"""A CA in a directory: `ca.pem`, `ca-key.pem`, and `NAME.pem`, `NAME-key.pem` for each certificate it issues.

ECDSA P-256 throughout (an RSA CA that was brought is used as it is); the CA signs leaves only (path length 0). A
certificate says what its holder is by a URI among its alternative names, `llmgw:node:NAME`, `llmgw:operator:NAME` or
`llmgw:server:NAME`, and by extended key usage, so that a node's certificate can be used neither as a server's nor as an
operator's. A node and an operator also get `NAME-bundle.pem`: key, certificate and CA in one file.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from llmgw.domain.identity import Role, read_role_uri
from llmgw.domain.ids import check_node_id
from llmgw.errors import PkiError
from llmgw.pki import revoke as lists
from llmgw.pki.issuer import Issuer, begin, usage
from llmgw.pki.keys import certificate_pem, key_pem, new_key, read_certificates
from llmgw.system.files import make_dir, write_atomic

CA_DAYS = 3650
LEAF_DAYS = 365
DAY_S = 86400.0
# RFC 5280 appendix A, ub-common-name
_LONGEST_NAME = 64
_DNS = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@frozen
class Issued:
    """What was written: the certificate, its key (mode 0600), the CA's certificate, and for a client one file of all
    three (mode 0600).
    """

    name: str
    cert: Path
    key: Path
    ca: Path
    bundle: Path | None = None


def init_ca(directory: Path, name: str | None = None, *, days: float = CA_DAYS, now: float) -> Issued:
    """Make a CA.

    Args:
        directory: created with mode 0700 when it is missing.
        name: common name of the CA; None makes one that no other CA has, so that two in use at once (a rotation) are
            told apart by people too.
        days: how long it is valid.
        now: seconds since the epoch.

    Raises:
        PkiError: the directory holds one already.
        FileError: it cannot be written to.
    """
    make_dir(directory, 0o700)
    cert, key = directory / "ca.pem", directory / "ca-key.pem"
    _refuse_existing(cert, key)
    name = name or f"llmgw CA {secrets.token_hex(3)}"
    private = new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = begin(subject, subject, private.public_key(), life_s=days * DAY_S, now=now)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage(signs_certificates=True), critical=True)
    write_atomic(key, key_pem(private), 0o600)
    write_atomic(cert, certificate_pem(builder.sign(private, hashes.SHA256())), 0o644)
    return Issued(name, cert, key, cert)


def issue_server(
    directory: Path, name: str, sans: Sequence[str] = (), *, days: float = LEAF_DAYS, replace: bool = False, now: float
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
    return _issue(directory, name, "server", names, days, replace, now)


def issue_node(directory: Path, node_id: str, *, days: float = LEAF_DAYS, replace: bool = False, now: float) -> Issued:
    """Issue a node's certificate: the agent of `node_id` shows it to the server.

    Raises:
        PkiError: no CA there, the name is not usable, or one is there already.
        FileError: the directory cannot be written to.
    """
    return _issue(directory, node_id, "node", [], days, replace, now)


def issue_operator(directory: Path, name: str, *, days: float = LEAF_DAYS, replace: bool = False, now: float) -> Issued:
    """Issue an operator's certificate.

    Raises:
        PkiError: no CA there, the name is not usable, or one is there already.
        FileError: the directory cannot be written to.
    """
    return _issue(directory, name, "operator", [], days, replace, now)


def renew(directory: Path, name: str, *, days: float | None = None, now: float) -> Issued:
    """Issue a certificate of the directory anew: same name, role and hosts, a new key.

    Args:
        days: None: as long as the old one's whole life.

    Raises:
        PkiError: there is no such certificate, or it has no llmgw role.
        FileError: the directory cannot be written to.
    """
    _check_name(name)
    path = directory / f"{name}.pem"
    if not path.is_file():
        hint = f"`llmgw ctl cert list --dir {directory}`"
        raise PkiError(f"there is no certificate `{name}` in `{directory}`", hint=hint)
    old = read_certificates(path)[0]
    try:
        names = list(old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (x509.ExtensionNotFound, ValueError):
        names = []
    roles = [read_role_uri(each.value) for each in names if isinstance(each, x509.UniformResourceIdentifier)]
    role = next((found for found in roles if found is not None), None)
    if role is None:
        raise PkiError(f"cannot renew `{path}`", cause="it has no llmgw role", hint="issue a new one")
    life_days = (old.not_valid_after_utc - old.not_valid_before_utc).total_seconds() / DAY_S
    hosts = [each for each in names if isinstance(each, (x509.DNSName, x509.IPAddress))]
    return _issue(directory, name, role[0], hosts, days if days is not None else life_days, True, now)


def revoke(directory: Path, what: str, *, now: float) -> lists.Revoked:
    """Put a certificate (its name in the directory, or its serial) on the CA's revocation list `crl.pem`.

    Raises:
        PkiError: no CA there, or no such certificate of it.
        FileError: the list cannot be written.
    """
    return lists.revoke(_load_ca(directory), directory, what, now=now)


def _issue(
    directory: Path, name: str, role: Role, hosts: Sequence[x509.GeneralName], days: float, replace: bool, now: float
) -> Issued:
    _check_name(name)
    issuer = _load_ca(directory)
    cert, key, bundle = (directory / f"{name}{end}.pem" for end in ("", "-key", "-bundle"))
    if not replace:
        _refuse_existing(cert, key)
    private = new_key()
    certificate = issuer.issue(name, role, private.public_key(), hosts, life_s=days * DAY_S, now=now)
    write_atomic(key, key_pem(private), 0o600)
    write_atomic(cert, certificate_pem(certificate), 0o644)
    ca = directory / "ca.pem"
    if role == "server":
        return Issued(name, cert, key, ca)
    authorities = b"".join(certificate_pem(each) for each in read_certificates(ca))
    write_atomic(bundle, key_pem(private) + certificate_pem(certificate) + authorities, 0o600)
    return Issued(name, cert, key, ca, bundle)


def _load_ca(directory: Path) -> Issuer:
    cert, key = directory / "ca.pem", directory / "ca-key.pem"
    for path in (key, cert):
        if not path.exists():
            raise PkiError(
                f"no CA in `{directory}`",
                cause=f"`{path.name}` is not there",
                hint=f"`llmgw ctl cert init --dir {directory}`",
            )
    return Issuer.load(cert, key)


def _check_name(name: str) -> None:
    check_node_id(name)
    if len(name) > _LONGEST_NAME:
        raise PkiError(f"`{name}` is too long", cause=f"a common name has at most {_LONGEST_NAME} characters")
    if name in ("ca", "crl") or name.endswith(("-key", "-bundle")):
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
