"""HTTP as a client: the one urllib3 pool. It never follows a redirect and never decodes a body."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from attrs import field, frozen

import llmgw
from llmgw.errors import HttpError
from llmgw.system import http_words

if TYPE_CHECKING:
    import urllib3

_READ = 65536


class Headers(Mapping[str, str]):
    """Header fields of an answer; names are case-insensitive, repeated fields are joined by `, `."""

    def __init__(self, fields: Mapping[str, str] | None = None) -> None:
        self._fields: dict[str, str] = {}
        for name, value in (fields or {}).items():
            self._fields[name.lower()] = value

    def __getitem__(self, name: str) -> str:
        return self._fields[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Headers({sorted(self._fields)})"


@frozen
class Response:
    """A whole answer. Any status is an answer, 3xx, 4xx and 5xx too."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=lambda body: f"<{len(body)} bytes>")


class Stream:
    """An answer whose body is still coming. Iterate it for the raw bytes, in pieces as they arrive (64 KiB at most)."""

    def __init__(self, raw: urllib3.BaseHTTPResponse, url: str) -> None:
        self.status: int = raw.status
        self.headers: Mapping[str, str] = Headers(dict(raw.headers.items()))
        self._raw = raw
        self._url = url

    def __iter__(self) -> Iterator[bytes]:
        """Yield pieces until the body ends.

        Raises:
            HttpError: the connection broke, the body was cut short, or nothing came for `read_timeout_s`.
        """
        with _mapped("reading", self._url):
            while piece := self._raw.read1(_READ, decode_content=False):
                yield piece

    def abort(self) -> None:
        """Wake a reader in another thread: its iteration ends, or raises HttpError."""
        with contextlib.suppress(Exception):  # whatever the socket's state is, there is nothing left to do about it
            self._raw.shutdown()


