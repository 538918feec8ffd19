"""What may be written when a client's key is made."""

from __future__ import annotations

import re
from typing import Any

from attrs import frozen

from llmgw.domain.ids import check_model_name
from llmgw.errors import ConfigError, NameInvalid

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_KNOWN = ("name", "models", "rpm", "tpm", "expires")
_MOST = 10**12


@frozen
class KeyFields:
    """A new key: its name, the models it may use (empty: all), its limits a minute, when it ends (epoch seconds)."""

    name: str
    models: tuple[str, ...]
    rpm: int | None
    tpm: int | None
    expires: float | None


def read_fields(body: Any, now: float) -> KeyFields:
    """Read the body of `POST /api/v1/keys`.

    Raises:
        ConfigError: with all problems.
    """
    problems = []
    data = body if isinstance(body, dict) else {}
    name, models = data.get("name"), data.get("models", [])
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problems.append("name: letters, digits, `.`, `_`, `@` and `-`, at most 64, beginning with a letter or digit")
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        problems.append("models: a list of model names, empty for all")
        models = []
    for model in models:
        try:
            check_model_name(model)
        except NameInvalid as error:
            problems.append(f"models: {error.message}")
    limits: dict[str, int | None] = {}
    for limit in ("rpm", "tpm"):
        value = limits[limit] = data.get(limit)
        if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
            problems.append(f"{limit}: a whole number from 1, or left out for no limit")
    expires = data.get("expires")
    if expires is not None and (type(expires) not in (int, float) or not now < expires < now + 100 * 366 * 86_400):
        problems.append("expires: a time in the future, in seconds since the epoch, or left out for never")
    known = ", ".join(f"`{field}`" for field in _KNOWN)
    problems += [f"{field[:80]}: unknown, known are {known}" for field in data.keys() - set(_KNOWN)]
    if problems:
        raise ConfigError("the key cannot be made", problems)
    return KeyFields(
        str(name), tuple(models), limits["rpm"], limits["tpm"], None if expires is None else float(expires)
    )
