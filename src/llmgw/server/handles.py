"""The server's handle of one connected agent: what the fleet and the admin API hold."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from llmgw.domain.report import Desired
from llmgw.errors import ApiError, LinkError, LlmgwError
from llmgw.units import format_duration
from llmgw.wire.conn import Conn
from llmgw.wire.link import Link
from llmgw.wire.messages import Answer, Ask, DesiredSet, Message, Refused


class AgentHandle:
    """One connection of one agent; safe to use from any thread, harmless after the connection is gone."""

    def __init__(self, link: Link, conn: Conn, node_id: str, instance_id: str) -> None:
        self.certificate = conn.certificate
        self.node_id = node_id
        self.instance_id = instance_id
        self.address = conn.address
        self._link = link
        self._conn = conn
        self._lock = threading.Lock()
        self._welcomed = False
        self._early: Desired | None = None
        self._gone: str | None = None
        self._questions: dict[str, Future[Answer]] = {}
        self._numbers = itertools.count(1)

    def send_desired(self, desired: Desired) -> None:
        """Send the full desired set; one that still waits for a slow agent is replaced.

        Raises:
            WireError: it is too long for one message.
        """
        with self._lock:
            if not self._welcomed:
                self._early = desired
                return
        self._link.send(self._conn, DesiredSet(desired), replace_key="desired")

    def ask(self, what: str, args: Mapping[str, str], timeout_s: float) -> Any:
        """Ask the agent a small question, such as `logs`, and wait for the answer: JSON.

        Raises:
            LinkError: the agent is not connected, or did not answer in time.
            ApiError: the agent answered that it cannot, in its own words.
        """
        future: Future[Answer] = Future()
        with self._lock:
            if self._gone is not None or not self._welcomed:
                why = self._gone or "it is not connected yet"
                raise LinkError(f"cannot ask node `{self.node_id}` for `{what}`", cause=why)
            number = str(next(self._numbers))
            self._questions[number] = future
        try:
            self._link.send(self._conn, Ask(number, what, args))
            answer = future.result(timeout_s)
        except FutureTimeout:
            raise LinkError(
                f"node `{self.node_id}` did not answer `{what}` within {format_duration(timeout_s)}",
                hint="look at the agent's log on that node",
            ) from None
        finally:
            with self._lock:
                self._questions.pop(number, None)
        if answer.error:
            raise ApiError(answer.error, code="node-answered-error")
        return answer.result

    def close(self, words: str, code: str = "link-failed") -> None:
        """Tell the agent why and end the connection; it will come back, unless it is refused then."""
        self._link.close(self._conn, LinkError(words), Refused(code, words))

    def say(self, message: Message) -> None:
        """Send a protocol message (the listener's own)."""
        self._link.send(self._conn, message)

    def welcomed(self) -> None:
        """From now on messages flow; what was wanted before is sent."""
        with self._lock:
            self._welcomed = True
            early, self._early = self._early, None
        if early is not None:
            self._link.send(self._conn, DesiredSet(early), replace_key="desired")

    def answered(self, answer: Answer) -> None:
        """An answer arrived; one nobody waits for any more is dropped."""
        with self._lock:
            future = self._questions.pop(answer.id, None)
        if future is not None:
            future.set_result(answer)

    def ended(self, error: LlmgwError) -> None:
        """The connection is gone: everybody who waits is told."""
        with self._lock:
            self._gone = error.words()
            waiting, self._questions = list(self._questions.values()), {}
        for future in waiting:
            future.set_exception(LinkError(f"node `{self.node_id}` went away", cause=error.words()))
