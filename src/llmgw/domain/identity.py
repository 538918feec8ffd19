"""Who a certificate says its holder is, and when it is time for a new one."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from llmgw.units import format_duration

Role = Literal["node", "operator", "server"]
ROLES: tuple[Role, ...] = ("node", "operator", "server")

LONGEST_BACKDATE_S = 3600.0


@frozen
class Certified:
    """The validity of one certificate.

    Args:
        serial: hexadecimal.
        not_before, not_after: seconds since the epoch.
    """

    serial: str
    not_before: float
    not_after: float

    @property
    def renewal_at(self) -> float:
        """Half of its life: from then on a new one is asked for."""
        return (self.not_before + self.not_after) / 2

    @property
    def worry_at(self) -> float:
        """The beginning of its last third: a renewal should have happened, so people are told."""
        return self.not_after - (self.not_after - self.not_before) / 3

    def words(self, now: float) -> str:
        """How it stands: `expires in 12d3h`, `expired 2h ago`, `not valid for another 1d`."""
        if now < self.not_before:
            return f"not valid for another {format_duration(self.not_before - now)}"
        if now >= self.not_after:
            return f"expired {format_duration(now - self.not_after)} ago"
        return f"expires in {format_duration(self.not_after - now)}"


def role_uri(role: Role, name: str) -> str:
    """The URI among a certificate's alternative names that says what its holder is: `llmgw:node:gpu-a-01`."""
    return f"llmgw:{role}:{name}"


def read_role_uri(uri: str) -> tuple[Role, str] | None:
    """Role and name of such a URI; None for any other."""
    for role in ROLES:
        prefix = f"llmgw:{role}:"
        if uri.startswith(prefix):
            return role, uri.removeprefix(prefix)
    return None


def backdate_s(life_s: float) -> float:
    """How far before now a certificate begins: a holder whose clock is behind must be able to use it at once."""
    return min(LONGEST_BACKDATE_S, life_s / 10)
