"""Domain values to JSON and back: one converter for the wire, the admin API, the state and the routing snapshots.

Unknown keys are ignored (old and new versions must talk), wrong types are refused (cattrs alone would coerce).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin

import attrs
import cattrs
from cattrs.cols import homogenous_tuple_structure_factory

from llmgw.errors import WireError

T = TypeVar("T")


def _strict(value: Any, kind: type) -> Any:
    # Registered by class, so it is asked about the string enums too.
    if issubclass(kind, Enum):
        return _enum(value, kind)
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _float(value: Any, _: type) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _enum(value: Any, kind: type[Enum]) -> Enum:
    if type(value) is not str:
        raise TypeError(f"expected str, got {type(value).__name__}")
    return kind(value)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,)


def _tuple(kind: Any, converter: cattrs.BaseConverter) -> Any:
    """cattrs iterates over anything: a string would become a tuple of letters."""
    inner = homogenous_tuple_structure_factory(kind, converter)

    def structure(value: Any, _: Any) -> Any:
        if type(value) not in (list, tuple):
            raise TypeError(f"expected a list, got {type(value).__name__}")
        return inner(value, kind)

    return structure


def _is_map(kind: Any) -> bool:
    return kind is Mapping or get_origin(kind) in (Mapping, dict)


def _make() -> cattrs.Converter:
    made = cattrs.Converter(forbid_extra_keys=False, omit_if_default=True)
    # By class: cattrs has hooks of its own for these, which coerce, and asks no predicate before them.
    for kind in (str, int, bool):
        made.register_structure_hook(kind, _strict)
    made.register_structure_hook(float, _float)
    made.register_structure_hook_factory(_is_tuple, _tuple)
    made.register_structure_hook_func(_is_enum, _enum)
    made.register_structure_hook_func(_is_map, _string_map)
    made.register_unstructure_hook_func(_is_enum, lambda value: value.value)
    return made


def _string_map(value: Any, _: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(type(k) is str and type(v) in (str, int) for k, v in value.items()):
        raise TypeError("expected a map of strings")
    return dict(value)


_CONVERTER = _make()


def to_json(value: Any) -> Any:
    """An attrs value as plain dicts, lists, strings and numbers; fields at their default are left out."""
    return _CONVERTER.unstructure(value)


_PLAIN = frozenset((str, int, float, bool, type(None)))


# what of a value is shown, by class, None for one that is no attrs class; asked for every value of every node
_SHOWN: dict[type, tuple[str, ...] | None] = {}


def _fields_of(kind: type) -> tuple[str, ...] | None:
    if kind not in _SHOWN:
        _SHOWN[kind] = tuple(field.name for field in attrs.fields(kind) if field.repr) if attrs.has(kind) else None
    return _SHOWN[kind]


def to_full_json(value: Any) -> Any:
    """Like `to_json` with every field present: for people and scripts, who should not have to know defaults."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    names = _fields_of(kind)
    if names is not None:
        return {name: to_full_json(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [to_full_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(k): to_full_json(v) for k, v in value.items()}
    return value


def from_json(data: Any, kind: type[T]) -> T:
    """Plain JSON data as a value of `kind`.

    Raises:
        WireError: the data has not that shape; says where.
    """
    try:
        return _CONVERTER.structure(data, kind)
    except Exception as error:
        where = "; ".join(cattrs.transform_error(error, path=kind.__name__)[:3])
        raise WireError(f"not a valid {kind.__name__}", cause=where[:400]) from error
