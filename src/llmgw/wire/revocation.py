"""Revocation lists: what OpenSSL checks at each handshake, asked again for connections that are already there."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

log = logging.getLogger(__name__)

_PEM_CRL = b"-----BEGIN X509 CRL-----"


@frozen
class Revocations:
    """Lists and the authority that signed each."""

    lists: tuple[x509.CertificateRevocationList, ...]
    signers: tuple[x509.Certificate, ...]

    @classmethod
    def load(cls, pem: bytes, authorities: Sequence[x509.Certificate]) -> Revocations:
        """Read every list of a PEM file; one that none of the authorities signed counts for nothing.

        Raises:
            ValueError: the file holds no list, or a broken one.
        """
        found = [x509.load_pem_x509_crl(_PEM_CRL + part) for part in pem.split(_PEM_CRL)[1:]]
        if not found:
            raise ValueError("it holds no PEM revocation list")
        lists, signers = [], []
        for each in found:
            signer = next((ca for ca in authorities if _signed(each, ca)), None)
            if signer is None:
                log.warning("a revocation list of %s is signed by none of the CAs in use, and not used", each.issuer)
            else:
                lists.append(each)
                signers.append(signer)
        for ca in authorities:
            if ca not in signers:
                log.warning("there is no revocation list of the CA %s: none of its certificates is revoked", ca.subject)
        return cls(tuple(lists), tuple(signers))

    def words(self, certificate: x509.Certificate) -> str | None:
        """`revoked since …` when a list names the certificate, else None."""
        for each, signer in zip(self.lists, self.signers, strict=True):
            entry = each.get_revoked_certificate_by_serial_number(certificate.serial_number)
            if entry is not None and _issued(certificate, signer):
                return f"revoked since {entry.revocation_date_utc:%Y-%m-%d %H:%M} UTC"
        return None


def _signed(crl: x509.CertificateRevocationList, ca: x509.Certificate) -> bool:
    try:
        return crl.issuer == ca.subject and crl.is_signature_valid(ca.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return False


def _issued(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
