"""A non-blocking byte stream over a connected socket, plain or TLS with the same methods.

Used by one thread only: OpenSSL forbids reading and writing one connection from two.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from enum import Enum
from typing import Protocol

from cryptography import x509
from OpenSSL import SSL

from llmgw.errors import LinkError, TlsError, WireError
from llmgw.wire.identity import check_server_name
from llmgw.wire.tls_words import Notes, handshake_words

CLOSED = "the peer closed the connection"
_BROKE = "the connection broke"
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")


class Want(Enum):
    """What the socket must be ready for before the call can go on."""

    READ = "read"
    WRITE = "write"


class Stream(Protocol):
    """Bytes in and out; every method returns at once."""

    def handshake(self) -> Want | None:
        """Go on with the handshake; None when it is done.

        Raises:
            LinkError, TlsError: it failed.
        """
        ...

    def read(self, size: int) -> bytes | Want:
        """At most `size` bytes, `b""` at the end.

        Raises:
            LinkError, TlsError: the connection broke, or the peer refuses us.
            WireError: the peer speaks TLS and this end does not.
        """
        ...

    def write(self, data: memoryview) -> int | Want:
        """Number of bytes taken.

        Raises:
            LinkError, TlsError: the connection broke.
        """
        ...

    def pending(self) -> int:
        """Bytes already read from the socket that `select` cannot see."""
        ...

    def certificate(self) -> x509.Certificate | None:
        """The peer's certificate, None without TLS."""
        ...

    def goodbye(self) -> None:
        """Say that nothing more will be sent; the socket stays open for what the peer still sends."""
        ...


class PlainStream:
    """TCP as it is."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._virgin = True

    def handshake(self) -> Want | None:
        return None

    def read(self, size: int) -> bytes | Want:
        try:
            data = self._sock.recv(size)
        except (BlockingIOError, InterruptedError):
            return Want.READ
        except OSError as error:
            raise LinkError(_BROKE, cause=os_words(error)) from error
        if self._virgin and data.startswith(_TLS_RECORDS):
            raise WireError(
                "the peer speaks TLS, this end does not",
                hint="use `https://` and certificates on both ends, or neither",
            )
        self._virgin = False
        return data

    def write(self, data: memoryview) -> int | Want:
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return Want.WRITE
        except OSError as error:
            raise LinkError(_BROKE, cause=os_words(error)) from error

    def pending(self) -> int:
        return 0

    def certificate(self) -> x509.Certificate | None:
        return None

    def goodbye(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)


class TlsStream:
    """TLS over a non-blocking socket.

    Args:
        sock: connected and non-blocking.
        context: see `tls`.
        server_host: set on the dialling end: the name the server's certificate must be for.
    """

    def __init__(self, sock: socket.socket, context: SSL.Context, server_host: str | None) -> None:
        self._sock = sock
        self._host = server_host
        self._notes = Notes(server_host)
        self._tls = SSL.Connection(context, sock)
        self._tls.set_app_data(self._notes)
        if server_host is None:
            self._tls.set_accept_state()
        else:
            self._tls.set_connect_state()
            if not _is_address(server_host):
                self._tls.set_tlsext_host_name(server_host.encode("idna"))

    def handshake(self) -> Want | None:
        try:
            self._tls.do_handshake()
        except SSL.WantReadError:
            return Want.READ
        except SSL.WantWriteError:
            return Want.WRITE
        except SSL.Error as error:
            if self._notes.refusal is not None:
                raise self._notes.refusal from error
            raise self._failure(error, "the TLS handshake failed") from error
        if self._host is not None:
            certificate = self.certificate()
            if certificate is None:
                raise TlsError("the server shows no certificate")
            check_server_name(certificate, self._host)
        return None

    def read(self, size: int) -> bytes | Want:
        try:
            return self._tls.recv(size)
        except SSL.WantReadError:
            return Want.READ
        except SSL.WantWriteError:
            return Want.WRITE
        except SSL.ZeroReturnError:
            return b""
        except SSL.Error as error:
            raise self._failure(error, _BROKE) from error

    def write(self, data: memoryview) -> int | Want:
        try:
            return self._tls.send(data)
        except SSL.WantReadError:
            return Want.READ
        except SSL.WantWriteError:
            return Want.WRITE
        except SSL.Error as error:
            raise self._failure(error, _BROKE) from error

    def pending(self) -> int:
        return self._tls.pending()

    def certificate(self) -> x509.Certificate | None:
        return self._tls.get_peer_certificate(as_cryptography=True)

    def goodbye(self) -> None:
        with contextlib.suppress(SSL.Error):
            self._tls.shutdown()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _failure(self, error: SSL.Error, tried: str) -> LinkError:
        if isinstance(error, SSL.SysCallError):
            number = error.args[0] if error.args else -1
            if number == -1:
                return LinkError(CLOSED if tried == _BROKE else f"{CLOSED} during the TLS handshake")
            return LinkError(tried, cause=os_words(OSError(number, os.strerror(number))))
        return TlsError(handshake_words(error, self._notes))


def os_words(error: OSError) -> str:
    """The kernel's reason as a sentence."""
    known = {
        errno.ECONNREFUSED: "connection refused, nothing listens there",
        errno.ECONNRESET: "the peer reset the connection",
        errno.EPIPE: CLOSED,
        errno.ETIMEDOUT: "timed out, the peer or the network does not answer",
        errno.EHOSTUNREACH: "no route to the host",
        errno.ENETUNREACH: "the network is unreachable",
    }
    return known.get(error.errno or 0, error.strerror or str(error))


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host.split("%")[0])
            return True
    return False
