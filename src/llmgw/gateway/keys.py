"""Client keys: who is asking, which models they may use, how much per minute."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable

from llmgw.domain.routing import RouteKey, RouteTable
from llmgw.gateway.errors import NO_RETRY, Answer, RequestRefused, refuse
from llmgw.gateway.head import RequestHead
from llmgw.gateway.limits import Budget, Limits

_NOBODY = "0" * 64
_PATIENCE_S = 120.0


class Keys:
    """The keys of the last snapshot.

    Args:
        now: seconds on a clock that only goes forward.
        limits: where requests and tokens are counted with other gateway processes; None: by this one alone.
        share: this process's part of a limit that it counts alone.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, limits: Limits | None = None, share: float = 1.0
    ) -> None:
        self._by_digest: dict[str, RouteKey] = {}
        self._budgets: dict[str, Budget] = {}
        self._required = False
        self._now = now
        self._limits = limits
        self._share = share

    def apply(self, table: RouteTable) -> None:
        """Take over the keys of a new snapshot; what is left of a limit stays as it is unless the limit changed."""
        self._by_digest = {key.sha256.lower(): key for key in table.keys}
        self._required = table.keys_required
        limited = [key for key in table.keys if key.rpm is not None or key.tpm is not None]
        old, self._budgets = self._budgets, {}
        if self._limits is not None:
            self._budgets.update(self._limits.budgets(limited, self._now()))
        for key in limited:
            if key.name not in self._budgets:
                budget = old.get(key.name)
                if budget is None or (budget.rpm, budget.tpm) != (key.rpm, key.tpm):
                    budget = Budget(key.rpm, key.tpm, self._share)
                self._budgets[key.name] = budget

    def check(self, head: RequestHead) -> RouteKey | None:
        """Who sent this request; None for an anonymous request where no key is required.

        A key is looked up by its sha256 and then compared in constant time: the position in a table of digests says
        nothing about a key, since nobody can choose a digest. Where there are no keys at all, whatever a client sends
        is ignored (many clients cannot send nothing).

        Raises:
            RequestRefused: 401.
        """
        given = self._given(head)
        if given is None:
            if self._required:
                raise RequestRefused(
                    _unauthorized("this gateway needs an API key: send `Authorization: Bearer KEY`", "missing_api_key")
                )
            return None
        if not self._by_digest and not self._required:
            return None
        digest = hashlib.sha256(given).hexdigest()
        key = self._by_digest.get(digest)
        if not hmac.compare_digest(digest, key.sha256.lower() if key else _NOBODY) or key is None:
            raise RequestRefused(_unauthorized("the API key is not known here", "invalid_api_key"))
        check_expiry(key)
        return key

    def budget(self, key: RouteKey | None) -> Budget | None:
        """What bounds this key's requests, None for nothing. Good until the next snapshot."""
        return self._budgets.get(key.name) if key is not None else None

    def limited(self, key: RouteKey, over: tuple[str, float]) -> Answer:
        """429: what `Budget.take` said does not allow a request now."""
        which, wait_s = over
        what = f"{key.rpm} requests" if which == "rpm" else f"{key.tpm} tokens"
        words = f"the API key `{key.name}` is limited to {what} a minute; the next is possible in {wait_s:.1f} s"
        code = "rate_limit_exceeded" if which == "rpm" else "token_limit_exceeded"
        headers = NO_RETRY if wait_s > _PATIENCE_S else ()
        return refuse(429, words, kind="rate_limit_error", code=code, retry_after_s=wait_s, headers=headers)

    def _given(self, head: RequestHead) -> bytes | None:
        scheme, _, rest = head.authorization.partition(b" ")
        if scheme.lower() == b"bearer" and rest.strip(b" "):
            return rest.strip(b" ")
        return head.key or None


def check_expiry(key: RouteKey) -> None:
    """Refuse a key whose time is over.

    Raises:
        RequestRefused: 401.
    """
    if key.expires is not None and time.time() >= key.expires:
        raise RequestRefused(_unauthorized(f"the API key `{key.name}` has expired", "expired_api_key"))


def may_use(key: RouteKey | None, name: str) -> bool:
    """Whether the holder of `key` may use the model `name`; a key without a list may use all."""
    return key is None or not key.models or name in key.models


def forbidden(key: RouteKey, name: str) -> Answer:
    """403: the model exists, and this key is not for it."""
    allowed = ", ".join(f"`{each}`" for each in key.models)
    return refuse(
        403,
        f"the API key `{key.name}` may not use the model `{name}`; it may use: {allowed}",
        kind="permission_error",
        code="model_not_allowed",
        param="model",
    )


def _unauthorized(words: str, code: str) -> Answer:
    return refuse(401, words, kind="authentication_error", code=code, headers=(("WWW-Authenticate", "Bearer"),))
