"""Asking a source's API: repeated when it breaks, JSON held to a shape, failures in words."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

from llmgw.errors import HttpError, InstallError
from llmgw.system import http_words
from llmgw.system.http import Http, Response
from llmgw.system.retry import RetryPolicy, retry_after, wait
from llmgw.units import format_duration

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+~-]{0,199}")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_HOPS = 3


def ask(
    http: Http,
    url: str,
    what: str,
    *,
    headers: Mapping[str, str] | None = None,
    policy: RetryPolicy | None = None,
    stop: threading.Event | None = None,
) -> Response:
    """GET a small answer; 5xx and broken connections are tried again. Redirects are followed on the same origin only.

    Args:
        what: who is asked, for the words, such as `GitHub`.

    Raises:
        InstallError: no answer, or only 5xx.
    """
    policy = policy or RetryPolicy()
    failures = 0
    while True:
        after: float | None = None
        try:
            response = _follow(http, url, headers or {})
            if response.status < 500:
                return response
            cause = f"{what} answered {response.status}"
            after = retry_after(response.headers)
        except HttpError as error:
            cause = error.cause
        failures += 1
        pause = policy.pause(failures, after)
        if pause is None:
            later = f", and asks to come back in {format_duration(after)}" if after else ""
            raise InstallError(f"cannot ask {what}", cause=cause + later, retry_after_s=after)
        if wait(stop, pause):
            raise InstallError(f"asking {what} was stopped")


def _follow(http: Http, url: str, headers: Mapping[str, str]) -> Response:
    here = url
    for _ in range(_HOPS + 1):
        response = http.request("GET", here, headers=headers, timeout_s=30.0)
        location = response.headers.get("location", "")
        if response.status not in (301, 302, 307, 308) or not location:
            return response
        try:
            there = urljoin(here, location)
            same = urlsplit(there)[:2] == urlsplit(here)[:2]
        except ValueError:
            same = False
        if not same:
            raise HttpError(
                f"asking `{http_words.shown(url)}` failed",
                cause=f"{http_words.peer(url)} redirects the question to another host",
            )
        here = there
    raise HttpError(f"asking `{http_words.shown(url)}` failed", cause=f"{http_words.peer(url)} redirects in a circle")


def parse_json(response: Response, what: str) -> Any:
    """The JSON of an answer.

    Raises:
        InstallError: it is not JSON.
    """
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError) as error:
        kind = response.headers.get("content-type", "").partition(";")[0]
        html = " (an HTML page: a proxy or a login page may answer in its place)" if "html" in kind else ""
        raise InstallError(f"cannot read the answer of {what}", cause=f"it is not JSON{html}") from error


def size_of(value: object) -> int | None:
    """A size from JSON, None when it is not a plain number of bytes."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 50 else None


def normal_arch(arch: str) -> str:
    """One spelling per architecture: that of `uname -m`."""
    return {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}.get(arch.lower(), arch.lower())
