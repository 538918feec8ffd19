"""Who the peer is, read from a certificate whose chain OpenSSL has verified.

OpenSSL checks neither host name nor llmgw's roles: `check_server_name` and `peer_identity` do, before a byte is read
or sent.
"""

from __future__ import annotations

import datetime
import ipaddress

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import crypto

from llmgw.domain.identity import Certified, Role, read_role_uri
from llmgw.errors import TlsError


@frozen
class Identity:
    """Who a certificate says the peer is: its one common name and its llmgw role (None when it has none)."""

    name: str
    role: Role | None


def certified(certificate: x509.Certificate) -> Certified:
    """Serial and validity."""
    return Certified(
        f"{certificate.serial_number:x}",
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )


def peer_identity(certificate: x509.Certificate) -> Identity:
    """Who a client certificate (whose chain OpenSSL verified) says the peer is.

    Raises:
        TlsError: not exactly one common name, a NUL in it, no `clientAuth`, or a role for another name.
    """
    name = _common_name(certificate)
    if ExtendedKeyUsageOID.CLIENT_AUTH not in _usage(certificate):
        raise TlsError(f"the certificate of `{name}` may not be used by a client", cause="it has no `clientAuth`")
    roles = _roles(certificate)
    if not roles:
        return Identity(name, None)
    if len(roles) > 1:
        raise TlsError(f"the certificate of `{name}` has more than one llmgw role")
    role, said = roles[0]
    if said != name:
        raise TlsError(f"the certificate's common name is `{name}`, its role is for `{said[:80]!a}`")
    return Identity(name, role)


def check_server_name(certificate: x509.Certificate, host: str) -> None:
    """Check that a server certificate is for the host that was dialled: subject alternative names only, RFC 6125.

    Raises:
        TlsError: it is for others (named), or it is a node's or an operator's certificate.
    """
    strangers = [role for role, _ in _roles(certificate) if role != "server"]
    if strangers:
        raise TlsError(f"the server at `{host}` shows the certificate of a {strangers[0]}, not of a server")
    names = _alternative_names(certificate)
    dns = names.get_values_for_type(x509.DNSName) if names else []
    addresses = names.get_values_for_type(x509.IPAddress) if names else []
    try:
        matches = ipaddress.ip_address(host.strip("[]").split("%")[0]) in addresses
    except ValueError:
        matches = any(_dns_matches(pattern, host) for pattern in dns)
    if not matches:
        known = ", ".join(f"`{name[:80]}`" for name in [*dns, *map(str, addresses)][:8]) or "no host at all"
        raise TlsError(
            f"the server's certificate is not for `{host}`",
            cause=f"name mismatch, it is for {known}",
            hint="dial a name it is for, or issue one with `--san`",
        )


def _common_name(certificate: x509.Certificate) -> str:
    try:
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError as error:
        raise TlsError("the certificate's subject cannot be read", cause=str(error)[:200]) from error
    if len(names) != 1:
        raise TlsError(f"the certificate has {len(names)} common names, exactly one is needed")
    name = names[0].value
    if not isinstance(name, str) or not name or "\0" in name:
        raise TlsError("the certificate's common name is empty or has a NUL in it")
    return name


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    except ValueError as error:
        raise TlsError("the certificate's alternative names cannot be read", cause=str(error)[:200]) from error


def _roles(certificate: x509.Certificate) -> list[tuple[Role, str]]:
    names = _alternative_names(certificate)
    found: list[tuple[Role, str]] = []
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if names else []:
        read = read_role_uri(uri)
        if read is not None:
            found.append(read)
    return found


def _dns_matches(pattern: str, host: str) -> bool:
    pattern, host = pattern.lower().rstrip("."), host.lower().rstrip(".")
    if pattern.startswith("*."):
        first, _, rest = host.partition(".")
        return bool(first) and "." in rest and rest == pattern[2:]
    return "*" not in pattern and pattern == host


def check_authority(certificate: x509.Certificate, bundle: str, fingerprint: str, now: float) -> str:
    """Prove a server by the fingerprint of its CA, as a joining node does.

    Args:
        certificate: what the server showed in the handshake.
        bundle: PEM certificates the server says are its CA (and what is between it and the certificate).
        fingerprint: SHA-256 of the CA's certificate (DER), hexadecimal.
        now: seconds since the epoch.

    Returns:
        The CA to trust from now on, PEM.

    Raises:
        TlsError: the CA is not the one named, or it did not issue the certificate.
    """
    try:
        offered = x509.load_pem_x509_certificates(bundle.encode())
    except ValueError as error:
        raise TlsError("the server's CA cannot be read", cause=str(error).split("\n")[0][:200]) from error
    anchor = next((ca for ca in offered if ca.fingerprint(SHA256()).hex() == fingerprint), None)
    if anchor is None:
        raise TlsError(
            "the server is not the one the join line was made for",
            cause="its CA has another fingerprint",
            hint="make a new line with `llmgw ctl join-token create`; if it is the same again, somebody is in between",
        )
    store = crypto.X509Store()
    store.add_cert(crypto.X509.from_cryptography(anchor))
    store.set_time(datetime.datetime.fromtimestamp(now, datetime.UTC).replace(tzinfo=None))
    between = [crypto.X509.from_cryptography(each) for each in offered if each is not anchor]
    shown = crypto.X509.from_cryptography(certificate)
    try:
        crypto.X509StoreContext(store, shown, between).verify_certificate()
    except crypto.X509StoreContextError as error:
        raise TlsError("the server's certificate is not of the CA the join line names", cause=str(error)) from error
    usage = _usage(certificate)
    if ExtendedKeyUsageOID.SERVER_AUTH not in usage or not any(role == "server" for role, _ in _roles(certificate)):
        raise TlsError("the server's certificate is not a server's", cause="its role or its usage is another")
    return anchor.public_bytes(Encoding.PEM).decode()


def _usage(certificate: x509.Certificate) -> tuple[x509.ObjectIdentifier, ...]:
    try:
        return tuple(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return ()
    except ValueError as error:
        raise TlsError("the certificate's extensions cannot be read", cause=str(error)[:200]) from error
