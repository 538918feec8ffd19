"""What certificates are in a directory, and when they end."""

from __future__ import annotations

import datetime
from pathlib import Path

from attrs import evolve, frozen
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from llmgw.domain.identity import read_role_uri
from llmgw.errors import PkiError


@frozen
class CertificateInfo:
    """One certificate file.

    Args:
        path: where it is.
        name: its common name, None when it cannot be read.
        role: `ca`, `node`, `server`, `operator`; None when it says none.
        serial: hexadecimal.
        not_before, not_after: seconds since the epoch.
        sans: host names and addresses.
        words: how it stands now: `valid until …`, `expired …`, or why it cannot be read.
        issuer: the issuer's name.
        fingerprint: SHA-256 of the certificate, hexadecimal.
    """

    path: str
    name: str | None = None
    role: str | None = None
    serial: str | None = None
    not_before: float | None = None
    not_after: float | None = None
    sans: tuple[str, ...] = ()
    words: str = ""
    issuer: str | None = None
    fingerprint: str | None = None


def list_certificates(directory: Path, now: float) -> tuple[CertificateInfo, ...]:
    """Every certificate in `directory`, by file name; keys are not opened.

    Raises:
        PkiError: the directory cannot be read.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".pem")
    except OSError as error:
        raise PkiError(f"cannot read `{directory}`", cause=error.strerror or str(error)) from error
    revoked = _revoked(directory / "crl.pem")
    found = (show_certificate(path, now) for path in paths if not path.stem.endswith(("-key", "-bundle", "crl")))
    return tuple(evolve(each, words=f"revoked, {each.words}") if each.serial in revoked else each for each in found)


def _revoked(path: Path) -> frozenset[str]:
    """Serials on the directory's revocation list; an unreadable list is told by `revoke`, not here."""
    try:
        return frozenset(f"{each.serial_number:x}" for each in x509.load_pem_x509_crl(path.read_bytes()))
    except (OSError, ValueError):
        return frozenset()


def show_certificate(path: Path, now: float) -> CertificateInfo:
    """One certificate file in words; what cannot be read is said in `words`, never raised."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        role, sans = _role_and_names(certificate)
    except OSError as error:
        return CertificateInfo(str(path), words=f"cannot be read: {error.strerror}")
    except ValueError as error:
        return CertificateInfo(str(path), words=f"not a certificate: {str(error).splitlines()[0][:120]}")
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return CertificateInfo(
        path=str(path),
        name=str(names[0].value) if len(names) == 1 else None,
        role=role,
        serial=f"{certificate.serial_number:x}",
        not_before=start.timestamp(),
        not_after=end.timestamp(),
        sans=sans,
        words=_standing(start, end, datetime.datetime.fromtimestamp(now, datetime.UTC)),
        issuer=certificate.issuer.rfc4514_string(),
        fingerprint=certificate.fingerprint(SHA256()).hex(),
    )


def _role_and_names(certificate: x509.Certificate) -> tuple[str | None, tuple[str, ...]]:
    role: str | None = None
    try:
        if certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            role = "ca"
    except x509.ExtensionNotFound:
        pass
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return role, ()
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier):
        read = read_role_uri(uri)
        if read is not None:
            role = read[0]
    hosts = names.get_values_for_type(x509.DNSName)
    return role, (*hosts, *map(str, names.get_values_for_type(x509.IPAddress)))


def _standing(start: datetime.datetime, end: datetime.datetime, now: datetime.datetime) -> str:
    if now < start:
        return f"not valid before {start:%Y-%m-%d %H:%M} UTC"
    if now >= end:
        return f"expired on {end:%Y-%m-%d}"
    return f"valid until {end:%Y-%m-%d}, {(end - now).days} days left"
