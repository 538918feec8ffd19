"""What certificates are good for at the agents' door: who may come in, join, renew, and who has to go."""

from __future__ import annotations

import logging
from typing import Protocol

from cryptography import x509

from llmgw.domain.identity import Certified
from llmgw.errors import LinkError, LlmgwError, TlsError, WireError
from llmgw.system.clock import Clock
from llmgw.wire.conn import Conn
from llmgw.wire.identity import Identity
from llmgw.wire.link import Link
from llmgw.wire.messages import PROTOCOL, Authority, Enroll, Issued, Join, Message
from llmgw.wire.tls import TlsSource

log = logging.getLogger(__name__)

_RENEW_AGAIN_S = 10.0


class Registrar(Protocol):
    """Who signs certificates (`server.join.Registrar`). Called by worker threads; each raises LlmgwError in words."""

    @property
    def signs(self) -> bool: ...

    def authority(self) -> str: ...

    def enroll(self, token: str, node_id: str, csr: str) -> tuple[str, Certified]: ...

    def renew(self, node_id: str, csr: str) -> tuple[str, Certified]: ...


class Credentials:
    """Safe to use from any thread.

    Args:
        tls: None for plain text, where nothing is checked and nothing signed.
        registrar: None signs nothing.
    """

    def __init__(self, tls: TlsSource | None, registrar: Registrar | None, clock: Clock) -> None:
        self._tls = tls
        self._registrar = registrar
        self._clock = clock

    @property
    def renews(self) -> bool:
        """Whether agents may ask for a new certificate."""
        return self._tls is not None and self._registrar is not None and self._registrar.signs

    def join(self, link: Link, conn: Conn, message: Message) -> None:
        """Answer a node that has no certificate yet.

        Raises:
            LlmgwError: it is refused; says why.
        """
        if not conn.secure or self._tls is None or self._registrar is None:
            raise TlsError("this server takes no joining nodes", cause="`agents.tls` is not set")
        match message:
            case Join(protocol, version):
                check_protocol(protocol, version)
                # Refuse before the node shows its token when there is nothing to sign with.
                if not self._registrar.signs:
                    self._registrar.enroll("", "none", "")
                link.send(conn, Authority(self._registrar.authority()))
            case Enroll(token, node_id, csr):
                pem, _ = self._registrar.enroll(token, node_id, csr)
                link.send(conn, Issued(pem))
                link.close(conn, LinkError(f"node `{node_id}` joined, it dials again with its certificate"))

    def renew(self, node_id: str, csr: str, since_last_s: float | None) -> tuple[Issued, Certified | None]:
        """Sign for a connected node, or say why not; what was signed.

        Args:
            since_last_s: seconds since it last asked on this connection, None when it did not.
        """
        if self._registrar is None or self._tls is None:
            return Issued(error="this server signs no certificates"), None
        if since_last_s is not None and since_last_s < _RENEW_AGAIN_S:
            return Issued(error=f"asked again within {_RENEW_AGAIN_S:g} s, ask later"), None
        try:
            pem, made = self._registrar.renew(node_id, csr)
        except LlmgwError as error:
            log.error("cannot renew the certificate of node `%s`: %s", node_id, error)
            return Issued(error=error.words()), None
        return Issued(pem), made

    def check(self, certificate: x509.Certificate | None) -> None:
        """OpenSSL has looked at the handshake; the list may have changed since.

        Raises:
            TlsError: the certificate is revoked or has expired.
        """
        if certificate is None or self._tls is None:
            return
        why = self._tls.revoked(certificate)
        if why is None and certificate.not_valid_after_utc.timestamp() < self._clock.now():
            why = f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        if why is not None:
            raise TlsError(f"certificate {why.split()[0]}: serial {certificate.serial_number:x} is {why}")


def check_protocol(protocol: int, version: str) -> None:
    """This version and its neighbours may talk.

    Raises:
        WireError: the peer is too old or too new; says which.
    """
    if abs(protocol - PROTOCOL) > 1:
        raise WireError(
            f"the agent speaks protocol {protocol}, this server {PROTOCOL}",
            cause=f"the agent is llmgw {version[:40]!a}",
            hint="bring both to neighbouring versions",
        )


def check_node(identity: Identity | None, node_id: str) -> None:
    """The certificate must be that of the node the agent says it is.

    Raises:
        TlsError: it is another's, or there is none.
    """
    if identity is None:
        raise TlsError("the agent shows no certificate")
    if identity.role != "node":
        whose = f"that of {identity.role} `{identity.name}`" if identity.role else f"`{identity.name}`, without a role"
        raise TlsError(f"the certificate is {whose}, a node's is needed", hint="`llmgw ctl cert issue-client NODE`")
    if identity.name != node_id:
        raise TlsError(
            f"the certificate is for node `{identity.name[:80]}`, the agent says it is node `{node_id}`",
            hint="set `node_id` to the certificate's name, or issue one for this node",
        )
