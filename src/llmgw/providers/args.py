"""A profile's own arguments must not take over what llmgw sets itself."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.errors import ProviderError


def refuse_reserved(args: Sequence[str], reserved: Sequence[str]) -> None:
    """Check a profile's `args` against the flags a provider sets itself.

    Raises:
        ProviderError: one of them is reserved; names it.
    """
    for arg in args:
        flag = arg.partition("=")[0]
        if flag in reserved:
            raise ProviderError(
                f"the profile's `args` must not set `{flag}`",
                cause="llmgw sets it itself",
                hint="use the profile's own keys (`model`, `context`, `slots`, `gpus`) instead",
            )
