"""Where a profile's model comes from: the syntax of `model:`."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_HF = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<rev>[\w./-]{1,200}))?(?::(?P<file>[^\0:]{1,500}))?",
    re.ASCII,
)
_PYPI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9][\w.-]{0,99})==(?P<version>[\w.+!-]{1,60}):(?P<file>[^\0:#]{1,500})#sha256=[0-9a-f]{64}(?:&size=\d{1,15})?",
    re.ASCII,
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.]*:")
_FORMS = (
    "write a path in a node's `model_dirs`, an absolute path, `file:///PATH`, `hf:ORG/REPO@REVISION:FILE`, "
    "`https://…#sha256=HEX` or `pypi:PACKAGE==VERSION:FILE#sha256=HEX`"
)


def check_model_source(text: str) -> str:
    """Return `text` when it names a model in one of the ways a node can fetch or find it.

    Raises:
        ValueError: it does not; with words.
    """
    if not text or any(ord(c) < 32 or ord(c) == 127 for c in text) or len(text) > 2000:
        raise ValueError(f"is not a model source, {_FORMS}")
    if text.startswith("hf:"):
        _file_within(_match(_HF, text, "`hf:ORG/REPO@REVISION:FILE`")["file"])
    elif text.startswith("pypi:"):
        _file_within(_match(_PYPI, text, "`pypi:PACKAGE==VERSION:FILE#sha256=HEX`, 64 lower-case hex digits")["file"])
    elif text.startswith(("https://", "http://")):
        _check_url(text)
    elif text.startswith("file:"):
        if not re.fullmatch(r"file:///[^?#]+", text):
            raise ValueError("expected `file:///PATH`")
        _file_within(text.removeprefix("file:///"))
    elif _SCHEME.match(text):
        raise ValueError(f"`{text[:80]}` is not a model source, {_FORMS}")
    else:
        _file_within(text.removeprefix("/"))
    return text


def _match(pattern: re.Pattern[str], text: str, form: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"`{text[:120]}` is not {form}")
    return match


def _file_within(name: str | None) -> None:
    if name is not None and (name.startswith("/") or not name or ".." in name.split("/")):
        raise ValueError("a model's file must be a path without `..`")


def _check_url(text: str) -> None:
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError as error:
        raise ValueError("is not a URL") from error
    if parts.username is not None or parts.password is not None:
        raise ValueError("a model's URL must not hold a user name or password")
    if not host or not parts.path.strip("/"):
        raise ValueError("expected `https://HOST/PATH#sha256=HEX`")
    if not re.fullmatch(r"sha256=[0-9a-f]{64}(?:&size=\d{1,15})?", parts.fragment, re.ASCII):
        raise ValueError("a model's URL must end in `#sha256=` and 64 lower-case hex digits")
