"""Following redirects by hand: three at most, to https and allowed hosts only, and no credential goes with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import SplitResult, urljoin, urlsplit

from llmgw.errors import FetchError
from llmgw.system import http_words
from llmgw.system.http import Http, Stream

_STATUSES = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
LOOPBACK_HOSTS = frozenset({"127.0.0.1:*", "localhost:*", "[::1]:*"})


@contextlib.contextmanager
def open_following(
    http: Http,
    url: str,
    *,
    headers: Mapping[str, str],
    credentials: Mapping[str, str],
    allowed_hosts: Iterable[str],
    allow_http: bool,
    connect_timeout_s: float,
    read_timeout_s: float,
    most: int = 3,
) -> Iterator[Stream]:
    """GET `url`, following redirects.

    Args:
        headers: sent with every hop.
        credentials: header fields sent to the origin of `url` only (scheme, host and port).
        allowed_hosts: where a redirect may lead beside the origin of `url`: `host` (on the scheme's own port),
            `host:port`, `host:*`, or `.suffix` for every host below it.
        allow_http: plain http is allowed, and may redirect to plain http. https never leads to http.
        most: redirects followed.

    Raises:
        FetchError: a redirect is refused, or there are too many.
        HttpError: no answer came.
    """
    origin = urlsplit(url)
    here = url
    _check(origin, origin, allowed_hosts, allow_http, url)
    for hop in range(most + 1):
        mine = {**headers, **credentials} if _same(urlsplit(here), origin) else headers
        with http.stream(
            here, headers=mine, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
        ) as stream:
            if stream.status not in _STATUSES:
                yield stream
                return
            location = stream.headers.get("location", "")
        if not location:
            raise FetchError(f"cannot fetch `{http_words.shown(url)}`", cause="it redirects without saying where to")
        if hop == most:
            break
        try:
            target = urljoin(here, location)
            parts = urlsplit(target)
            _port(parts)
        except ValueError as error:
            raise FetchError(
                f"cannot fetch `{http_words.shown(url)}`", cause="it redirects to something that is not an address"
            ) from error
        _check(parts, urlsplit(here), allowed_hosts, allow_http, url, origin)
        here = target
    raise FetchError(f"cannot fetch `{http_words.shown(url)}`", cause=f"it redirects more than {most} times")


def _check(
    target: SplitResult,
    source: SplitResult,
    allowed_hosts: Iterable[str],
    allow_http: bool,
    url: str,
    origin: SplitResult | None = None,
) -> None:
    cause = ""
    if target.scheme not in ("https", "http"):
        cause = f"`{target.scheme}` is not a scheme to fetch from"
    elif target.scheme == "http" and not (allow_http and source.scheme == "http"):
        cause = "plain http is not allowed here" if origin is None else "it redirects to plain http"
    elif origin is not None and not _same(target, origin) and not host_allowed(target.geturl(), allowed_hosts):
        cause = f"it redirects to `{target.hostname}`, which is not one of the hosts this source may use"
    if cause:
        raise FetchError(f"cannot fetch `{http_words.shown(url)}`", cause=cause)


def _port(parts: SplitResult) -> int:
    return parts.port or _PORTS.get(parts.scheme, 0)


def _same(one: SplitResult, other: SplitResult) -> bool:
    return (one.scheme, one.hostname, _port(one)) == (other.scheme, other.hostname, _port(other))


def host_allowed(url: str, allowed_hosts: Iterable[str]) -> bool:
    """Whether the host of `url` is one of `allowed_hosts`, written as for `open_following`."""
    target = urlsplit(url)
    host = (target.hostname or "").lower()
    if ":" in host:
        host = f"[{host}]"
    port = _port(target)
    own_port = port == _PORTS.get(target.scheme)
    for allowed in allowed_hosts:
        if allowed in (f"{host}:{port}", f"{host}:*") or (own_port and allowed == host):
            return True
        if own_port and allowed.startswith(".") and host.endswith(allowed):
            return True
    return False


def same_origin(one: str, other: str) -> bool:
    """Whether two URLs have the same scheme, host and port."""
    return _same(urlsplit(one), urlsplit(other))
