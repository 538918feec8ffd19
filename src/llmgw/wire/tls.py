"""TLS contexts from files, and who the peer is.

TLS 1.3 (1.2 allowed), both ends show a certificate. OpenSSL checks chain, dates and extended key usage; it checks
neither host name nor llmgw's roles: `check_server_name` and `peer_identity` do, before a byte is read or sent.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import threading
from pathlib import Path
from typing import Literal

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import SSL, crypto

from llmgw.errors import TlsError
from llmgw.wire.tls_words import note_verify_failure, openssl_words

Role = Literal["node", "operator", "server"]
_ROLES: tuple[Role, ...] = ("node", "operator", "server")
_PEM_CRL = b"-----BEGIN X509 CRL-----"


@frozen
class TlsFiles:
    """Paths of PEM files: the CA to trust, our certificate (chain), its key, and optionally a revocation list."""

    ca: str
    cert: str
    key: str
    crl: str | None = None


@frozen
class Identity:
    """Who a certificate says the peer is: its one common name and its llmgw role (None when it has none)."""

    name: str
    role: Role | None


class TlsSource:
    """Contexts that follow their files: a new one is built when a file changed, since a used one cannot be changed.

    Safe to call from several threads.

    Args:
        files: PEM paths.
        side: which end this is.
    """

    def __init__(self, files: TlsFiles, side: Literal["server", "client"]) -> None:
        self._files = files
        self._side = side
        self._lock = threading.Lock()
        self._stamp: tuple[tuple[int, int, int], ...] | None = None
        self._context: SSL.Context | None = None

    def current(self) -> SSL.Context:
        """The context for the next connection.

        Raises:
            TlsError: a file cannot be used; says which and why. The next call looks again.
        """
        with self._lock:
            stamp = self._look()
            if self._context is None or stamp != self._stamp:
                make = server_context if self._side == "server" else client_context
                self._context, self._stamp = make(self._files), stamp
            return self._context

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self._files.ca, self._files.cert, self._files.key, self._files.crl):
            if path:
                try:
                    status = Path(path).stat()
                except OSError as error:
                    raise TlsError(f"cannot read `{path}`", cause=error.strerror or str(error)) from error
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)


def server_context(files: TlsFiles) -> SSL.Context:
    """A context for the listening end; a client must show a certificate of the CA.

    Raises:
        TlsError: a file cannot be used; says which and why.
    """
    context = _context(SSL.TLS_SERVER_METHOD, files)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, note_verify_failure)
    # A resumed session would skip the certificate checks, revocation included.
    context.set_options(SSL.OP_NO_TICKET)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    return context


def client_context(files: TlsFiles) -> SSL.Context:
    """A context for the dialling end.

    Raises:
        TlsError: a file cannot be used; says which and why.
    """
    context = _context(SSL.TLS_CLIENT_METHOD, files)
    context.set_verify(SSL.VERIFY_PEER, note_verify_failure)
    return context


def _context(method: int, files: TlsFiles) -> SSL.Context:
    context = SSL.Context(method)
    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_options(SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)
    path = files.ca
    try:
        # Read first: OpenSSL gives no reason for a file it may not open.
        _read(path)
        context.load_verify_locations(path)
        path = files.cert
        _read(path)
        context.use_certificate_chain_file(path)
        path = files.key
        context.use_privatekey(load_pem_private_key(_read(path, secret=True), None))  # type: ignore[arg-type]
        context.check_privatekey()
        if files.crl:
            path = files.crl
            _add_crls(context, _read(path))
    except SSL.Error as error:
        cause = openssl_words(error)
        if "mismatch" in cause:
            cause = f"it is not the key of `{files.cert}`"
        raise TlsError(f"cannot use `{path}`", cause=cause or "it holds no PEM certificate") from error
    except (ValueError, TypeError) as error:
        raise TlsError(f"cannot use `{path}`", cause=str(error).split("\n")[0][:200]) from error
    return context


def _add_crls(context: SSL.Context, pem: bytes) -> None:
    lists = [x509.load_pem_x509_crl(_PEM_CRL + part) for part in pem.split(_PEM_CRL)[1:]]
    if not lists:
        raise ValueError("it holds no PEM revocation list")
    store = context.get_cert_store()
    if store is None:
        raise ValueError("the CA file holds no certificate")
    for each in lists:
        store.add_crl(each)
    store.set_flags(crypto.X509StoreFlags.CRL_CHECK)


def _read(path: str, *, secret: bool = False) -> bytes:
    try:
        with Path(path).open("rb") as handle:
            if secret and stat.S_IMODE(os.fstat(handle.fileno()).st_mode) & 0o077:
                raise TlsError(
                    f"the key `{path}` can be read by other users",
                    cause=f"its mode is {stat.S_IMODE(os.fstat(handle.fileno()).st_mode):04o}",
                    hint=f"`chmod 600 {path}`",
                )
            return handle.read(1 << 20)
    except OSError as error:
        raise TlsError(f"cannot read `{path}`", cause=error.strerror or str(error)) from error


def peer_identity(certificate: x509.Certificate) -> Identity:
    """Who a client certificate (whose chain OpenSSL verified) says the peer is.

    Raises:
        TlsError: not exactly one common name, a NUL in it, no `clientAuth`, or a role for another name.
    """
    name = _common_name(certificate)
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        allowed = ExtendedKeyUsageOID.CLIENT_AUTH in usage
    except x509.ExtensionNotFound:
        allowed = False
    except ValueError as error:
        raise TlsError("the certificate's extensions cannot be read", cause=str(error)[:200]) from error
    if not allowed:
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
        for role in _ROLES:
            if uri.startswith(f"llmgw:{role}:"):
                found.append((role, uri.removeprefix(f"llmgw:{role}:")))
    return found


def _dns_matches(pattern: str, host: str) -> bool:
    pattern, host = pattern.lower().rstrip("."), host.lower().rstrip(".")
    if pattern.startswith("*."):
        first, _, rest = host.partition(".")
        return bool(first) and "." in rest and rest == pattern[2:]
    return "*" not in pattern and pattern == host
