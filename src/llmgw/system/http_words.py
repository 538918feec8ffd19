"""Why an HTTP request got no answer, in words, without a secret in them."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from urllib.parse import urlsplit

_ERRNO_WORDS = {
    errno.ECONNREFUSED: "refused the connection",
    errno.EHOSTUNREACH: "cannot be reached: no route to host",
    errno.ENETUNREACH: "cannot be reached: no route to its network",
    errno.ECONNRESET: "reset the connection",
    errno.EPIPE: "closed the connection",
    errno.ETIMEDOUT: "timed out",
}

# X509_V_ERR_* of x509_vfy.h: not yet valid, expired; wrong host name, wrong IP address
_DATES = (9, 10)
_NAMES = (62, 64)
TRUST = "trust the CA that issued its certificate"


def shown(url: str) -> str:
    """A URL as it may be shown: without user, password, query (signed URLs carry their secret there) and fragment."""
    try:
        parts = urlsplit(url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    except ValueError:
        return "that address"


def is_web_address(url: str) -> bool:
    """Whether a URL is `http` or `https` and has a host."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def peer(url: str) -> str:
    """Host and port of a URL, in backticks."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return "the server"
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"`{host}:{port}`" if host else "the server"


def os_words(error: BaseException) -> str:
    """An OSError in the kernel's words."""
    return getattr(error, "strerror", None) or str(error)


def tls_file_words(error: OSError) -> str:
    """Why a certificate, a key or a list of authorities could not be loaded."""
    if not isinstance(error, ssl.SSLError):
        return os_words(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    return f"it holds nothing of that kind in PEM form ({(error.reason or 'not readable').lower().replace('_', ' ')})"


def tls_trouble(error: BaseException) -> str | None:
    """What to do when a TLS connection did not come about, "" when nobody knows; None for any other failure."""
    for each in chain(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            if each.verify_code in _DATES:
                return "give the server a new certificate, and look at the clocks of both machines"
            if each.verify_code in _NAMES:
                return "ask at a name or address its certificate was issued for"
            return TRUST
        if isinstance(each, ssl.SSLError):
            if each.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
                return "what answers there does not speak TLS: write `http://`, or name another port"
            return ""
    return None


def chain(error: BaseException) -> list[BaseException]:
    """An exception, the exceptions it carries and those that caused it, outermost first."""
    found: list[BaseException] = []
    queue: list[object] = [error]
    while queue:
        each = queue.pop(0)
        if isinstance(each, BaseException) and not any(each is other for other in found):
            found.append(each)
            queue += [*each.args, each.__cause__, each.__context__]
    return found


def known(error: BaseException, peer: str) -> str:
    """Words for a standard library exception; "" when it is not one of those that say enough."""
    if isinstance(error, socket.gaierror):
        return f"the name of {peer} does not resolve"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS problem: the certificate of {peer} is not trusted ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS problem with {peer}: {(error.reason or str(error)).lower().replace('_', ' ')}"
    if isinstance(error, TimeoutError):
        return f"{peer} timed out"
    if isinstance(error, http.client.RemoteDisconnected):
        return f"{peer} closed the connection without an answer"
    if isinstance(error, http.client.IncompleteRead):
        return f"{peer} closed the connection before the answer was complete"
    if isinstance(error, OSError) and error.errno in _ERRNO_WORDS:
        return f"{peer} {_ERRNO_WORDS[error.errno]}"
    return ""


def other(error: BaseException, peer: str) -> str:
    """Words for whatever `known` does not know. The exception's own text is kept out unless the kernel wrote it."""
    for each in chain(error):
        if isinstance(each, http.client.HTTPException):
            return f"{peer} does not speak HTTP ({type(each).__name__})"
        if isinstance(each, OSError) and each.strerror:
            return f"{peer}: {each.strerror}"
        if isinstance(each, OSError) and "Tunnel connection failed" in str(each):
            return f"{peer} refused the tunnel ({str(each).rpartition('failed: ')[2]})"
    if isinstance(error, ValueError):
        return "the address, or a header of the request, has characters that are not allowed"
    return f"{peer}: {type(error).__name__}"
