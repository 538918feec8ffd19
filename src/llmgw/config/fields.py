"""Fields of settings classes: their keys, the checks on their values, and what is wrong with a value, in words."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union, get_args, get_origin

import attrs

from llmgw.config.documents import Problem
from llmgw.config.values import Bytes, Seconds
from llmgw.errors import LlmgwError
from llmgw.units import format_duration, parse_duration

Check = Callable[[Any], object]


class Bad(Exception):
    """Data that does not fit, as problems relative to where it stands."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)


def bad(words: str, *, quotable: bool = False) -> Bad:
    """One problem with the value at hand."""
    return Bad([Problem((), words, quotable)])


def key_of(attribute: attrs.Attribute[Any]) -> str:
    """The key of a field in the file: its name, without the unit it ends in when it is written with one."""
    name: str = attribute.metadata.get("key", attribute.name)
    written = get_args(attribute.type) if is_optional(attribute.type) else (attribute.type,)
    if Seconds in written:
        return name.removesuffix("_s")
    return name.removesuffix("_bytes") if Bytes in written else name


def keys_of(kind: Any) -> dict[str, attrs.Attribute[Any]]:
    """The keys a class is written with, in order, and the field of each; derived fields have none."""
    attrs.resolve_types(kind, include_extras=True)
    return {key_of(f): f for f in attrs.fields(kind) if not f.metadata.get("derived")}


def derived(**given: Any) -> Any:
    """An attrs field that is no key of the file: it is worked out after loading."""
    return attrs.field(metadata={"derived": True}, **given)


def checked(check: Check, **given: Any) -> Any:
    """An attrs field whose value is handed to `check` once its type is right; `check` raises ValueError with words."""
    return attrs.field(metadata={"check": check}, **given)


def at_least(low: float, high: float | None = None) -> Check:
    """A check for numbers: `low` or more, and `high` or less."""

    def check(value: float | None) -> None:
        if value is not None and (value < low or (high is not None and value > high)):
            limit = f"from {low} to {high}" if high is not None else f"{low} or more"
            raise ValueError(f"must be {limit}, is {value}")

    return check


def describe(value: Any) -> str:
    """What a value is, for a sentence about it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text `{value[:40]}`"
    return "a list" if isinstance(value, list) else "a map"


def unknown_key(key: str, valid: Sequence[str]) -> str:
    """The sentence for a key that does not exist, with the nearest that does."""
    import difflib  # only when something is wrong

    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    guess = f", did you mean `{near[0]}`?" if near else ","
    return f"unknown key{guess} valid: {choices(valid)}"


def choices(valid: Iterable[str]) -> str:
    """Names as `a`, `b`, `c`."""
    return ", ".join(f"`{name}`" for name in valid)


def collect(items: Iterable[tuple[str | int, Callable[[], Any]]]) -> list[Any]:
    """Run each reader, keep what they make, and raise the problems of all of them together."""
    made, problems = [], []
    for step, read in items:
        try:
            made.append(read())
        except Bad as error:
            problems += [attrs.evolve(p, path=(step, *p.path)) for p in error.problems]
    if problems:
        raise Bad(problems)
    return made


def lasting(low: str, high: str | None = None) -> Check:
    """A check for durations: `low` or longer, and `high` or shorter."""
    low_s, high_s = parse_duration(low), None if high is None else parse_duration(high)

    def check(value: float | None) -> None:
        if value is not None and (value < low_s or (high_s is not None and value > high_s)):
            limit = f"from {low} to {high}" if high is not None else f"{low} or longer"
            raise ValueError(f"must be {limit}, is {format_duration(value)}")

    return check


def run_check(check: Check, value: Any) -> None:
    """Run a check on a value.

    Raises:
        Bad: with the check's words.
    """
    try:
        check(value)
    except LlmgwError as error:
        raise bad(f"{error.words()}, {error.hint}" if error.hint else error.words()) from error
    except ValueError as error:
        raise bad(str(error)) from error


def is_optional(kind: Any) -> bool:
    """Whether a type is `X | None`."""
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind) and len(get_args(kind)) == 2
