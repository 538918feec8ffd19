"""Replicas: what an agent is told to run and what it says about it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import field, frozen

from llmgw.domain.engines import Progress


class ReplicaState(StrEnum):
    """pending -> fetching -> starting -> loading -> ready <-> unresponsive -> draining -> stopped | failed."""

    PENDING = "pending"
    FETCHING = "fetching"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@frozen
class ReplicaSpec:
    """One replica an agent must run. Identity is (replica_id, epoch): at most one engine is ever started for it.

    `api_key` is made by the server, goes down only, and never appears in a report, a log or argv.
    `digest` changes when anything that needs a new process changes.
    """

    replica_id: str
    epoch: int
    profile: str
    model_name: str
    model: str
    engine: str
    engine_version: str
    context: int
    slots: int
    gpus: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    start_deadline_s: float | None = None
    api_key: str = field(default="", repr=False)
    digest: str = ""


@frozen
class ReplicaStatus:
    """What a node says about one replica. Address and port are set from `starting` on.

    `last_log` holds the engine's own last lines: after a failure they are the diagnosis.
    """

    replica_id: str
    epoch: int
    profile: str
    state: ReplicaState
    words: str
    since: float
    engine: str = ""
    engine_version: str = ""
    host: str | None = None
    port: int | None = None
    pid: int | None = None
    slots: int | None = None
    context: int | None = None
    restarts: int = 0
    exit_words: str = ""
    last_log: tuple[str, ...] = ()
    next_try: float | None = None
    progress: Progress | None = None
    digest: str = ""
