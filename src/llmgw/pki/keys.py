"""Keys and certificates as files: read with words, written for their owner alone; and requests for certificates."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import NameOID

from llmgw.errors import PkiError

_LIMIT = 1 << 20


def load_key(path: Path) -> PrivateKeyTypes:
    """A private key that only its owner can read.

    Raises:
        PkiError: it cannot be read or used, or others can read it.
    """
    try:
        with path.open("rb") as handle:
            mode = stat.S_IMODE(os.fstat(handle.fileno()).st_mode)
            if mode & 0o077:
                raise PkiError(
                    f"the key `{path}` can be read by other users",
                    cause=f"its mode is {mode:04o}",
                    hint=f"`chmod 600 {path}`, and think about who may have read it",
                )
            return serialization.load_pem_private_key(handle.read(_LIMIT), None)
    except OSError as error:
        raise PkiError(f"cannot read the key `{path}`", cause=error.strerror or str(error)) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise PkiError(f"cannot use the key `{path}`", cause=str(error).split("\n")[0][:200]) from error


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Every certificate of a PEM file, at least one.

    Raises:
        PkiError: it cannot be read, or holds none.
    """
    try:
        with path.open("rb") as handle:
            return x509.load_pem_x509_certificates(handle.read(_LIMIT))
    except OSError as error:
        raise PkiError(f"cannot read `{path}`", cause=error.strerror or str(error)) from error
    except ValueError as error:
        raise PkiError(f"cannot use `{path}`", cause=str(error).split("\n")[0][:200]) from error


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key as PKCS#8 PEM, not encrypted: its file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """The certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def make_request(key: ec.EllipticCurvePrivateKey, node_id: str) -> str:
    """A certificate request (PEM) for a node; nothing but name and key is in it."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node_id)])
    request = x509.CertificateSigningRequestBuilder(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def check_answer(pem: str, key: ec.EllipticCurvePrivateKey, node_id: str) -> x509.Certificate:
    """The certificate a server issued for our request.

    Raises:
        PkiError: it is broken, for another key, or for another name.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        names = [str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        public = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise PkiError("the server issued no usable certificate", cause=str(error).split("\n")[0][:200]) from error
    if public != key.public_key() or names != [node_id]:
        raise PkiError("the server issued no usable certificate", cause="it is for another key or another node")
    return certificate
