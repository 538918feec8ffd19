"""The HTTP client of `llmgw ctl`: the lean one where it will do, else the full one, which is imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmgw.system import plain

if TYPE_CHECKING:
    from llmgw.ctl.client import Answer
    from llmgw.system.http import Http


class Dialer:
    """Args: `ca`, PEM file of the authorities to trust; None means the machine's own. `certificate`: PEM files of an
    operator's certificate and its key.
    """

    def __init__(self, ca: str | None, certificate: tuple[str, str] | None = None) -> None:
        self._ca = ca
        self._certificate = certificate
        self._made: Http | None = None

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 5.0,
        max_bytes: int = 16 << 20,
    ) -> Answer:
        """Ask and read the whole answer.

        Raises:
            HttpError: there was none.
        """
        limits: dict[str, Any] = {
            "timeout_s": timeout_s, "connect_timeout_s": connect_timeout_s, "max_bytes": max_bytes,
        }  # fmt: skip
        if method == "GET" and body is None:
            answer = plain.get(url, headers or {}, **limits)
            if answer is not None:
                return answer
        return self._full.request(method, url, headers=headers, body=body, **limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._full, name)

    @property
    def _full(self) -> Http:
        if self._made is None:
            from llmgw.system.http import Http

            self._made = Http(ca_file=self._ca, certificate=self._certificate)
        return self._made
