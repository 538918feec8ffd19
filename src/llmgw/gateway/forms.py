"""Multipart bodies (RFC 7578): `model` and `stream` are read out of them, a file is only passed over.

Stricter than the parsers of engines, so that none of them can see another `model` than this one: no text before the
first boundary or after the last, one disposition per part, no field twice, no backslash before a quote, nothing that
looks like a boundary inside of a part.
"""

from __future__ import annotations

import re

from llmgw.gateway.bodies import Asked
from llmgw.gateway.errors import RequestRefused, refuse

FORM_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_VALUE = rb'(?:"(?:[^"\\\x00-\x08\x0a-\x1f\x7f]|\\(?!"))*+"|' + _TOKEN + rb")"
_PARAMS = rb"((?:[ \t]*;[ \t]*" + _TOKEN + rb"=" + _VALUE + rb")*+)"
_PARAM = re.compile(rb";[ \t]*(" + _TOKEN + rb")=(" + _VALUE + rb")")
_TYPE = re.compile(rb"(?i:multipart/form-data)" + _PARAMS + rb"[ \t]*;?[ \t]*")
_DISPOSITION = re.compile(rb"(?i:form-data)" + _PARAMS + rb"[ \t]*")
# RFC 2046, section 5.1.1; without quotes only what is a token too
_BOUNDARY = re.compile(rb"[0-9A-Za-z'+_.-]{1,70}|\"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]\"")
_LINE = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*+)\r\n")
_LINES = re.compile(rb"(?:" + _TOKEN + rb":[^\x00-\x08\x0a-\x1f\x7f]*+\r\n){1,16}+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_READ = ("model", "stream")
_PLAIN = (b"7bit", b"8bit", b"binary")
_HEAD_LIMIT = 8 << 10
_FIELD_LIMIT = 256
_PARTS_LIMIT = 64


def boundary_of(content_type: bytes) -> bytes | None:
    """The boundary that a Content-Type names; None where it is not multipart/form-data.

    Raises:
        RequestRefused: 400, it is multipart/form-data and names no boundary, or one against RFC 2046.
    """
    if content_type[:19].lower() != b"multipart/form-data":
        return None
    match = _TYPE.fullmatch(content_type)
    found: list[bytes] = (
        [value for name, value in _PARAM.findall(match[1]) if name.lower() == b"boundary"] if match else []
    )
    if len(found) != 1 or not _BOUNDARY.fullmatch(found[0]):
        raise _bad("the `content-type` of a form needs one boundary of 1 to 70 characters, such as `boundary=abc`")
    return found[0].strip(b'"')


def read_form(body: bytes | bytearray, boundary: bytes) -> Asked:
    """Read `model` and `stream`.

    Raises:
        RequestRefused: 400, the body is not such a form, or `model` is missing, there twice, too long or no plain text.
    """
    mark = b"--" + boundary
    delimiter = b"\r\n" + mark
    if not body.startswith(mark):
        raise _bad("the form does not begin with its boundary")
    asked = Asked()
    read: set[str] = set()
    at = len(mark)
    for _ in range(_PARTS_LIMIT):
        after = body[at : at + 2]
        if after == b"--":
            if len(body) - at > 4 or body[at + 2 :] not in (b"", b"\r\n"):
                raise _bad("something follows the last boundary of the form")
            break
        if after != b"\r\n":
            raise _bad("a boundary of the form does not end in CR LF")
        end = body.find(delimiter, at)
        if end < 0:
            raise _bad("the form ends without its last boundary")
        if body.find(b"\r" + mark, at, end) >= 0 or body.find(b"\n" + mark, at, end) >= 0:
            raise _bad("a boundary of the form does not follow CR LF")
        start = body.find(b"\r\n\r\n", at, min(end, at + _HEAD_LIMIT)) + 4
        if start < 4:
            raise _bad("a part of the form has no head, or a very long one")
        name = _name(bytes(body[at + 2 : start - 2]))
        if name in _READ:
            if name in read:
                raise _bad(f"the form has two fields `{name}`", name)
            read.add(name)
            _take(asked, name, bytes(body[start : min(end, start + _FIELD_LIMIT + 1)]))
        at = end + len(delimiter)
    else:
        raise _bad(f"the form has more than {_PARTS_LIMIT - 1} parts")
    if not asked.model:
        raise RequestRefused(refuse(400, "the request names no `model`", code="missing_model", param="model"))
    return asked


def _name(head: bytes) -> str:
    """The name of the field whose head this is; for those that are read the head must be that of plain text."""
    if not _LINES.fullmatch(head):
        raise _bad("the head of a part of the form is malformed")
    lines = [(name.lower(), value.strip(b" \t")) for name, value in _LINE.findall(head)]
    dispositions = [value for name, value in lines if name == b"content-disposition"]
    match = _DISPOSITION.fullmatch(dispositions[0]) if len(dispositions) == 1 else None
    params = [(name.lower(), value) for name, value in _PARAM.findall(match[1])] if match else []
    names = [value for name, value in params if name in (b"name", b"name*")]
    if len(names) != 1 or (b"name", names[0]) not in params or b"\\" in names[0]:
        raise _bad('a part of the form needs one `content-disposition: form-data; name="NAME"`')
    name: str = names[0].strip(b'"').decode("utf-8", "replace")
    if name in _READ:
        if any(each.startswith(b"filename") for each, _ in params):
            raise _bad(f"`{name}` is a file in this form; it has to be a plain field", name)
        if any(key == b"content-transfer-encoding" and value.lower() not in _PLAIN for key, value in lines):
            raise _bad(f"`{name}` is encoded in this form; it has to be plain text", name)
    return name


def _take(asked: Asked, name: str, value: bytes) -> None:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise _bad(f"`{name}` is not UTF-8", name) from error
    if len(value) > _FIELD_LIMIT or _CONTROL.search(text):
        raise _bad(f"`{name}` is longer than {_FIELD_LIMIT} bytes or holds control characters", name)
    if name == "model":
        asked.model = text
    else:
        asked.stream = text.lower() in ("true", "1")


def _bad(why: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(refuse(400, why, code="invalid_form", param=param))
