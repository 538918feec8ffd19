"""Devices that engines have left, until their memory is back. Only the supervisor's owner thread uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve

from llmgw.domain.devices import Awaited, Back, DeviceMemory, Left, StillTaken, judge_memory
from llmgw.system.clock import Clock

_FIRST_READING_S = 5.0

GpuFree = Callable[[], Mapping[str, DeviceMemory] | None]


class Devices:
    """Which devices still wait for their memory.

    Args:
        gpu_free: the last readings by uuid, None while there are none; must not block. A device that is missing is one
            whose memory cannot be read. Asking is what makes readings follow one another quickly.
        wait_s: how long after an engine's end its memory is waited for.
    """

    def __init__(self, gpu_free: GpuFree, clock: Clock, wait_s: float) -> None:
        self._gpu_free = gpu_free
        self._clock = clock
        self._wait_s = wait_s
        self._left: dict[str, Left] = {}
        self._asked: set[str] = set()

    def before(self, gpus: Sequence[str]) -> dict[str, int]:
        """Bytes free now on each of them, for the record of the engine about to be started there."""
        read = self._gpu_free() if gpus else None
        return {uuid: read[uuid].free_bytes for uuid in gpus if uuid in read} if read else {}

    def note_left(self, by: str, free_before: Mapping[str, int]) -> None:
        """All processes of an engine of replica `by` are gone; `free_before` is what `before` said at its start."""
        now = self._clock.monotonic()
        for uuid, free in free_before.items():
            self._left[uuid] = Left(uuid, by, free, now, now + self._wait_s)
            self._asked.discard(uuid)

    def waiting(self, gpus: Sequence[str]) -> str:
        """Words when one of them has not got its memory back; "" when an engine may be started, see `taken`."""
        words = [each.words for each in self._judge(gpus) if isinstance(each, Awaited)]
        return f"{words[0]}, and for {len(words) - 1} more" if len(words) > 1 else "".join(words)

    def taken(self, gpus: Sequence[str]) -> str:
        """Words about memory of theirs that was given up; "" when there is none. Ask before the engine starts."""
        return "; ".join(each.words for each in self._judge(gpus) if isinstance(each, StillTaken))

    def note_entered(self, gpus: Sequence[str]) -> None:
        """An engine has been started on them: what was left there before is past."""
        for uuid in gpus:
            self._left.pop(uuid, None)

    def _judge(self, gpus: Sequence[str]) -> list[Back | Awaited | StillTaken]:
        asked = [uuid for uuid in gpus if uuid in self._left]
        if not asked:
            return []
        now, read = self._clock.monotonic(), self._gpu_free() or {}
        for uuid in asked:
            if uuid not in self._asked:  # a device that was left long ago may not have been read since
                self._asked.add(uuid)
                left = self._left[uuid]
                self._left[uuid] = evolve(left, until=max(left.until, now + min(_FIRST_READING_S, self._wait_s)))
        return [judge_memory(self._left[uuid], read.get(uuid), now) for uuid in asked]
