"""Answers the server's questions in a thread of its own: finding an answer may take as long as it takes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from llmgw.errors import LlmgwError, WireError
from llmgw.wire.conn import Conn
from llmgw.wire.link import Link
from llmgw.wire.messages import Answer, Ask

log = logging.getLogger(__name__)

_WAITING = 64
_STOP_S = 5.0


class Answerer:
    """One question at a time, in order.

    Args:
        answers: question -> function of its arguments; its result must be JSON.
        link: what the answers are sent through.
    """

    def __init__(self, answers: Mapping[str, Callable[[Mapping[str, str]], Any]], link: Link) -> None:
        self._answers = dict(answers)
        self._link = link
        self._asked: queue.Queue[tuple[Conn, Ask] | None] = queue.Queue(_WAITING)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Answer nothing more; waits a little for the answer that is being found."""
        self._stopping.set()
        try:
            self._asked.put_nowait(None)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                log.warning("a question of the server is still being answered, not waited for")

    def ask(self, conn: Conn, ask: Ask) -> None:
        """Queue a question; one too many is answered with an error at once."""
        try:
            self._asked.put_nowait((conn, ask))
        except queue.Full:
            self._link.send(conn, Answer(ask.id, error=f"{_WAITING} questions are waiting already, ask again later"))

    def _run(self) -> None:
        while not self._stopping.is_set():
            item = self._asked.get()
            if item is None:
                return
            conn, ask = item
            try:
                self._link.send(conn, self._answer(ask))
            except WireError as error:
                self._link.send(conn, Answer(ask.id, error=error.words()))

    def _answer(self, ask: Ask) -> Answer:
        function = self._answers.get(ask.what)
        if function is None:
            known = ", ".join(f"`{name}`" for name in sorted(self._answers)) or "nothing"
            return Answer(ask.id, error=f"this agent does not know how to answer `{ask.what[:64]}`, it knows {known}")
        try:
            return Answer(ask.id, result=function(ask.args))
        except LlmgwError as error:
            return Answer(ask.id, error=error.words())
        except Exception as error:
            log.exception("fault while answering `%s`", ask.what[:64])
            return Answer(ask.id, error=f"a fault inside the agent: {type(error).__name__}: {error}"[:500])
