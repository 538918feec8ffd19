"""Revocation: `crl.pem` in the directory of a CA, which a server reads again whenever it changes."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from llmgw.errors import PkiError
from llmgw.pki.issuer import Issuer, authority_id
from llmgw.pki.keys import read_certificates
from llmgw.system.files import write_atomic

_SERIAL = re.compile(r"[0-9a-fA-F]{8,40}")


@frozen
class Revoked:
    """What was done: the serial (hexadecimal), the list's file, and whether it was in it already."""

    serial: str
    crl: Path
    before: bool


def revoke(issuer: Issuer, directory: Path, what: str, *, now: float) -> Revoked:
    """Put a certificate on the list.

    Args:
        issuer: the CA that issued it; the list is signed by it and ends with it.
        directory: of the CA.
        what: name of a certificate in the directory, or a serial in hexadecimal: of one the server issued, see
            `llmgw ctl nodes NODE`.
        now: seconds since the epoch.

    Raises:
        PkiError: there is no such certificate, the CA did not issue it, or the list that is there is not the CA's.
        FileError: the list cannot be written.
    """
    path = directory / "crl.pem"
    serial = _serial(issuer, directory, what)
    ca = issuer.certificate
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0)
    old = _existing(path, ca)
    entries = [] if old is None else list(old)
    before = any(each.serial_number == serial for each in entries)
    builder = x509.CertificateRevocationListBuilder(
        issuer_name=ca.subject, last_update=moment, next_update=max(ca.not_valid_after_utc, moment + _DAY)
    )
    for each in entries:
        builder = builder.add_revoked_certificate(each)
    if not before:
        made = x509.RevokedCertificateBuilder(serial_number=serial, revocation_date=moment).build()
        builder = builder.add_revoked_certificate(made)
    number = 1 if old is None else old.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number + 1
    builder = builder.add_extension(x509.CRLNumber(number), critical=False)
    builder = builder.add_extension(authority_id(ca), critical=False)
    pem = builder.sign(issuer.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    write_atomic(path, pem, 0o644)
    return Revoked(f"{serial:x}", path, before)


_DAY = datetime.timedelta(days=1)


def _serial(issuer: Issuer, directory: Path, what: str) -> int:
    path = directory / f"{what}.pem"
    if "/" not in what and path.is_file():
        certificate = read_certificates(path)[0]
        if certificate == issuer.certificate:
            raise PkiError(f"`{what}` is the CA itself", hint="make a new CA, and take the old one out of every bundle")
        if certificate.issuer != issuer.certificate.subject:
            raise PkiError(f"cannot revoke `{what}`", cause="another CA issued it")
        return certificate.serial_number
    if _SERIAL.fullmatch(what):
        return int(what, 16)
    raise PkiError(
        f"there is no certificate `{what[:80]}` in `{directory}`",
        hint="name one of `llmgw ctl cert list`, or a serial as `llmgw ctl nodes NODE` shows it",
    )


def _existing(path: Path, ca: x509.Certificate) -> x509.CertificateRevocationList | None:
    try:
        found = x509.load_pem_x509_crl(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PkiError(f"cannot read the revocation list `{path}`", cause=str(error).split("\n")[0][:200]) from error
    if found.issuer != ca.subject or not found.is_signature_valid(ca.public_key()):  # type: ignore[arg-type]
        raise PkiError(
            f"the revocation list `{path}` is not this CA's",
            hint="move it away; a server may be given one file with the lists of several CAs",
        )
    return found
