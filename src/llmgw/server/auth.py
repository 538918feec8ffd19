"""Who may do what on the admin socket: token, sessions of the page, Host and Origin checks, body limit."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import threading
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmgw.errors import LlmgwError, StateError
from llmgw.system.clock import Clock
from llmgw.system.files import make_dir, read_text, write_atomic

log = logging.getLogger(__name__)

COOKIE = "llmgw_session"
BODY_LIMIT = 1 << 20
SESSION_S = 12 * 3600.0
_SESSIONS_MAX = 1000
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")
_SAFE = ("GET", "HEAD", "OPTIONS")
_HEADERS = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class AdminToken:
    """The bearer token of `llmgw ctl` and of the page's login. Only its hash is kept in memory.

    Args:
        token: the token, or `sha256:HEX` of it: then it stands in the clear nowhere on the server.
    """

    def __init__(self, token: str) -> None:
        hashed = _HASHED.fullmatch(token)
        self._digest = bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(token.encode()).digest()

    def accepts(self, text: str) -> bool:
        """Whether `text` is the token; takes the same time whatever it is."""
        return hmac.compare_digest(hashlib.sha256(text.encode("utf-8", "replace")).digest(), self._digest)


def load_token(path: Path) -> AdminToken:
    """Read the token file; make one (mode 0600) when there is none.

    Raises:
        StateError: the file is readable by everybody, holds no usable token, or cannot be read or written.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        make_dir(path.parent, 0o700)
        token = f"llmgw-admin-{secrets.token_urlsafe(32)}"
        write_atomic(path, f"{token}\n".encode(), 0o600)
        return AdminToken(token)
    except OSError as error:
        raise StateError(f"cannot read the admin token `{path}`", cause=error.strerror or str(error)) from error
    if mode & 0o007:
        raise StateError(
            f"the admin token `{path}` can be read by every user of this machine", hint=f"run `chmod 600 {path}`"
        )
    token = (read_text(path, 4096) or "").strip()
    if len(token) < 16:
        raise StateError(
            f"the admin token `{path}` is unusable",
            cause="it cannot be read, or is shorter than 16 characters",
            hint="delete the file, and a new token is made at the next start",
        )
    return AdminToken(token)


class Sessions:
    """Logins of the page: random ids, kept hashed, forgotten when they expire or the server ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def create(self) -> str:
        """A new session's id."""
        made = secrets.token_urlsafe(32)
        now = self._clock.monotonic()
        with self._lock:
            alive = {key: until for key, until in self._until.items() if until > now}
            if len(alive) >= _SESSIONS_MAX:
                alive.pop(min(alive, key=lambda key: alive[key]))
            self._until = {**alive, _hash(made): now + SESSION_S}
        return made

    def valid(self, session: str) -> bool:
        """Whether the id belongs to a session that has not expired."""
        with self._lock:
            return self._until.get(_hash(session), 0.0) > self._clock.monotonic()

    def end(self, session: str) -> None:
        """Forget a session."""
        with self._lock:
            self._until.pop(_hash(session), None)


class Gate:
    """The rules.

    Args:
        hosts: names this server is reached by, apart from addresses and `localhost`; None takes any. A page that is
            open to this machine needs the list: another site's script could reach it through a name of its own.
        open_page: the page may be read without login (only this machine can connect).
        secure: clients connect over TLS, so the cookie is for TLS only.
        operators: the gateway names operators whose certificate it has verified; nobody else reaches this socket, and
            the gateway lets no such header of a client through.
    """

    def __init__(
        self,
        token: AdminToken,
        sessions: Sessions,
        *,
        hosts: Iterable[str] | None,
        open_page: bool,
        secure: bool,
        operators: bool = False,
    ) -> None:
        self.token = token
        self.sessions = sessions
        self.open_page = open_page
        self.secure = secure
        self._operators = operators
        self._hosts = {"localhost", *(host.lower() for host in hosts)} if hosts is not None else None

    def refuse(self, method: str, path: str, headers: Headers) -> tuple[int, LlmgwError] | None:
        """Status and error for a request that may not pass, None when it may."""
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self.known_host(host):
            return 421, LlmgwError(
                "this server does not answer to that name",
                cause=f"the Host header is {host[:100]!a}",
                hint="use the server's address, or a name that is in `http.listen`",
                code="host-unknown",
            )
        origins = headers.getlist("origin")
        if method not in _SAFE and any(not _same_origin(origin, host) for origin in origins):
            return 403, LlmgwError(
                "another site's page may not change anything here", cause="the Origin header is not this server's",
                code="origin-refused",
            )  # fmt: skip
        if method not in _SAFE and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return 403, LlmgwError(
                "another site's page may not change anything here", cause="the browser says the request is another's",
                code="origin-refused",
            )  # fmt: skip
        if path.startswith("/api/"):
            return self._refuse_api(headers)
        return None

    def known_host(self, host: str) -> bool:
        """Whether a Host header names this server. An address always does: a rebinding attack needs a name."""
        try:
            parts = urlsplit(f"//{host}")
            name, _ = parts.hostname, parts.port
        except ValueError:
            return False
        if not name or parts.path or parts.query or parts.fragment or "@" in host:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return self._hosts is None or name.lower() in self._hosts
        return True

    def may_read(self, headers: Headers) -> bool:
        """Whether the page may be shown: by session, by token, or to all on loopback."""
        session = session_of(headers)
        known = session is not None and self.sessions.valid(session)
        return self.open_page or known or self._bearer(headers) or self._operator(headers)

    def _operator(self, headers: Headers) -> bool:
        return self._operators and len(headers.getlist("x-forwarded-operator")) == 1

    def _bearer(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self.token.accepts(token.strip())

    def _refuse_api(self, headers: Headers) -> tuple[int, LlmgwError] | None:
        if self._bearer(headers) or self._operator(headers):
            return None
        given = "authorization" in headers
        return 401, LlmgwError(
            "the admin token is wrong" if given else "the admin API needs a token",
            hint="send `Authorization: Bearer TOKEN`; the server keeps the token in the file `http.admin_token_file`, "
            "`admin.token` beside its state by default",
            code="unauthorized",
        )


class Guard:
    """ASGI middleware: applies the gate before anything is read, limits bodies, and adds the security headers."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        refused = self._gate.refuse(scope["method"], scope["path"], headers)
        if refused is None and _length(headers) > BODY_LIMIT:
            refused = 413, too_large()
        if refused is not None:
            status, error = refused
            # what follows an unread body on this connection is not a request
            extra = {"connection": "close"} | ({"www-authenticate": "Bearer"} if status == 401 else {})
            await JSONResponse(error_body(error), status, extra)(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)


def too_large() -> LlmgwError:
    """The error for a body over the limit."""
    return LlmgwError("the request is too large", cause=f"at most {BODY_LIMIT} bytes are taken", code="body-too-large")


def error_body(error: LlmgwError, problems: Iterable[str] = ()) -> dict[str, object]:
    """An error as the admin API gives it."""
    told: dict[str, object] = {
        "code": error.code,
        "message": error.message,
        "cause": error.cause,
        "hint": error.hint,
    }
    listed = list(problems)
    return {"error": told | ({"problems": listed} if listed else {})}


def session_of(headers: Headers) -> str | None:
    """The session id in the Cookie header, None when there is none."""
    try:
        cookie = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return None
    return cookie[COOKIE].value if COOKIE in cookie else None


def _same_origin(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() else 0


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
