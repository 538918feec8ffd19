"""Certificates a server signs: for nodes that hold a join token, and for connected nodes whose own grows old."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from llmgw.domain.identity import Certified
from llmgw.domain.ids import check_node_id
from llmgw.errors import LlmgwError, PkiError, UsageError
from llmgw.pki.issuer import Issuer, request_key
from llmgw.pki.keys import certificate_pem, read_certificates
from llmgw.system.clock import Clock
from llmgw.wire.identity import certified

log = logging.getLogger(__name__)

LINE_PREFIX = "llmgw-join-1."
LEAST_TTL_S, MOST_TTL_S = 60.0, 7 * 86400.0


class TokenStore(Protocol):
    """Where the hashes of join tokens are kept (`server.state.State`)."""

    def add_join_token(self, sha256: str, node_id: str | None, expires: float, now: float) -> None:
        """Keep a token's hash; forgets those that have expired."""
        ...

    def join_token(self, sha256: str, now: float) -> tuple[str | None] | None:
        """The node a token is bound to (None: to none), in a tuple; None when there is no such token any more."""
        ...

    def spend_join_token(self, sha256: str, now: float) -> bool:
        """Take a token away; true for exactly one caller."""
        ...

    def nodes(self) -> tuple[str, ...]:
        """Ids of all nodes that ever connected."""
        ...

    def add_node(self, node_id: str, now: float) -> None:
        """Remember a node."""
        ...


@frozen
class JoinToken:
    """A token just made. `line` is the only place where it stands in the clear."""

    line: str
    node_id: str | None
    expires: float

    def __repr__(self) -> str:
        return f"JoinToken(node_id={self.node_id!r})"


