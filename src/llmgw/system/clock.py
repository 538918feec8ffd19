"""Time. Only app files construct `RealClock`; everything else is handed a `Clock`."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What time it is and how to wait."""

    def now(self) -> float:
        """Seconds since the epoch: for people and for other machines."""
        ...

    def monotonic(self) -> float:
        """Seconds since some start: for deadlines; immune to clock steps."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until `event` is set or `timeout_s` have passed; True when it is set."""
        ...


class RealClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)
