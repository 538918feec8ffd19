"""A value that is slow to get, kept fresh by a thread: whoever asks never waits for a hanging driver or disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from llmgw.system.clock import Clock

T = TypeVar("T")


class Latest(Generic[T]):
    """The last value of `make`, made anew in a thread at most every `every_s` seconds and never twice at once.

    Args:
        name: of the thread.
        make: gets the value; may hang. An exception keeps the last value and is told by `error`.
    """

    def __init__(self, name: str, make: Callable[[], T], clock: Clock, every_s: float) -> None:
        self._name = name
        self._make = make
        self._clock = clock
        self._every_s = every_s
        self._lock = threading.Lock()
        self._value: T | None = None
        self._value_at: float | None = None
        self._value_began = 0.0
        self._started_at: float | None = None
        self._running: threading.Event | None = None
        self._error: Exception | None = None

    def get(self, wait_s: float = 0.0, max_age_s: float | None = None) -> T | None:
        """The last value; begins a new round when one is due.

        Args:
            wait_s: how long to wait for a running round.
            max_age_s: an older value counts as none.
        """
        done = self._begin_when_due()
        if wait_s > 0:
            self._clock.wait(done, wait_s)
        with self._lock:
            if self._value_at is None:
                return None
            if max_age_s is not None and self._clock.monotonic() - self._value_at > max_age_s:
                return None
            return self._value

    def dated(self, every_s: float) -> tuple[T, float] | None:
        """The last value and when it began to be made, on the monotonic clock; None before the first.

        Never waits. For somebody who waits for a change: a new round begins when the last one began `every_s` ago.
        """
        self._begin_when_due(every_s)
        with self._lock:
            if self._value is None or self._value_at is None:
                return None
            return self._value, self._value_began

    def put(self, value: T, began: float | None = None) -> None:
        """Take a value that was got by other means; `began` when that began, monotonic, None: just now."""
        with self._lock:
            self._value, self._value_at, self._error = value, self._clock.monotonic(), None
            self._started_at = self._value_at
            self._value_began = self._value_at if began is None else began

    @property
    def error(self) -> Exception | None:
        """Why the last round brought no value, None when it did."""
        with self._lock:
            return self._error

    def hanging_s(self) -> float:
        """How long the running round has been running, 0 when none is."""
        with self._lock:
            if self._running is None or self._running.is_set() or self._started_at is None:
                return 0.0
            return self._clock.monotonic() - self._started_at

    def _begin_when_due(self, every_s: float | None = None) -> threading.Event:
        wanted_s = self._every_s if every_s is None else every_s
        with self._lock:
            if self._running is not None and not self._running.is_set():
                return self._running
            now = self._clock.monotonic()
            if self._started_at is not None and now - self._started_at < wanted_s:
                done = threading.Event()
                done.set()
                return done
            self._started_at = now
            self._running = threading.Event()
            try:
                threading.Thread(target=self._round, args=(self._running, now), name=self._name, daemon=True).start()
            except RuntimeError as error:  # no thread to be had: tried again when due
                self._error = error
                self._running.set()
            return self._running

    def _round(self, done: threading.Event, began: float) -> None:
        try:
            value = self._make()
        except Exception as error:
            with self._lock:
                self._error = error
        else:
            with self._lock:
                self._value, self._value_at, self._error = value, self._clock.monotonic(), None
                self._value_began = began
        finally:
            done.set()
