"""Profiles in and out: the same keys in a YAML file, in `llmgw ctl apply` and in the admin API."""

# ruff: noqa: RUF009  (`checked` makes an attrs field, and HostPort is frozen)
from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeGuard

from attrs import frozen

from llmgw.config.documents import Document, Problem, failed, parse, read_file
from llmgw.config.fields import Bad, at_least, bad, checked, describe, lasting
from llmgw.config.sources import check_model_source
from llmgw.config.structure import build, register, structure
from llmgw.config.values import Bytes, Seconds
from llmgw.domain.ids import check_model_name
from llmgw.domain.profiles import Profile
from llmgw.errors import ConfigError

AutoCount = Annotated[int | None, "auto-count"]
AutoBytes = Annotated[int | None, "auto-size"]
AutoSeconds = Annotated[float | None, "auto-duration"]

_ENGINE = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")


def check_engine_name(name: str) -> None:
    """A provider's name: lower-case letters, digits, `.`, `_`, `-`.

    Raises:
        ValueError: it is not.
    """
    if not _ENGINE.fullmatch(name):
        raise ValueError(f"`{name[:80]}` is not an engine name, such as `llama.cpp`, `vllm` or `sglang`")


def check_labels(labels: Mapping[str, str]) -> None:
    """Labels of a node, or a selector for them.

    Raises:
        ValueError: a key or value cannot be a label's.
    """
    for key, value in labels.items():
        if not _LABEL.fullmatch(key):
            raise ValueError(f"`{key[:80]}` is not a label, use letters, digits, `.`, `_`, `/` and `-`")
        if len(value) > 255 or not value.isprintable():
            raise ValueError(f"the value of `{key}` must be printable text of at most 255 characters")


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        check_model_name(name)
    if len(set(names)) != len(names):
        raise ValueError("names a model twice")


def _check_args(args: tuple[str, ...]) -> None:
    if any("\0" in arg for arg in args):
        raise ValueError("an argument holds a NUL character")


def _check_env(env: Mapping[str, str]) -> None:
    for key, value in env.items():
        if not _ENV.fullmatch(key):
            raise ValueError(f"`{key[:80]}` is not the name of an environment variable")
        if "\0" in value:
            raise ValueError(f"the value of `{key}` holds a NUL character")


def _auto(kind: Any, what: str) -> Any:
    def hook(value: Any, _: Any) -> Any:
        if value == "auto":
            return None
        try:
            return structure(value, kind)
        except Bad as error:
            raise bad(f"expected `auto` or {what}, got {describe(value)}") from error

    return hook


register(AutoCount, _auto(int, "a whole number"))
register(AutoBytes, _auto(Bytes, "a size such as `16GiB`"))
register(AutoSeconds, _auto(Seconds, "a duration such as `10m`"))


@frozen(kw_only=True)
class ProfileFile:
    """A profile as it is written; the fields are those of `domain.profiles.Profile`."""

    name: str = checked(check_model_name)
    model: str = checked(check_model_source)
    engine: str = checked(check_engine_name, default="llama.cpp")
    replicas: int = checked(at_least(0, 10_000), default=1)
    aliases: tuple[str, ...] = checked(_check_names, default=())
    node_selector: Mapping[str, str] = checked(check_labels, factory=dict)
    context: int = checked(at_least(128, 100_000_000), default=4096)
    slots: int = checked(at_least(1, 4096), default=4)
    gpus: AutoCount = checked(at_least(0, 1024), default=None)
    nodes: int = checked(at_least(1, 4096), default=1)
    memory: AutoBytes = checked(at_least(1), default=None)
    args: tuple[str, ...] = checked(_check_args, default=())
    env: Mapping[str, str] = checked(_check_env, factory=dict)
    start_deadline: AutoSeconds = checked(lasting("1s"), default=None)
    max_tokens: int | None = checked(at_least(1), default=None)
    default_max_tokens: int | None = checked(at_least(1), default=None)
    default_temperature: float | None = checked(at_least(0, 100), default=None)
    min_temperature: float | None = checked(at_least(0, 100), default=None)
    max_temperature: float | None = checked(at_least(0, 100), default=None)


