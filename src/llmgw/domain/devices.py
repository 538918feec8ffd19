"""When a device counts as free again: not when its engine is gone, but when its memory is back.

A driver gives memory back seconds after the last process that held it was killed; an engine started in that gap finds
too little and fails. Some crashes never give it back, so there is an end to the waiting.
"""

from __future__ import annotations

from attrs import frozen

from llmgw.units import format_duration, format_size

_SLACK_BYTES = 256 << 20
_SLACK_SHARE = 0.01


@frozen
class DeviceMemory:
    """Memory of one device as it was read.

    Args:
        free_bytes: counting what strangers use.
        total_bytes: None when unknown.
        at: when the reading began, seconds on the clock of `judge_memory`'s `now`: it says nothing of what came later.
    """

    free_bytes: int
    total_bytes: int | None
    at: float


@frozen
class Left:
    """What is known of a device that an engine has left.

    Args:
        uuid: of the device.
        by: the replica whose engine it was.
        free_before: bytes that were free before that engine was started.
        gone_at: since when all processes of the engine are gone, seconds on the clock of `now`.
        until: when waiting ends, on the same clock.
    """

    uuid: str
    by: str
    free_before: int
    gone_at: float
    until: float


@frozen
class Back:
    """The device may be used. Also when its memory cannot be read: what is unknown keeps nobody waiting."""


@frozen
class Awaited:
    """The memory is not back yet, in words."""

    words: str


@frozen
class StillTaken:
    """The memory did not come back in time, in words that say what to do. The next engine is started all the same: it
    may need less than is free, and if not, its own words are the diagnosis.
    """

    words: str


def judge_memory(left: Left, read: DeviceMemory | None, now: float) -> Back | Awaited | StillTaken:
    """Decide whether the memory of a device is back.

    It is back when as much is free as was before the engine, less 256 MiB or 1 % of the device, whichever is more:
    what a display or a driver takes varies by as much. (A judgment, not a measurement.)

    Args:
        read: the last reading of the device; None when it cannot be read.
        now: seconds on a clock that never goes back.
    """
    if read is None:
        return Back()
    waited = format_duration(max(1.0, now - left.gone_at))
    if read.at < left.gone_at:
        if now < left.until:
            return Awaited(f"waiting until `{left.uuid}` has its memory back (not read since `{left.by}` left it)")
        return StillTaken(
            f"the memory of `{left.uuid}` has not been read for {waited}, since `{left.by}` left it: see whether "
            "`nvidia-smi` answers on this node"
        )
    missing = left.free_before - read.free_bytes
    if missing <= max(_SLACK_BYTES, _SLACK_SHARE * (read.total_bytes or 0)):
        return Back()
    of = f" of {format_size(read.total_bytes)}" if read.total_bytes is not None else ""
    if now < left.until:
        return Awaited(f"waiting until `{left.uuid}` has its memory back ({format_size(missing)}{of} still taken)")
    return StillTaken(
        f"`{left.uuid}` did not get its memory back: {format_size(missing)}{of} still taken {waited} after `{left.by}` "
        "left it; end the process that holds it (`nvidia-smi --query-compute-apps=pid,used_memory --format=csv` lists "
        "them), and if none does, reset the GPU or restart the node"
    )
