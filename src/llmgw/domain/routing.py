"""Routes: what the gateway knows, and which replica gets the next request."""

from __future__ import annotations

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
