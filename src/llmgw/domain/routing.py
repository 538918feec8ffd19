"""Routes: what the gateway knows, and which replica gets the next request."""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import StrEnum
from zlib import crc32

from attrs import field, frozen


@frozen
class RouteReplica:
    """One engine that may be sent requests. `key` is the replica's own API key."""

    replica_id: str
    node_id: str
    host: str
    port: int
    slots: int
    ready: bool
    key: str = field(default="", repr=False)


@frozen
class Caps:
    """What a profile sets where a request says nothing, and the bounds of what it may say; None: no rule.

    Args:
        max_tokens: no request gets more tokens than this.
        default_max_tokens, default_temperature: for requests that name none.
        min_temperature, max_temperature: a request outside is brought to the bound.
    """

    max_tokens: int | None = None
    default_max_tokens: int | None = None
    default_temperature: float | None = None
    min_temperature: float | None = None
    max_temperature: float | None = None


@frozen
class RouteModel:
    """One model name and where it is served.

    Args:
        name: what clients send; `aliases` too.
        state: `ready`, `loading` (a replica is coming), `refused` (placement found no node), `failed`, `off`
            (no replica is wanted).
        words: the sentence for the 503: the refusal's own lines when refused.
        context: tokens per slot, None while unknown.
        endpoints: paths the engine answers.
        caps: defaults and bounds of requests, None for none.
    """

    name: str
    aliases: tuple[str, ...]
    engine: str
    state: str
    words: str
    context: int | None
    endpoints: tuple[str, ...]
    replicas: tuple[RouteReplica, ...]
    created: int = 0
    refusal: tuple[str, ...] = ()
    caps: Caps | None = None


@frozen
class RouteKey:
    """A client's API key as the gateway knows it: the sha256 of the key, and which models it may use (empty: all).

    Args:
        rpm, tpm: requests and tokens per minute, None for no limit.
        expires: seconds since the epoch from when on it is refused, None for never.
    """

    name: str
    sha256: str
    models: tuple[str, ...] = ()
    rpm: int | None = None
    tpm: int | None = None
    expires: float | None = None


@frozen
class RouteTable:
    """A full snapshot from the control process. The gateway goes on with the last one when control is away."""

    seq: int
    models: tuple[RouteModel, ...]
    keys: tuple[RouteKey, ...] = ()
    keys_required: bool = False


class PickWhy(StrEnum):
    """Why `pick` chose or did not choose."""

    CHOSEN = "chosen"
    BUSY = "busy"
    NONE_READY = "none-ready"
    ALL_TRIED = "all-tried"


class PickReason(StrEnum):
    """Which rule chose the replica."""

    ONLY = "only"
    LEAST_LOADED = "least-loaded"
    AFFINITY = "affinity"


@frozen
class Pick:
    """The replica for the next request, or None and why."""

    replica: RouteReplica | None
    why: PickWhy
    reason: PickReason | None = None


Choice = tuple[RouteReplica | None, PickWhy, PickReason | None]
_BUSY: Choice = (None, PickWhy.BUSY, None)
_NONE_READY: Choice = (None, PickWhy.NONE_READY, None)
_ALL_TRIED: Choice = (None, PickWhy.ALL_TRIED, None)
BOUND = 1.25
"""How much more than the mean a replica may carry because its prompt cache is warm (Mirrokni et al. 2016, c = 1.25)."""


def pick(
    model: RouteModel,
    in_flight: Mapping[str, int],
    tried: Container[str] = (),
    ejected: Container[str] = (),
    turn: int = 0,
    prefix: bytes = b"",
) -> Pick:
    """Like `choose`, as a value."""
    return Pick(*choose(model, in_flight, tried, ejected, turn, prefix))


