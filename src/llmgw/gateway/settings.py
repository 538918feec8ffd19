"""What a gateway process is told at its start."""

from __future__ import annotations

from attrs import frozen


@frozen
class Options:
    """Limits and deadlines of one gateway process; all times in seconds, all sizes in bytes.

    Args:
        queue: requests that may wait per model; one more is answered 429.
        queue_timeout_s: how long a request waits for a slot or for a replica that is loading.
        first_token_timeout_s: from the request sent upstream to the first token of a stream.
        token_gap_timeout_s: between two tokens, and how long a client may stop reading.
        total_timeout_s: from the request's arrival to the end of the answer.
        drain_timeout_s: how long open answers may go on after SIGTERM.
        connect_timeout_s: for one TCP connection to an engine.
        pool_idle_s: an idle connection to an engine is closed after this; below the 5 s of the engines' own servers.
        head_timeout_s: for a request head once its first byte is there, and for the TLS handshake.
        keepalive_s: an idle client connection is closed after this.
        max_body_bytes: a larger request body is answered 413.
        max_head_bytes: a larger request head is answered 431.
        workers: how many gateway processes share the address; they count requests and limits together.
        access_log: file for one JSON line per request, "" for none.
        access_log_sample: part of the requests that is logged, 0 to 1; answers of 400 and above always are.
        settings: the server's name for all of this, told back to it: it knows gateways that were started with others.
        cors_origins: origins whose pages may use the API, `*` for all, none when empty.
    """

    queue: int = 64
    queue_timeout_s: float = 30.0
    first_token_timeout_s: float = 600.0
    token_gap_timeout_s: float = 60.0
    total_timeout_s: float = 3600.0
    drain_timeout_s: float = 60.0
    connect_timeout_s: float = 3.0
    pool_idle_s: float = 3.0
    head_timeout_s: float = 15.0
    keepalive_s: float = 75.0
    max_body_bytes: int = 64 << 20
    max_head_bytes: int = 32 << 10
    workers: int = 1
    access_log: str = ""
    access_log_sample: float = 1.0
    cors_origins: str = ""
    settings: str = ""
