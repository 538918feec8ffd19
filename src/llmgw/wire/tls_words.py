"""OpenSSL's errors in words a person can act on: `certificate expired`, `unknown ca`, `certificate required`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from OpenSSL import SSL, crypto

from llmgw.errors import TlsError
from llmgw.wire.identity import check_server_name

# X509_V_ERR_*, openssl/x509_vfy.h
_VERIFY = {
    2: "unknown ca", 3: "no revocation list of its ca", 9: "certificate not yet valid", 10: "certificate expired",
    11: "revocation list not yet valid", 12: "revocation list expired", 18: "self-signed certificate, unknown ca",
    19: "unknown ca", 20: "unknown ca", 21: "unknown ca", 23: "certificate revoked", 24: "a ca that may not sign",
    25: "a ca beyond its path length", 26: "certificate for another purpose", 7: "bad signature",
}  # fmt: skip

_NO_LIST = 3

# RFC 8446 section 6.2 alerts, where plain words differ from the alert's name
_ALERTS = {
    "unsupported certificate": "certificate for another purpose",
    "revoked certificate": "certificate revoked",
    "bad certificate": "bad certificate",
    "decrypt error": "bad signature",
    # what OpenSSL says when our own check of the name refuses
    "internal error": "certificate for another name or role (or a fault inside the peer)",
    "protocol version": "no common TLS version",
    "handshake failure": "no common TLS parameters, or no certificate",
}

_REASONS = {
    "http request": "the peer speaks HTTP, not TLS",
    "wrong version number": "the peer does not speak TLS",
    "packet length too long": "the peer does not speak TLS",
    "unsupported protocol": "no common TLS version",
    "peer did not return a certificate": "certificate required",
}


class Notes(list[str]):
    """What is known of one handshake: why a certificate was not accepted, in words.

    Attributes:
        host: on the dialling end, the name the server's certificate must be for.
        refusal: set when the chain is good and the name, or the role, is not.
    """

    def __init__(self, host: str | None) -> None:
        super().__init__()
        self.host = host
        self.refusal: TlsError | None = None


def note_verify_failure(connection: SSL.Connection, certificate: crypto.X509, number: int, depth: int, ok: int) -> bool:
    """Verify callback: OpenSSL's verdict and, for a server, ours about its name; notes why it was no, which
    `SSL.Error` does not tell. Refusing here and not after the handshake makes OpenSSL tell the server by an alert.

    The notes are the connection's app data. It must never raise: an exception here would leave `do_handshake` as its
    own type.
    """
    if number == _NO_LIST and not depth:
        # A list was given, though not of this CA: while two CAs are in use the new one may have none yet.
        return True
    notes = connection.get_app_data()
    if not isinstance(notes, Notes):
        return bool(ok)
    if not ok:
        notes.append(_VERIFY.get(number, f"OpenSSL verify error {number}") + (" (of its ca)" if depth else ""))
    elif not depth and notes.host is not None:
        notes.refusal = _name_refusal(certificate, notes.host)
        return notes.refusal is None
    return bool(ok)


def _name_refusal(certificate: crypto.X509, host: str) -> TlsError | None:
    try:
        check_server_name(certificate.to_cryptography(), host)
    except TlsError as error:
        return error
    except Exception as error:
        return TlsError("the server's certificate cannot be read", cause=type(error).__name__)
    return None


def handshake_words(error: SSL.Error, notes: Iterable[str]) -> str:
    """Why a handshake, or the first read after it, failed, and which end said so."""
    mine = next(iter(notes), "")
    if mine:
        return f"{mine}: the peer's certificate is not accepted"
    text = openssl_words(error)
    found = re.search(r"alert (?:number \d+ )?(.+)", text)
    if found:
        alert = found[1].strip()
        return f"{_ALERTS.get(alert, alert)}: the peer does not accept this end's certificate or TLS"
    for reason, words in _REASONS.items():
        if reason in text:
            return words
    return text or "the TLS handshake failed"


def openssl_words(error: SSL.Error) -> str:
    """The reasons in an OpenSSL error, without its codes."""
    arguments: Any = error.args[0] if error.args else ()
    if isinstance(arguments, str):
        return arguments
    if isinstance(arguments, list):
        return "; ".join(str(entry[-1]) for entry in arguments if isinstance(entry, tuple) and entry)[:200]
    return " ".join(str(argument) for argument in error.args)[:200]
