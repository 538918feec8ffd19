"""Client keys: who is asking, and which models they may use."""

from __future__ import annotations

import hashlib
import hmac

from llmgw.domain.routing import RouteKey, RouteTable
from llmgw.gateway.errors import Answer, RequestRefused, refuse
from llmgw.gateway.head import RequestHead

_NOBODY = "0" * 64


class Keys:
    """The keys of the last snapshot."""

    def __init__(self) -> None:
        self._by_digest: dict[str, RouteKey] = {}
        self._required = False

    def apply(self, table: RouteTable) -> None:
        """Take over the keys of a new snapshot."""
        self._by_digest = {key.sha256.lower(): key for key in table.keys}
        self._required = table.keys_required

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
        return key

    def _given(self, head: RequestHead) -> bytes | None:
        scheme, _, rest = head.authorization.partition(b" ")
        if scheme.lower() == b"bearer" and rest.strip(b" "):
            return rest.strip(b" ")
        return head.key or None


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