def choose(
    model: RouteModel,
    in_flight: Mapping[str, int],
    tried: Container[str] = (),
    ejected: Container[str] = (),
    turn: int = 0,
    prefix: bytes = b"",
) -> Choice:
    """Choose the replica for a request.

    A replica never gets more than its slots and never the same request twice. Ejected replicas are passed over, unless
    nothing else is left: the last replica is never ejected, since a doubtful answer is better than a certain refusal.
    Requests with the same `prefix` go to the same replica, where the prompt is cached, as long as that replica has not
    more than `BOUND` times the mean load (rendezvous hashing with bounded loads); else the least loaded one gets it.

    Args:
        model: where the model is served.
        in_flight: open requests by replica id; a missing id means none.
        tried: replica ids that have had this request.
        ejected: replica ids whose connections failed lately.
        turn: counts up per request; equal replicas take turns by it.
        prefix: what requests of one conversation have in common, b"" for no preference.

    Returns:
        The replica, or None and why; and which rule chose.
    """
    usable = [replica for replica in model.replicas if replica.ready]
    if not usable:
        return _NONE_READY
    if tried:
        usable = [replica for replica in usable if replica.replica_id not in tried]
        if not usable:
            return _ALL_TRIED
    if ejected:
        usable = [replica for replica in usable if replica.replica_id not in ejected] or usable
    count = len(usable)
    if count == 1:
        only = usable[0]
        if in_flight.get(only.replica_id, 0) < (only.slots or 1):
            return only, PickWhy.CHOSEN, PickReason.ONLY
        return _BUSY
    best: RouteReplica | None = None
    best_load = 1.0
    home: RouteReplica | None = None
    home_weight, total, room = -1, 1, 0
    seed = crc32(prefix) if prefix else 0
    turn %= count
    for replica in usable[turn:] + usable[:turn]:
        load = in_flight.get(replica.replica_id, 0)
        slots = replica.slots or 1
        if load / slots < best_load:
            best, best_load = replica, load / slots
        if prefix:
            total += load
            room += slots
            weight = crc32(replica.replica_id.encode(), seed)
            if weight > home_weight:
                home, home_weight = replica, weight
    if home is not None:
        load, slots = in_flight.get(home.replica_id, 0), home.slots or 1
        if load < slots and load + 1 <= max(1.0, BOUND * total * slots / room):
            return home, PickWhy.CHOSEN, PickReason.AFFINITY
    return _BUSY if best is None else (best, PickWhy.CHOSEN, PickReason.LEAST_LOADED)


_ROTATIONS = 16

Row = tuple[str, bytes, int, RouteReplica]
Rows = tuple[tuple[tuple[Row, ...], ...], int]


def rows_of(model: RouteModel) -> Rows:
    """What `usual` needs to know of a model's ready replicas; good for a whole snapshot.

    Returns:
        The replicas in the order of each turn (of the first only, where there are more than 16), and their slots
        together; empty if none is ready.
    """
    rows = tuple(
        (replica.replica_id, replica.replica_id.encode(), replica.slots or 1, replica)
        for replica in model.replicas
        if replica.ready
    )
    turns = range(len(rows) if len(rows) <= _ROTATIONS else 1)
    return tuple(rows[turn:] + rows[:turn] for turn in turns), sum(row[2] for row in rows)


def usual(rows: Rows, in_flight: Mapping[str, int], turn: int, prefix: bytes) -> tuple[RouteReplica, PickReason] | None:
    """The usual case of `choose`, at a fraction of its cost: nothing tried, nothing ejected, at least one ready.

    Returns:
        What `choose` gives; None where there is no slot.
    """
    rotations, room = rows
    found = rotations[turn % len(rotations)]
    count = len(found)
    if count > _ROTATIONS:
        turn %= count
        found = found[turn:] + found[:turn]
    elif count == 1:
        name, _, slots, replica = found[0]
        return (replica, PickReason.ONLY) if in_flight.get(name, 0) < slots else None
    seed = crc32(prefix)
    best = None
    least, weightiest, total, home_load = 1.0, -1, 1, 0
    for row in found:
        name, data, slots, replica = row
        load = in_flight.get(name, 0)
        total += load
        relative = load / slots
        if relative < least:
            best, least = replica, relative
        weight = crc32(data, seed)
        if weight > weightiest:
            weightiest, home_load, home = weight, load, row
    if prefix:
        slots = home[2]
        if home_load < slots and (home_load == 0 or home_load + 1 <= BOUND * total * slots / room):
            return home[3], PickReason.AFFINITY
    return None if best is None else (best, PickReason.LEAST_LOADED)