class Http:
    """The process's HTTP client, safe to share between threads. Close it (or use `with`) when done.

    Args:
        user_agent: sent with each request; None means `llmgw/VERSION`.
        ca_file: PEM file of the authorities to trust; None means the machine's own store (`SSL_CERT_FILE` counts).
        certificate: PEM files of a client certificate and its key, shown to every server that asks for one.
        machine_cas: trust the machine's own store beside `ca_file`.
        use_proxies: take `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy` from the environment. This machine's
            own addresses are never asked for through a proxy.
    """

    def __init__(
        self,
        user_agent: str | None = None,
        ca_file: str | None = None,
        use_proxies: bool = True,
        machine_cas: bool = False,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        self._certificate = certificate
        self._machine_cas = machine_cas
        self._user_agent = user_agent or f"llmgw/{llmgw.__version__}"
        self._ca_file = ca_file
        self._use_proxies = use_proxies
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        self._pools: dict[tuple[str, bool], urllib3.PoolManager] = {}

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the idle connections. The client stays usable."""
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.clear()

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 5.0,
        max_bytes: int = 16 << 20,
    ) -> Response:
        """Ask and read the whole answer.

        Args:
            timeout_s: from the first byte sent to the last byte read, however slowly they trickle.
            connect_timeout_s: for the connection, and for its TLS handshake.
            max_bytes: a longer body is an error.

        Raises:
            HttpError: no answer came (`status` is None), or its body was cut short or too long (`status` is set).
        """
        deadline = time.monotonic() + timeout_s
        with self._open(method, url, headers, body, min(connect_timeout_s, timeout_s), timeout_s) as stream:
            collected = bytearray()
            for piece in stream:
                collected += piece
                cause = ""
                if len(collected) > max_bytes:
                    cause = f"the answer is longer than {max_bytes} bytes"
                elif time.monotonic() > deadline:
                    cause = f"timed out: the answer was not complete after {timeout_s:g} s"
                if cause:
                    raise HttpError(f"asking `{http_words.shown(url)}` failed", status=stream.status, cause=cause)
            return Response(stream.status, stream.headers, bytes(collected))

    def stream(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 30.0,
        method: str = "GET",
        body: bytes | None = None,
    ) -> contextlib.AbstractContextManager[Stream]:
        """Ask and hand out the answer as it comes: status, headers, and the raw bytes by iteration.

        Args:
            read_timeout_s: longest silence.

        Raises:
            HttpError: no answer came; iterating raises it too.
        """
        return self._open(method, url, headers, body, connect_timeout_s, read_timeout_s)

    @contextlib.contextmanager
    def _open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: bytes | None,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> Iterator[Stream]:
        import urllib3

        fields = {"User-Agent": self._user_agent, "Accept-Encoding": "identity", **(headers or {})}
        with _mapped("asking", url):
            raw = self._pool(url).request(
                method,
                url,
                headers=fields,
                body=body,
                timeout=urllib3.Timeout(connect=connect_timeout_s, read=read_timeout_s),
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
            )
        finished = False
        try:
            yield Stream(raw, url)
            finished = raw.closed
        finally:
            if finished:
                raw.release_conn()
            else:  # a connection with unread bytes on it must not serve the next request
                raw.close()

    def _pool(self, url: str) -> urllib3.PoolManager:
        import urllib3

        if not http_words.is_web_address(url):
            raise HttpError(f"asking `{http_words.shown(url)}` failed", cause="it is not an http or https address")
        proxy = self._proxy_for(url)
        # reading the authorities costs tens of milliseconds: `ctl` on plain http must not pay for them
        key = (proxy, "https:" in (url[:6].lower(), proxy[:6].lower()))
        with self._lock:
            pool = self._pools.get(key)
            if pool is None:
                options: dict[str, Any] = {"num_pools": 16, "maxsize": 8}
                if key[1]:
                    options["ssl_context"] = self._context()
                if proxy:
                    parts = urlsplit(proxy)
                    if parts.username:
                        pair = f"{parts.username}:{parts.password or ''}"
                        options["proxy_headers"] = urllib3.make_headers(proxy_basic_auth=pair)
                    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
                    pool = urllib3.ProxyManager(bare, **options)
                else:
                    pool = urllib3.PoolManager(**options)
                self._pools[key] = pool
            return pool

    def _proxy_for(self, url: str) -> str:
        """The proxy's URL, "" for none."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if not self._use_proxies or is_loopback(host) or proxy_bypass_environment(parts.netloc.rpartition("@")[2]):
            return ""
        proxies = getproxies_environment()
        proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
        if not proxy:
            return ""
        if "://" not in proxy:
            proxy = f"http://{proxy}"
        if urlsplit(proxy).scheme not in ("http", "https"):
            raise HttpError(
                f"asking `{http_words.shown(url)}` failed",
                cause=f"the environment names the proxy `{http_words.shown(proxy)}`, which is not an http proxy",
                hint="set `https_proxy` to an `http://` proxy, or name the host in `no_proxy`",
            )
        return proxy

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            try:
                context = ssl.create_default_context(cafile=self._ca_file)
                if self._machine_cas:
                    context.load_default_certs()
                self._tls = context
            except (OSError, ssl.SSLError) as error:
                raise HttpError(
                    f"cannot read the authorities in `{self._ca_file}`",
                    cause=http_words.tls_file_words(error),
                    code="tls-files",
                ) from error
            if self._certificate is not None:
                try:
                    self._tls.load_cert_chain(*self._certificate)
                except (OSError, ssl.SSLError) as error:
                    (cert, key), self._tls = self._certificate, None
                    raise HttpError(
                        f"cannot use the certificate `{cert}` with the key `{key}`",
                        cause=http_words.tls_file_words(error),
                        code="tls-files",
                    ) from error
        return self._tls


def is_loopback(host: str) -> bool:
    """Whether a host as written in a URL (no brackets) is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _mapped(doing: str, url: str) -> Iterator[None]:
    """Turn the library's exceptions into HttpError with the cause in words."""
    import urllib3

    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError, ValueError, http.client.HTTPException) as error:
        raise HttpError(f"{doing} `{http_words.shown(url)}` failed", cause=_cause(error, url)) from error


def _cause(error: BaseException, url: str) -> str:
    import urllib3.exceptions as u3

    peer = http_words.peer(url)
    if isinstance(error, u3.ProxyError):
        error, peer = error.original_error, "the proxy"
    for each in http_words.chain(error):
        if isinstance(each, u3.NameResolutionError):
            return f"the name of {peer} does not resolve"
        if isinstance(each, u3.ConnectTimeoutError) and not isinstance(each, u3.NewConnectionError):
            return f"{peer} timed out: it did not accept the connection"
        if isinstance(each, u3.ReadTimeoutError):
            return f"{peer} timed out: it sent nothing more"
        if isinstance(each, u3.IncompleteRead):
            return f"{peer} closed the connection before the answer was complete"
        if words := http_words.known(each, peer):
            return words
    return http_words.other(error, peer)
