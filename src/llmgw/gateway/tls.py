"""TLS towards clients: the certificate they see, followed when its files change, and operators who show their own."""

from __future__ import annotations

import logging
import os
import ssl
from asyncio import sslproto
from os import write
from typing import Any

from attrs import frozen

from llmgw.domain.identity import read_role_uri
from llmgw.errors import TlsError

_LOG = logging.getLogger("llmgw.gateway")
_READ = 8 << 10
_WRAPPED = sslproto.SSLProtocolState.WRAPPED


class FrontProtocol(sslproto.SSLProtocol):
    """asyncio's, with a straight way for what nearly always happens, and without its 256 KiB per connection.

    That is a read that brings one record whole, and a write with nothing waiting before it. Whatever else happens goes
    the standard way. Its transport is `loop.DirectTransport`, which reads for it.

    A handshake that fails leaves a cycle of its exception, frames and this behind until the garbage collector comes; a
    port that is only looked at (health checks, scans) must not cost memory, so what is large is given back at once.
    """

    max_size = 16 << 10

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._drop_buffer()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client, as they are on the wire."""
        me: Any = self
        me._incoming.write(data)
        if me._state is not _WRAPPED or me._app_reading_paused:
            self.buffer_updated(0)
            return
        try:
            try:
                plain = me._sslobj.read(_READ)
            except ssl.SSLWantReadError:
                pass  # half a record, or one that is not the client's but TLS's own
            else:
                if plain:
                    me._app_protocol.data_received(plain)
                if not plain or me._incoming.pending or me._sslobj.pending():
                    me._do_read()
            if me._write_backlog:
                me._do_write()
            elif me._outgoing.pending:
                me._process_outgoing()
        except Exception as error:
            me._fatal_error(error, "an event could not be handled")

    def pass_on(self, data: bytes) -> int:
        """Encrypt and send at once where nothing else waits to be sent.

        Returns:
            `len(data)`: all of it has left, or the socket's transport keeps what is left of it. 0: nothing was done,
            the usual way has to take it.
        """
        sealed = self._seal(data)
        if not sealed:
            return 0
        transport: Any = self.transport
        if transport._loop.unsent:
            # nothing may pass what TLS itself has to say, such as its answer to a change of keys
            transport.send_now()
            if transport._buffer:
                transport.write(sealed)
                return len(data)
        try:
            sent = write(transport._sock_fd, sealed)
        except OSError:
            sent = 0  # the transport meets the same error
        if sent != len(sealed):
            transport.write(sealed[sent:])
        return len(data)

    @property
    def transport(self) -> Any:
        """The socket's."""
        return self._transport

    def _write_appdata(self, list_of_data: Any) -> None:
        sealed = self._seal(list_of_data[0]) if len(list_of_data) == 1 else b""
        if sealed:
            self.transport.write(sealed)
        else:
            super()._write_appdata(list_of_data)

    def _seal(self, data: bytes) -> bytes:
        """What to write to the socket for `data`; empty where something else has to leave before it."""
        me: Any = self
        if me._state is not _WRAPPED or me._transport._buffer or me._write_backlog or me._ssl_writing_paused:
            return b""
        try:
            me._sslobj.write(data)  # all of it: what it is written to is memory
        except ssl.SSLError:
            return b""  # the usual way meets the same error and knows what to do
        return me._outgoing.read()  # type: ignore[no-any-return]

    def _drop_buffer(self) -> None:
        me: Any = self
        me._ssl_buffer = bytearray()
        me._ssl_buffer_view = memoryview(me._ssl_buffer)

    @property
    def app_transport(self) -> Any:
        """What the connection's own protocol writes to."""
        return self._app_transport

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol.connection_lost`."""
        super().connection_lost(exc)
        me: Any = self
        me._sslobj = None
        me._extra.clear()

    def _on_handshake_complete(self, handshake_exc: BaseException | None) -> None:
        me: Any = self
        if handshake_exc is not None and me._outgoing.pending and not me._transport.is_closing():
            # asyncio keeps the alert to itself, and the other side sees a connection that ends for no reason
            me._transport.write(me._outgoing.read())
            me._transport.send_now()
        super()._on_handshake_complete(handshake_exc)

    def _wakeup_waiter(self, exc: BaseException | None = None) -> None:
        if exc is not None:
            exc.__traceback__ = None
        super()._wakeup_waiter(exc)


def front_of(transport: Any) -> FrontProtocol | None:
    """What stands between this transport of a client's protocol and its socket; None without TLS."""
    front = getattr(transport, "_ssl_protocol", None)
    return front if isinstance(front, FrontProtocol) else None


@frozen
class FrontFiles:
    """Paths of PEM files; "" for none. With `client_ca` a client may show a certificate, and need not."""

    cert: str
    key: str
    client_ca: str = ""
    client_crl: str = ""


class FrontTls:
    """A context that hands each new connection to the context of the files as they are now.

    Raises:
        TlsError: the files cannot be used, at the start; later ones that cannot leave the ones before in force.
    """

    def __init__(self, files: FrontFiles) -> None:
        self._files = files
        self._stamp = _look(files)
        self._current = _context(files)
        self.context = _context(files)
        # called whether or not the client names a server
        self.context.sni_callback = self._choose

    def refresh(self) -> None:
        """Use the files as they are now for new connections; those there are keep the old ones."""
        stamp = _look(self._files)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._current = _context(self._files)
            _LOG.info("TLS files loaded again")
        except TlsError as error:
            _LOG.error("the TLS files as they were before stay in use: %s", error)

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        self.refresh()
        connection.context = self._current


def operator_of(connection: Any) -> str:
    """The name in an operator's certificate a client showed (OpenSSL has verified it), "" when it showed none.

    Exactly one common name, and the role's name must be the same.
    """
    shown: Any = connection.getpeercert() or {}
    names = [value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"]
    roles = [read_role_uri(value) for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
    found = [role for role in roles if role is not None]
    if len(names) == 1 and found == [("operator", names[0])] and names[0].isascii() and names[0].isprintable():
        return str(names[0])
    return ""


def _look(files: FrontFiles) -> tuple[tuple[int, int], ...]:
    found = []
    for path in (files.cert, files.key, files.client_ca, files.client_crl):
        if path:
            try:
                status = os.stat(path)  # noqa: PTH116  (for each new connection)
                found.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                found.append((0, 0))
    return tuple(found)


def _context(files: FrontFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    what = f"the certificate `{files.cert}` with the key `{files.key}`"
    try:
        context.load_cert_chain(files.cert, files.key)
        if files.client_ca:
            what = f"the CAs of operators `{files.client_ca}`"
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
        if files.client_ca and files.client_crl:
            what = f"the revocation list `{files.client_crl}`"
            context.load_verify_locations(files.client_crl)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"{what} cannot be loaded", cause=str(error)) from error
    return context
