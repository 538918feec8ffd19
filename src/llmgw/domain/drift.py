"""Engines: what is wanted against what is there, as a list of things to do; removals first."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from attrs import frozen

from llmgw.domain.engines import EngineSpec, InstalledEngine

RECHECK_S = 600.0
FULL_S = 6 * 3600.0
COLLECT_AFTER_S = 3600.0
FIRST_RETRY_S = 10.0
LONGEST_RETRY_S = 900.0

Key = tuple[str, str]


@frozen
class Retry:
    """How often something failed in a row, and when it is tried again (seconds since the epoch)."""

    failures: int
    at: float


@frozen
class Held:
    """One installed engine. Times are seconds since the epoch.

    Args:
        checked_at: last look at it; None when this agent has not looked yet.
        broken: the last look failed.
        unused_since: since when nothing wants or uses it, None while something does.
        hashed_at: last time every byte of it was compared with its record; None when this agent has not done so yet.
    """

    engine: InstalledEngine
    checked_at: float | None = None
    broken: bool = False
    unused_since: float | None = None
    hashed_at: float | None = None


@frozen
class Named:
    """An engine the configuration names. `checked_at` None: not looked at yet; `usable`: the last look went well."""

    name: str
    checked_at: float | None = None
    usable: bool = False


@frozen
class Collect:
    """Remove an engine nobody wants or uses."""

    engine: InstalledEngine


@frozen
class Recheck:
    """See that an installed engine still runs; `full` compares every byte, not only sizes and times."""

    engine: InstalledEngine
    full: bool = False


@frozen
class ProbeNamed:
    """See that a named engine runs."""

    name: str


@frozen
class Install:
    """Install an engine, or repair a broken one."""

    spec: EngineSpec


Action = Collect | Recheck | ProbeNamed | Install


def serves(engine: InstalledEngine, spec: EngineSpec) -> bool:
    """Whether an installed engine is what the spec wants: name, version and, when the spec lists them, build."""
    if (engine.name, engine.version) != (spec.name, spec.version):
        return False
    builds = spec.builds
    return not builds or any(engine.build == each or engine.build.startswith(f"{each}-") for each in builds)


def drift(
    desired: tuple[EngineSpec, ...] | None,
    held: tuple[Held, ...],
    named: tuple[Named, ...],
    retries: Mapping[Key, Retry],
    in_use: AbstractSet[Key],
    now: float,
    recheck_s: float = RECHECK_S,
) -> tuple[Action, ...]:
    """What is to be done now, in order.

    Args:
        desired: None when the server has not said yet: then nothing is installed or removed.
        held: what is installed.
        named: what the configuration names; a name here is never installed.
        retries: (name, version) -> when it may be tried again; a named engine's version is "".
        in_use: (name, version) of engines a replica runs: never removed.
        now: seconds since the epoch.
        recheck_s: seconds between two looks at the same engine.
    """
    removals: list[Action] = []
    looks: list[Action] = []
    installs: list[Action] = []
    names = {each.name for each in named}
    for each in held:
        key = (each.engine.name, each.engine.version)
        if each.unused_since is not None and key not in in_use and now - each.unused_since >= COLLECT_AFTER_S:
            removals.append(Collect(each.engine))
        elif each.checked_at is None or (not each.broken and now - each.checked_at >= recheck_s):
            looks.append(Recheck(each.engine, _hash_due(each, now)))
    for each_named in named:
        retry = retries.get((each_named.name, ""))
        checked = each_named.checked_at
        if each_named.usable:
            due = checked is None or now - checked >= recheck_s
        else:
            due = checked is None or (retry is not None and now >= retry.at)
        if due:
            looks.append(ProbeNamed(each_named.name))
    for spec in desired or ():
        if spec.name in names:
            continue
        there = [each for each in held if serves(each.engine, spec)]
        if any(not each.broken for each in there):
            continue
        retry = retries.get((spec.name, spec.version))
        if retry is None or now >= retry.at:
            installs.append(Install(spec))
    return (*removals, *looks, *installs)


def _hash_due(held: Held, now: float) -> bool:
    """Not at the very first look: an agent that starts must not read gigabytes before it says what is ready."""
    if held.hashed_at is None:
        return held.checked_at is not None
    return now - held.hashed_at >= FULL_S


def unused(held: Held, desired: tuple[EngineSpec, ...] | None, in_use: AbstractSet[Key], now: float) -> float | None:
    """Since when nothing wants or uses an installed engine; None while something does, or while that is not known."""
    engine = held.engine
    wanted = desired is None or any(serves(engine, spec) for spec in desired)
    if wanted or (engine.name, engine.version) in in_use:
        return None
    return now if held.unused_since is None else held.unused_since


def next_retry(before: Retry | None, now: float, jitter: float, retry_after_s: float | None = None) -> Retry:
    """When to try again after one more failure: doubling from 10 s to 15 min, between half and all of that.

    Args:
        jitter: 0 to 1, drawn by the caller.
        retry_after_s: what the source asked for; it is never tried before that.
    """
    failures = 1 + (before.failures if before else 0)
    full = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 16))
    wait = full * (0.5 + 0.5 * jitter)
    return Retry(failures, now + max(wait, retry_after_s or 0.0))


def next_due(
    held: tuple[Held, ...],
    named: tuple[Named, ...],
    retries: Mapping[Key, Retry],
    now: float,
    recheck_s: float = RECHECK_S,
) -> float | None:
    """Seconds until the next re-check, removal or retry; None when nothing is ahead."""
    moments = [retry.at for retry in retries.values()]
    for each in held:
        if each.checked_at is not None and not each.broken:
            moments.append(each.checked_at + recheck_s)
        if each.unused_since is not None:
            moments.append(each.unused_since + COLLECT_AFTER_S)
    moments += [each.checked_at + recheck_s for each in named if each.usable and each.checked_at is not None]
    return max(0.0, min(moments) - now) if moments else None
