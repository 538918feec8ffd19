"""Is an engine up? One thread per engine asks, so that a hanging one delays nobody; the supervisor judges."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

from attrs import frozen

from llmgw.agent import procs
from llmgw.agent.child import Child
from llmgw.agent.handles import Handle
from llmgw.errors import HttpError
from llmgw.system.clock import Clock
from llmgw.system.http import Http, Response
from llmgw.units import format_duration

_ANSWER_LIMIT = 1 << 20
_FIRST_ASK_S, _LOADING_ASK_S = 0.1, 1.0


class Health(Enum):
    """READY: answers, on its own socket, with its own key. LOADING: answers that it is not ready yet.

    SILENT: no answer. FAILING: answers, wrongly. NOT_OURS: the port answers, but it is not this engine's, or it refuses
    the replica's key.
    """

    READY = "ready"
    LOADING = "loading"
    SILENT = "silent"
    FAILING = "failing"
    NOT_OURS = "not-ours"


@frozen
class Check:
    """One answer, or the lack of one, in words; `context` is what the engine says about it, in tokens for a request."""

    health: Health
    words: str
    context: int | None = None


def port_problem(handle: Handle, child: Child) -> Check | None:
    """Whether the engine's address is its own: None when it is, or when the kernel does not let us know."""
    listening = procs.listening_inodes(handle.host, handle.port)
    if listening is None:
        return None
    if not listening:
        return Check(Health.SILENT, "it does not listen yet")
    left = listening - procs.socket_inodes(child.pid)
    if left:  # the one that listens may be a process the engine has started
        for stat in child.members():
            left -= procs.socket_inodes(stat.pid)
    if left:
        return Check(Health.NOT_OURS, f"another process listens on its port {handle.port}")
    return None


def base_url(host: str, port: int) -> str:
    """`http://host:port`, with brackets where an address needs them."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ask(http: Http, handle: Handle, child: Child, key: str, proven: bool) -> Check:
    """Ask once.

    Args:
        key: the replica's API key, "" for none. It is sent only when the listening socket was seen to be the engine's.
        proven: the engine has already shown that the port and the key are its own.
    """
    url = base_url(handle.host, handle.port)
    path = handle.health_path
    timeout_s = handle.health_timeout_s
    if not proven and (problem := port_problem(handle, child)):
        return problem
    try:
        status = _get(http, url + path, timeout_s).status
    except HttpError as error:
        return Check(Health.SILENT, f"no answer on `{path}`: {error.cause or error.message}")
    if status != 200:
        if status in handle.loading_statuses:
            return Check(Health.LOADING, f"`{path}` answers {status}")
        return Check(Health.FAILING, f"`{path}` answers {status}")
    if proven or not key or not handle.key_path:
        return Check(Health.READY, f"`{path}` answers 200")
    try:
        answer = _get(http, url + handle.key_path, handle.health_timeout_s, key)
    except HttpError as error:
        return Check(Health.SILENT, f"no answer on `{handle.key_path}`: {error.cause or error.message}")
    status = answer.status
    if status in (401, 403):
        return Check(Health.NOT_OURS, f"it refuses this replica's API key (`{handle.key_path}` answers {status})")
    if status != 200:
        return Check(Health.LOADING, f"`{handle.key_path}` answers {status}")
    words = f"`{handle.key_path}` answers 200 to this replica's API key"
    return Check(Health.READY, words, read_context(answer.body, handle.context_at))


def read_context(body: bytes, at: str) -> int | None:
    """Tokens of context of one request in an engine's JSON answer, None where it does not say.

    Args:
        at: `Launch.context_at`.
    """
    if not at:
        return None
    try:
        found: Any = json.loads(body)
        for name in at.split("/")[1:]:
            found = found[int(name)] if isinstance(found, list) else found[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if type(found) is int and found > 0 else None


def _get(http: Http, url: str, timeout_s: float, key: str = "") -> Response:
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return http.request(
        "GET", url, headers=headers, timeout_s=timeout_s, connect_timeout_s=timeout_s, max_bytes=_ANSWER_LIMIT
    )


class Watch:
    """Asks one engine until stopped, and posts what it hears.

    Args:
        interval_s: between two questions once the engine is ready; before, it is asked more often.
        post: called with each Check, from this thread.
    """

    def __init__(
        self,
        http: Http,
        handle: Handle,
        child: Child,
        key: str,
        clock: Clock,
        interval_s: float,
        post: Callable[[Watch, Check], None],
    ) -> None:
        self._http = http
        self._handle = handle
        self._child = child
        self._key = key
        self._clock = clock
        self._interval_s = interval_s
        self._post = post
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"health-{handle.replica_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; returns at once."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the question that is under way."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        proven = False
        pause = min(_FIRST_ASK_S, self._interval_s)
        while not self._stop.is_set():
            check = ask(self._http, self._handle, self._child, self._key, proven)
            proven = proven or check.health is Health.READY
            if self._stop.is_set():
                return
            self._post(self, check)
            self._clock.wait(self._stop, self._interval_s if proven else pause)
            pause = min(pause * 1.5, _LOADING_ASK_S, self._interval_s)


def silence_words(handle: Handle, misses: int, last: str, pid: int) -> str:
    """Why an engine counts as unresponsive, for people."""
    waited = format_duration(handle.health_timeout_s)
    return f"unresponsive: {misses} checks in a row failed ({last}; each may take {waited}); process {pid} is alive"