def _cross(data: Mapping[str, Any]) -> list[Problem]:
    found = []
    aliases = data.get("aliases")
    if isinstance(aliases, list) and data.get("name") in aliases:
        at = aliases.index(data["name"])
        found.append(Problem(("aliases", at), "is the profile's own name"))
    for small, large in (
        ("min_temperature", "max_temperature"),
        ("min_temperature", "default_temperature"),
        ("default_temperature", "max_temperature"),
        ("default_max_tokens", "max_tokens"),
    ):
        one, other = data.get(small), data.get(large)
        if _number(one) and _number(other) and one > other:
            found.append(Problem((small,), f"{one} is more than `{large}`, {other}"))
    return found


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def load_profile(text: str, source: str) -> Profile:
    """One profile from YAML text; `source` is what messages call it.

    Raises:
        ConfigError: with all problems, each with its line.
    """
    documents = parse(text, source)
    if len(documents) > 1:
        raise failed(source, [documents[1].render(Problem((), "a second profile begins, expected one"))])
    return _profile(documents[0])


def load_profiles(path: Path) -> tuple[Profile, ...]:
    """All profiles of a YAML file, which may hold several documents.

    Raises:
        ConfigError: with the problems of all of them; also when two have one name, or there is none.
    """
    return profiles_from_text(read_file(path), str(path))


def profiles_from_text(text: str, source: str) -> tuple[Profile, ...]:
    """Like `load_profiles`, from text such as standard input's.

    Raises:
        ConfigError: with the problems of all documents.
    """
    made: list[Profile] = []
    problems: list[str] = []
    owners: dict[str, str] = {}
    documents = [doc for doc in parse(text, source) if doc.data is not None or doc.problems]
    for document in documents:
        try:
            profile = _profile(document)
        except ConfigError as error:
            problems += error.problems
            continue
        for name in (profile.name, *profile.aliases):
            if name in owners:
                words = f"`{name}` is taken by profile `{owners[name]}` of this file"
                problems.append(document.render(Problem(("name",), words)))
            owners.setdefault(name, profile.name)
        made.append(profile)
    if not documents:
        problems.append(f"{source}: holds no profile")
    if problems:
        raise failed(source, problems)
    return tuple(made)


def profile_from_json(data: Any, name: str | None = None) -> Profile:
    """A profile from plain data with the keys of the YAML file, checked alike.

    Args:
        name: what the profile must be called; it may then be left out of `data`.

    Raises:
        ConfigError: with all problems, each `path: what, valid choices`.
    """
    problems = []
    if name is not None and isinstance(data, dict):
        if data.get("name", name) != name:
            problems.append(Problem(("name",), f"must be `{name}`, as in the address it was sent to"))
        data = {**data, "name": name}
    return _profile(Document("", data, problems=tuple(problems)))


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """The keys of the YAML file, all of them; `profile_from_json` reads the same profile back."""
    return {
        "name": profile.name,
        "model": profile.model,
        "engine": profile.engine,
        "replicas": profile.replicas,
        "aliases": list(profile.aliases),
        "node_selector": dict(profile.node_selector),
        "context": profile.context,
        "slots": profile.slots,
        "gpus": "auto" if profile.gpus is None else profile.gpus,
        "nodes": profile.nodes,
        "memory": "auto" if profile.memory_bytes is None else _exact_size(profile.memory_bytes),
        "args": list(profile.args),
        "env": dict(profile.env),
        "start_deadline": "auto" if profile.start_deadline_s is None else _exact_duration(profile.start_deadline_s),
        "max_tokens": profile.max_tokens,
        "default_max_tokens": profile.default_max_tokens,
        "default_temperature": profile.default_temperature,
        "min_temperature": profile.min_temperature,
        "max_temperature": profile.max_temperature,
    }


def _profile(document: Document) -> Profile:
    read = build(document, ProfileFile, _cross)
    return Profile(
        name=read.name,
        model=read.model,
        engine=read.engine,
        replicas=read.replicas,
        aliases=read.aliases,
        node_selector=read.node_selector,
        context=read.context,
        slots=read.slots,
        gpus=read.gpus,
        nodes=read.nodes,
        memory_bytes=read.memory,
        args=read.args,
        env=read.env,
        start_deadline_s=read.start_deadline,
        max_tokens=read.max_tokens,
        default_max_tokens=read.default_max_tokens,
        default_temperature=read.default_temperature,
        min_temperature=read.min_temperature,
        max_temperature=read.max_temperature,
    )


def _exact_size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6)):
        if count % size == 0:
            return f"{count // size}{unit}"
    return f"{count}B"


def _exact_duration(seconds: float) -> str:
    whole = round(seconds)
    if whole != seconds:
        return f"{seconds:f}".rstrip("0") + "s"
    minutes, rest = divmod(whole, 60)
    return (f"{minutes}m" if minutes else "") + (f"{rest}s" if rest or not minutes else "")
