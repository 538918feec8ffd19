"""Signing: a CA (or an intermediate) and what it is willing to put its name to."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.domain.identity import Role, backdate_s, role_uri
from llmgw.errors import PkiError
from llmgw.pki.keys import load_key, read_certificates

PublicKey: TypeAlias = ec.EllipticCurvePublicKey | rsa.RSAPublicKey
PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

_LEAST_RSA_BITS = 2048
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_USAGES = {
    "node": ExtendedKeyUsageOID.CLIENT_AUTH,
    "operator": ExtendedKeyUsageOID.CLIENT_AUTH,
    "server": ExtendedKeyUsageOID.SERVER_AUTH,
}


@frozen
class Issuer:
    """A signing certificate and its key."""

    certificate: x509.Certificate
    key: PrivateKey

    @classmethod
    def load(cls, bundle: Path, key_path: Path) -> Issuer:
        """The key, and that certificate of the bundle (several may be in use during a rotation) which belongs to it.

        Raises:
            PkiError: a file cannot be used, the key can be read by others, or it is the key of none of them.
        """
        key = load_key(key_path)
        if not isinstance(key, (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey)):
            raise PkiError(f"cannot use the CA's key `{key_path}`", cause="it is neither an ECDSA nor an RSA key")
        public = key.public_key()
        found = [each for each in read_certificates(bundle) if each.public_key() == public]
        if not found:
            raise PkiError(
                "cannot use the CA", cause=f"`{key_path.name}` is not the key of `{bundle.name}`",
                hint=f"put the certificate of that key into `{bundle}`",
            )  # fmt: skip
        if not _signs(found[0]):
            raise PkiError(f"cannot use `{bundle}`", cause="the certificate of that key is not a CA's")
        return cls(found[0], key)

    def issue(
        self,
        name: str,
        role: Role,
        public: PublicKey,
        hosts: Sequence[x509.GeneralName] = (),
        *,
        life_s: float,
        now: float,
    ) -> x509.Certificate:
        """A leaf for `name`.

        Args:
            hosts: alternative names beside the role's URI.
            life_s: seconds from now; never beyond the CA's own end.
            now: seconds since the epoch.

        Raises:
            PkiError: the CA has expired.
        """
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        ca = self.certificate
        builder = begin(subject, ca.subject, public, life_s=life_s, now=now, not_beyond=ca.not_valid_after_utc)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([_USAGES[role]]), critical=False)
        uri = x509.UniformResourceIdentifier(role_uri(role, name))
        builder = builder.add_extension(x509.SubjectAlternativeName([*hosts, uri]), critical=False)
        builder = builder.add_extension(authority_id(ca), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def sign_request(self, pem: str, node_id: str, *, life_s: float, now: float) -> x509.Certificate:
        """A node's certificate for a request that came over the wire. Only its key is taken from the request.

        Raises:
            PkiError: the request is broken, not signed by its own key, for another node, or its key is too weak.
        """
        return self.issue(node_id, "node", request_key(pem, node_id), life_s=life_s, now=now)


def request_key(pem: str, node_id: str) -> PublicKey:
    """The key of a certificate request for `node_id`.

    Raises:
        PkiError: the request is broken, not signed by its own key, for another node, or its key is too weak.
    """
    refused = "the certificate request is refused"
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        good = request.is_signature_valid
        names = [str(each.value) for each in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        public = request.public_key()
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise PkiError(refused, cause=str(error).split("\n")[0][:200]) from error
    if not good:
        raise PkiError(refused, cause="it is not signed by the key in it")
    if names != [node_id]:
        raise PkiError(refused, cause=f"it is for {', '.join(names)[:100]!a}, not for node `{node_id}`")
    if isinstance(public, ec.EllipticCurvePublicKey) and isinstance(public.curve, _CURVES):
        return public
    if isinstance(public, rsa.RSAPublicKey) and _LEAST_RSA_BITS <= public.key_size <= 4096:
        return public
    raise PkiError(refused, cause="its key is neither ECDSA on P-256, P-384 or P-521 nor RSA with 2048 to 4096 bits")


def begin(
    subject: x509.Name,
    issuer: x509.Name,
    public: PublicKey,
    *,
    life_s: float,
    now: float,
    not_beyond: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    """A builder with names, key, a random serial of 128 bits, and dates: from a little before now.

    Raises:
        PkiError: `not_beyond` has passed.
    """
    start = datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0)
    end = start + datetime.timedelta(seconds=life_s)
    if not_beyond is not None:
        end = min(end, not_beyond)
        if end <= start:
            raise PkiError("the CA has expired", cause=f"on {not_beyond:%Y-%m-%d}", hint="make a new one")
    builder = x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=public,
        serial_number=secrets.randbits(128) or 1,
        not_valid_before=start - datetime.timedelta(seconds=backdate_s(life_s)),
        not_valid_after=end,
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Key usage of a CA, or of a leaf."""
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


def authority_id(ca: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """How a certificate or list names the key that signed it: two CAs of one name are told apart by it."""
    try:
        own = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key())  # type: ignore[arg-type]


def _signs(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False
