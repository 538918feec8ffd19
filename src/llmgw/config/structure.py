"""Plain data to attrs values: strict types, unknown keys refused, every problem collected with its path.

cattrs dispatches on types; the hooks are ours, because its own coerce (`0.10` becomes "0.1") and stop at the class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import attrs
import cattrs

from llmgw.config.documents import Document, Problem, failed, parse, read_file
from llmgw.config.fields import Bad, bad, choices, collect, describe, is_optional, keys_of, run_check, unknown_key
from llmgw.config.values import (
    AbsolutePath,
    Bytes,
    HostPort,
    Seconds,
    ServerUrl,
    SourceName,
    check_source,
    parse_host_port,
    parse_server_url,
)
from llmgw.errors import UnitError
from llmgw.units import parse_duration, parse_size

T = TypeVar("T")
Cross = Callable[[Mapping[str, Any]], Iterable[Problem]]


def load(path: Path, kind: type[T], cross: Cross | None = None) -> T:
    """Read a YAML file into an attrs class.

    Args:
        path: the file, exactly one document.
        kind: attrs class; fields marked `Seconds` and `Bytes` are written with units.
        cross: called with the plain data, yields what is wrong between keys.

    Raises:
        ConfigError: with all problems, each `file:line: path: what, valid choices`.
    """
    return load_text(read_file(path), str(path), kind, cross)


def load_text(text: str, source: str, kind: type[T], cross: Cross | None = None) -> T:
    """Like `load`, from text; `source` is what messages call it."""
    documents = parse(text, source)
    if len(documents) > 1:
        raise failed(source, [documents[1].render(Problem((), "a second YAML document begins, expected one"))])
    return build(documents[0], kind, cross)


def build(document: Document, kind: type[T], cross: Cross | None = None) -> T:
    """One document as a value of `kind`.

    Raises:
        ConfigError: with all problems.
    """
    data = {} if document.data is None else document.data
    problems = list(document.problems)
    made: T | None = None
    try:
        made = structure(data, kind)
    except Bad as error:
        problems += error.problems
    if cross is not None and isinstance(data, dict):
        problems += cross(data)
    if problems:
        problems.sort(key=lambda p: document.line(p.path) or 0)
        raise failed(document.source, list(dict.fromkeys(document.render(p) for p in problems)))
    return cast(T, made)


def structure(value: Any, kind: Any) -> Any:
    """Plain data as `kind`.

    Raises:
        Bad: with all problems.
    """
    return _CONVERTER.structure(value, kind)


def register(kind: Any, hook: Callable[[Any, Any], Any]) -> None:
    """Teach how a type (an `Annotated` mark, usually) is read; the hook raises `Bad`."""
    _CONVERTER.register_structure_hook_func(lambda other: bool(other == kind), hook)


def _text(value: Any, _: Any) -> str:
    if type(value) is not str:
        raise bad(f"expected text, got {describe(value)}", quotable=isinstance(value, int | float | bool))
    return value


def _whole(value: Any, _: Any) -> int:
    if type(value) is not int:
        raise bad(f"expected a whole number, got {describe(value)}")
    return value


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise bad(f"expected a number, got {describe(value)}")
    return float(value)


def _bool(value: Any, _: Any) -> bool:
    if type(value) is not bool:
        raise bad(f"expected `true` or `false`, got {describe(value)}")
    return value


def _unit(read: Callable[[str], Any], what: str) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if type(value) is not str:
            raise bad(f"expected {what}, got {describe(value)}")
        try:
            return read(value)
        except UnitError as error:
            raise bad(f"{error.message}, {error.hint}") from error

    return hook


def _path(value: Any, _: Any) -> str:
    text = _text(value, str)
    if not text.startswith("/") or "\0" in text:
        raise bad(f"expected an absolute path, got `{text[:200]}`")
    return text


def _parsed(read: Callable[[str], Any]) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        try:
            return read(_text(value, str))
        except ValueError as error:
            raise bad(str(error)) from error

    return hook


def _tuple_hook(kind: Any) -> Callable[[Any, Any], Any]:
    item = get_args(kind)[0]

    def hook(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise bad(f"expected a list, got {describe(value)}")
        return tuple(collect((i, partial(structure, v, item)) for i, v in enumerate(value)))

    return hook


def _mapping_hook(kind: Any) -> Callable[[Any, Any], Any]:
    item = get_args(kind)[1]

    def hook(value: Any, _: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise bad(f"expected a map, got {describe(value)}")
        return dict(zip(value, collect((k, partial(structure, v, item)) for k, v in value.items()), strict=True))

    return hook


def _optional_hook(kind: Any) -> Callable[[Any, Any], Any]:
    inner = next(part for part in get_args(kind) if part is not type(None))
    return lambda value, _: None if value is None else structure(value, inner)


def _literal_hook(kind: Any) -> Callable[[Any, Any], Any]:
    valid = get_args(kind)

    def hook(value: Any, _: Any) -> Any:
        if value not in valid:
            raise bad(f"{describe(value)} is not one of {choices(valid)}")
        return value

    return hook


def _class_hook(kind: Any) -> Callable[[Any, Any], Any]:
    fields = keys_of(kind)

    def one(key: str, data: Mapping[str, Any]) -> tuple[str, Any]:
        if key not in fields:
            raise bad(unknown_key(key, list(fields)))
        made = structure(data[key], fields[key].type)
        check = fields[key].metadata.get("check")
        if check is not None:
            run_check(check, made)
        return fields[key].name, made

    def missing() -> Any:
        raise bad("is required")

    def hook(value: Any, _: Any) -> Any:
        short = getattr(kind, "from_short", None)
        if short is not None and not isinstance(value, dict | list | type(None)):
            return short(value)
        if not isinstance(value, dict):
            raise bad(f"expected a map with {choices(fields)}, got {describe(value)}")
        lacking = [key for key, f in fields.items() if f.default is attrs.NOTHING and key not in value]
        readers: list[tuple[str | int, Callable[[], Any]]] = [(key, partial(one, key, value)) for key in value]
        readers += [(key, missing) for key in lacking]
        return kind(**dict(collect(readers)))

    return hook


def _one_or_many_hook(kind: Any) -> Callable[[Any, Any], Any]:
    many = get_args(kind)[0]

    def hook(value: Any, _: Any) -> Any:
        return structure(value, many) if isinstance(value, list) else (structure(value, get_args(many)[0]),)

    return hook


def _is_one_or_many(kind: Any) -> bool:
    # `Annotated[tuple[X, ...], "one-or-many"]` may be written as one value or as a list
    return get_origin(kind) is Annotated and get_args(kind)[1:] == ("one-or-many",)


def _is_origin(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) in origins


def _make() -> cattrs.Converter:
    made = cattrs.Converter(detailed_validation=False)
    # by class: cattrs would ask its own, coercing hooks for these before any predicate
    made.register_structure_hook(str, _text)
    made.register_structure_hook(int, _whole)
    made.register_structure_hook(float, _number)
    made.register_structure_hook(bool, _bool)
    parsed = (HostPort, ServerUrl)
    made.register_structure_hook_factory(lambda kind: attrs.has(kind) and kind not in parsed, _class_hook)
    made.register_structure_hook_factory(_is_origin(tuple), _tuple_hook)
    made.register_structure_hook_factory(_is_origin(Mapping, dict), _mapping_hook)
    made.register_structure_hook_factory(_is_origin(Literal), _literal_hook)
    made.register_structure_hook_factory(is_optional, _optional_hook)
    made.register_structure_hook_factory(_is_one_or_many, _one_or_many_hook)
    return made


_CONVERTER = _make()

register(Seconds, _unit(parse_duration, "a duration with a unit, such as `5s` or `1m30s`"))
register(Bytes, _unit(parse_size, "a size with a unit, such as `16MB` or `2GiB`"))
register(AbsolutePath, _path)
register(SourceName, _parsed(check_source))
register(HostPort, _parsed(parse_host_port))
register(ServerUrl, _parsed(parse_server_url))