class Registrar:
    """Signs for nodes with the key `agents.tls.ca_key`; without one it refuses, in words.

    Files are read at each signing: a rotated CA is used at once.

    Args:
        bundle: `agents.tls.ca`; the certificate of the key must be in it.
        key: None when this server does not hold a CA's key.
        cert: the server's own certificate: its names are what joining nodes dial.
        node_life_s: how long the certificates are valid.
    """

    def __init__(
        self, store: TokenStore, clock: Clock, *, bundle: Path, key: Path | None, cert: Path, node_life_s: float
    ) -> None:
        self._store = store
        self._clock = clock
        self._bundle = bundle
        self._key = key
        self._cert = cert
        self._life_s = node_life_s

    @property
    def signs(self) -> bool:
        """Whether this server holds a key to sign with."""
        return self._key is not None

    def issuer(self) -> Issuer:
        """The CA to sign with.

        Raises:
            PkiError: there is none, or it cannot be used; says why.
        """
        if self._key is None:
            raise PkiError(
                "this server signs no certificates",
                cause="`agents.tls.ca_key` is not set",
                hint="set it, or issue the certificate with `llmgw ctl cert issue-client NODE`",
            )
        return Issuer.load(self._bundle, self._key)

    def authority(self) -> str:
        """The CAs in use, PEM, for a node that is to prove this server by a fingerprint."""
        return b"".join(certificate_pem(each) for each in read_certificates(self._bundle)).decode()

    def create_token(self, node_id: str | None, ttl_s: float, address: str | None, port: int) -> JoinToken:
        """Make a join token.

        Args:
            node_id: the only node it is good for; None: any node that is not known yet.
            ttl_s: how long it is good, seconds.
            address: `HOST` or `HOST:PORT` agents dial; None: a name of the server's certificate.
            port: of the agents' socket.

        Raises:
            UsageError, NameInvalid: an argument is not usable.
            PkiError: this server cannot sign, or no CA in the bundle issued its certificate.
        """
        if node_id is not None:
            check_node_id(node_id)
        if not LEAST_TTL_S <= ttl_s <= MOST_TTL_S:
            raise UsageError("a join token lives from `1m` to `7d`", hint="`--ttl 1h`")
        self.issuer()
        own = read_certificates(self._cert)[0]
        host = _host_of(address, own, port)
        token = secrets.token_urlsafe(32)
        now = self._clock.now()
        self._store.add_join_token(_hash(token), node_id, now + ttl_s, now)
        line = {"server": f"https://{host}", "ca": self._fingerprint(own), "token": token}
        if node_id is not None:
            line["node"] = node_id
        text = base64.urlsafe_b64encode(json.dumps(line, separators=(",", ":")).encode()).decode().rstrip("=")
        log.info("join token made for %s", f"node `{node_id}`" if node_id else "any new node")
        return JoinToken(LINE_PREFIX + text, node_id, now + ttl_s)

    def enroll(self, token: str, node_id: str, csr: str) -> tuple[str, Certified]:
        """Spend a token on a certificate (PEM).

        Raises:
            PkiError: token or request are refused, in words; a refused request does not spend the token.
            NameInvalid: the node id is none.
        """
        check_node_id(node_id)
        issuer = self.issuer()
        now = self._clock.now()
        digest = _hash(token)
        found = self._store.join_token(digest, now)
        if found is None:
            raise _no_token()
        bound = found[0]
        if bound is not None and not hmac.compare_digest(bound.encode(), node_id.encode()):
            raise PkiError(
                "the join token is for another node", cause=f"it is not good for `{node_id}`", code="join-refused",
                hint="make one with `--node`, or give the agent the node id it is for",
            )  # fmt: skip
        if bound is None and node_id in self._store.nodes():
            raise PkiError(
                f"node `{node_id}` is known already",
                cause="a join token that is bound to no node is good for new nodes only",
                hint=f"`llmgw ctl join-token create --node {node_id}`",
                code="join-refused",
            )
        key = request_key(csr, node_id)
        if not self._store.spend_join_token(digest, now):
            raise _no_token()
        self._store.add_node(node_id, now)
        certificate = issuer.issue(node_id, "node", key, life_s=self._life_s, now=now)
        told = certified(certificate)
        log.info("node `%s` joined: certificate %s, %s", node_id, told.serial, told.words(now))
        return certificate_pem(certificate).decode(), told

    def renew(self, node_id: str, csr: str) -> tuple[str, Certified]:
        """A new certificate (PEM) for a node that is connected with one that is still good.

        Raises:
            PkiError: this server cannot sign, or the request is refused; says why.
        """
        now = self._clock.now()
        certificate = self.issuer().sign_request(csr, node_id, life_s=self._life_s, now=now)
        told = certified(certificate)
        log.info("node `%s` renewed: certificate %s, %s", node_id, told.serial, told.words(now))
        return certificate_pem(certificate).decode(), told

    def _fingerprint(self, own: x509.Certificate) -> str:
        for ca in read_certificates(self._bundle):
            try:
                own.verify_directly_issued_by(ca)
            except Exception:  # noqa: S112  (another CA of the bundle; the library raises several types)
                continue
            return ca.fingerprint(SHA256()).hex()
        raise PkiError(
            "cannot make a join line",
            cause=f"no CA in `{self._bundle}` issued the server's certificate",
            hint="put the CA that issued it into `agents.tls.ca`",
        )


def check_registrar(registrar: Registrar) -> None:
    """Fail at the start and not at the first signing.

    Raises:
        PkiError: `agents.tls.ca_key` is set and cannot be used.
    """
    if registrar.signs:
        registrar.issuer()


def _no_token() -> LlmgwError:
    return PkiError(
        "the join token is not good",
        cause="it was used already, has expired, or was never made here",
        hint="make a new one with `llmgw ctl join-token create`",
        code="join-refused",
    )


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _host_of(address: str | None, own: x509.Certificate, port: int) -> str:
    if address:
        if any(bad in address for bad in "/@?#") or not address.isprintable() or " " in address:
            raise UsageError(f"`{address[:100]}` is no address agents could dial", hint="write `HOST` or `HOST:PORT`")
        return address if address.rpartition(":")[2].isdecimal() and ":" in address else f"{address}:{port}"
    host = next(iter(_dialable(own)), None)
    if host is None:
        raise UsageError(
            "the address agents dial is not known", cause="the server's certificate names none",
            hint="say it with `--address HOST`",
        )  # fmt: skip
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _dialable(own: x509.Certificate) -> Iterable[str]:
    """Names first, then addresses; this machine's own loopback last."""
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    found = [name for name in names.get_values_for_type(x509.DNSName) if "*" not in name and "." in name]
    found += [str(each) for each in names.get_values_for_type(x509.IPAddress) if not each.is_loopback]
    return [
        *found,
        *(str(each) for each in names.get_values_for_type(x509.IPAddress)),
        *names.get_values_for_type(x509.DNSName),
    ]
