"""What happened lately, in words: the last events in memory, for `ctl events` and for those who follow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from attrs import frozen

from llmgw.system.clock import Clock

KEPT = 5000


@frozen
class Event:
    """One thing that happened.

    Args:
        seq: counts up, also over server starts; gaps mean nothing.
        at: seconds since the epoch.
        kind: `node`, `replica`, `profile` or `server`.
        subject: the node, replica or profile it is about, "" for the server itself.
        words: the sentence.
    """

    seq: int
    at: float
    kind: str
    subject: str
    words: str


class Events:
    """The last `KEPT` events. Any thread may call; only `wait` blocks.

    Args:
        kept: events of earlier servers, oldest first.
    """

    def __init__(self, clock: Clock, kept: Iterable[Event] = ()) -> None:
        self._clock = clock
        self._news = threading.Condition()
        self._events: deque[Event] = deque(kept, maxlen=KEPT)
        self._unsaved: deque[Event] = deque(maxlen=KEPT)
        # an earlier server may have shown events it could not keep any more: their numbers are not given again
        self._seq = self._events[-1].seq + KEPT if self._events else 0

    def record(self, kind: str, subject: str, words: str) -> None:
        """Something happened."""
        with self._news:
            self._seq += 1
            event = Event(self._seq, self._clock.now(), kind, subject, words)
            self._events.append(event)
            self._unsaved.append(event)
            self._news.notify_all()

    def since(self, seq: int, limit: int = KEPT) -> tuple[Event, ...]:
        """The last `limit` events after `seq`, oldest first."""
        with self._news:
            return tuple([event for event in self._events if event.seq > seq][-limit:])

    def wait(self, seq: int, timeout_s: float) -> tuple[Event, ...]:
        """Like `since`, but waits for the first one for a while."""
        with self._news:
            self._news.wait_for(lambda: self._seq > seq and bool(self._events), timeout_s)
        return self.since(seq)

    def unsaved(self) -> tuple[Event, ...]:
        """What is not on disk yet; forgotten here."""
        with self._news:
            taken = tuple(self._unsaved)
            self._unsaved.clear()
        return taken
