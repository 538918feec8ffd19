"""TLS contexts from files that may change while llmgw runs.

TLS 1.3 (1.2 allowed), both ends show a certificate. OpenSSL checks chain, dates, extended key usage and, at each
handshake, revocation; see `identity` for names and roles.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any, Literal

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from OpenSSL import SSL, crypto

from llmgw.domain.identity import Certified
from llmgw.errors import TlsError
from llmgw.wire.identity import certified
from llmgw.wire.revocation import Revocations
from llmgw.wire.tls_words import note_verify_failure, openssl_words

log = logging.getLogger(__name__)

Side = Literal["server", "client"]

JOIN_PROTOCOL = b"llmgw-join/1"
"""ALPN name by which a node without a certificate asks to be enrolled; every other connection must show one."""


@frozen
class TlsFiles:
    """Paths of PEM files: the CAs to trust, our certificate (chain), its key, and optionally revocation lists."""

    ca: str
    cert: str
    key: str
    crl: str | None = None


@frozen
class _Loaded:
    context: SSL.Context
    revocations: Revocations
    own: Certified


Stamp = tuple[tuple[int, int, int], ...]


class TlsSource:
    """Contexts that follow their files: a new one is built when a file changed, since a used one cannot be changed.

    Once a context was built, files that cannot be used leave it in force: a certificate that is being replaced, or a
    typing error in the bundle, must not lock everybody out. `trouble` says so, and the log once. Safe to call from
    several threads.

    Args:
        files: PEM paths.
        side: which end this is.
    """

    def __init__(self, files: TlsFiles, side: Side) -> None:
        self.files = files
        self._side: Side = side
        self._lock = threading.Lock()
        self._stamp: Stamp | None = None
        self._loaded: _Loaded | None = None
        self._trouble = ""

    def current(self) -> SSL.Context:
        """The context for the next connection.

        Raises:
            TlsError: there never was a usable set of files; says which one and why. The next call looks again.
        """
        return self._fresh()[0].context

    def refresh(self) -> bool:
        """Look at the files now; True when they are in use and were not at the last look.

        Raises:
            TlsError: as `current`.
        """
        return self._fresh()[1]

    @property
    def own(self) -> Certified:
        """Our own certificate, as in use for the next connection.

        Raises:
            TlsError: as `current`.
        """
        return self._fresh()[0].own

    @property
    def trouble(self) -> str:
        """Why the files as they are now are not in use; "" when they are."""
        with self._lock:
            return self._trouble

    def revoked(self, certificate: x509.Certificate) -> str | None:
        """Since when a certificate is revoked, in words; None when it is not."""
        return self._fresh()[0].revocations.words(certificate)

    def _fresh(self) -> tuple[_Loaded, bool]:
        with self._lock:
            try:
                stamp = _look(self.files)
                if self._loaded is not None and stamp == self._stamp:
                    return self._loaded, False
                loaded = _load(self.files, self._side)
            except TlsError as error:
                if self._loaded is None:
                    raise
                self._say(error)
                return self._loaded, False
            self._loaded, self._stamp, self._trouble = loaded, stamp, ""
            return loaded, True

    def _say(self, error: TlsError) -> None:
        if error.words() != self._trouble:
            self._trouble = error.words()
            log.error("the TLS files as they were before stay in use: %s", self._trouble)


def _look(files: TlsFiles) -> Stamp:
    found = []
    for path in (files.ca, files.cert, files.key, files.crl):
        if path:
            try:
                status = Path(path).stat()
            except OSError as error:
                raise TlsError(f"cannot read `{path}`", cause=error.strerror or str(error)) from error
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def server_context(files: TlsFiles) -> SSL.Context:
    """A context for the listening end; a client must show a certificate of a CA, unless it asks to join.

    Raises:
        TlsError: a file cannot be used; says which and why.
    """
    return _load(files, "server").context


def client_context(files: TlsFiles) -> SSL.Context:
    """A context for the dialling end.

    Raises:
        TlsError: a file cannot be used; says which and why.
    """
    return _load(files, "client").context


def join_context() -> SSL.Context:
    """A context for a node that has no certificate and knows of the server only a CA's fingerprint.

    Nothing is verified by OpenSSL: `identity.check_authority` does it before anything secret is said.
    """
    context = _bare(SSL.TLS_CLIENT_METHOD)
    context.set_verify(SSL.VERIFY_NONE, note_verify_failure)
    context.set_alpn_protos([JOIN_PROTOCOL])
    return context


def _bare(method: int) -> SSL.Context:
    context = SSL.Context(method)
    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_options(SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)
    return context


def _load(files: TlsFiles, side: Side) -> _Loaded:
    context = _bare(SSL.TLS_SERVER_METHOD if side == "server" else SSL.TLS_CLIENT_METHOD)
    path = files.ca
    try:
        # Read first: OpenSSL gives no reason for a file it may not open.
        bundle = _read(path)
        context.load_verify_locations(path)
        authorities = x509.load_pem_x509_certificates(bundle)
        path = files.cert
        own = x509.load_pem_x509_certificate(_read(path))
        context.use_certificate_chain_file(path)
        path = files.key
        context.use_privatekey(load_pem_private_key(_read(path, secret=True), None))  # type: ignore[arg-type]
        context.check_privatekey()
        revocations = Revocations((), ())
        if files.crl:
            path = files.crl
            revocations = Revocations.load(_read(path), authorities)
            store = context.get_cert_store()
            if store is None:
                raise ValueError("the CA file holds no certificate")
            for each in revocations.lists:
                store.add_crl(each)
            store.set_flags(crypto.X509StoreFlags.CRL_CHECK)
    except SSL.Error as error:
        cause = openssl_words(error)
        if "mismatch" in cause:
            cause = f"it is not the key of `{files.cert}`"
        raise TlsError(f"cannot use `{path}`", cause=cause or "it holds no PEM certificate") from error
    except (ValueError, TypeError) as error:
        raise TlsError(f"cannot use `{path}`", cause=str(error).split("\n")[0][:200]) from error
    if side == "server":
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, note_verify_failure)
        context.set_alpn_select_callback(_choose_protocol)
        # A resumed session would skip the certificate checks, revocation included.
        context.set_options(SSL.OP_NO_TICKET)
        context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    else:
        context.set_verify(SSL.VERIFY_PEER, note_verify_failure)
    return _Loaded(context, revocations, certified(own))


def _choose_protocol(connection: SSL.Connection, offered: list[bytes]) -> Any:
    """Only who asks to join may come without a certificate; the listener hears nothing else from such a connection."""
    if JOIN_PROTOCOL not in offered:
        return SSL.NO_OVERLAPPING_PROTOCOLS
    connection.set_verify(SSL.VERIFY_NONE, note_verify_failure)
    return JOIN_PROTOCOL


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
