"""Routes: what the gateway knows, and which replica gets the next request."""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import StrEnum

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
class RouteModel:
    """One model name and where it is served.

    Args:
        name: what clients send; `aliases` too.
        state: `ready`, `loading` (a replica is coming), `refused` (placement found no node), `failed`.
        words: the sentence for the 503: the refusal's own lines when refused.
        context: tokens per slot, None while unknown.
        endpoints: paths the engine answers.
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


@frozen
class RouteKey:
    """A client's API key as the gateway knows it: the sha256 of the key, and which models it may use (empty: all)."""

    name: str
    sha256: str
    models: tuple[str, ...] = ()


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


@frozen
class Pick:
    """The replica for the next request, or None and why."""

    replica: RouteReplica | None
    why: PickWhy


_BUSY = Pick(None, PickWhy.BUSY)
_NONE_READY = Pick(None, PickWhy.NONE_READY)
_ALL_TRIED = Pick(None, PickWhy.ALL_TRIED)


def pick(
    model: RouteModel,
    in_flight: Mapping[str, int],
    tried: Container[str] = (),
    ejected: Container[str] = (),
    turn: int = 0,
) -> Pick:
    """Choose the replica with the fewest requests in flight relative to its slots.

    A replica never gets more than its slots and never the same request twice. Ejected replicas are passed over, unless
    nothing else is left: the last replica is never ejected, since a doubtful answer is better than a certain refusal.

    Args:
        model: where the model is served.
        in_flight: requests the caller has open, by replica id; a missing id means none.
        tried: replica ids that have had this request.
        ejected: replica ids whose connections failed lately.
        turn: counts up per request; equal replicas take turns by it.
    """
    ready = [replica for replica in model.replicas if replica.ready]
    if not ready:
        return _NONE_READY
    left = [replica for replica in ready if replica.replica_id not in tried]
    if not left:
        return _ALL_TRIED
    usable = [replica for replica in left if replica.replica_id not in ejected] or left
    best: RouteReplica | None = None
    best_load = 1.0
    for step in range(len(usable)):
        replica = usable[(turn + step) % len(usable)]
        load = in_flight.get(replica.replica_id, 0) / max(1, replica.slots)
        if load < best_load:
            best, best_load = replica, load
    return _BUSY if best is None else Pick(best, PickWhy.CHOSEN)
