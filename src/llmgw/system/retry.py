"""When to ask again: three attempts, growing pauses with jitter, and a server's `Retry-After` up to a bound."""

from __future__ import annotations

import email.utils
import random
import threading
import time
from collections.abc import Mapping

from attrs import frozen


@frozen
class RetryPolicy:
    """How often and when a failed request is repeated.

    Args:
        attempts: in all, the first one included.
        base_s: pause after the first failure; it doubles with each further one, and half of it is jitter.
        most_s: longest pause; a server that asks for a longer one is not waited for.
    """

    attempts: int = 3
    base_s: float = 1.0
    most_s: float = 30.0

    def pause(self, failures: int, retry_after_s: float | None) -> float | None:
        """Seconds to wait after the given number of failures; None when it is time to give up."""
        if failures >= self.attempts or (retry_after_s is not None and retry_after_s > self.most_s):
            return None
        if retry_after_s is not None:
            return retry_after_s + random.uniform(0, min(1.0, self.base_s))
        longest: float = min(self.most_s, self.base_s * 2.0 ** (failures - 1))
        return random.uniform(longest / 2, longest)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds a `Retry-After` field asks for (RFC 9110, 10.2.3: a number, or an HTTP date); None when it is not there.

    Args:
        headers: case-insensitive.
        now: seconds since the epoch, for the date form.
    """
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return max(0.0, date.timestamp() - (time.time() if now is None else now))


def wait(stop: threading.Event | None, seconds: float) -> bool:
    """Pause; True when `stop` was set meanwhile."""
    return (stop or threading.Event()).wait(seconds)
