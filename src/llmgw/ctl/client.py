"""The admin API as a client: plain data in, plain data out, errors in the server's own words."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from llmgw.ctl.contexts import Where
from llmgw.errors import ApiError, ConfigError, HttpError, Unreachable, UsageError

BASE = "/api/v1"
_LIMIT = 64 << 20
# how a port that waits for a TLS handshake may answer a request in the clear
_HUNG_UP = ("without an answer", "reset the connection", "does not speak HTTP")


class Answer(Protocol):
    """What comes back; any status is an answer."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes: ...


class Transport(Protocol):
    """What the client needs of `system.http.Http`."""

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
        ...


class Client:
    """Talks to one server."""

    def __init__(self, where: Where, http: Transport) -> None:
        self._where = where
        self._http = http

    def get(self, *path: str, query: str = "") -> dict[str, Any]:
        """GET `/api/v1/` + path; each part is percent-encoded.

        Returns:
            The JSON object.

        Raises:
            Unreachable: no answer.
            ApiError: an error answer, or something that is not llmgw.
        """
        return self._ask("GET", path, None, query)

    def put(self, *path: str, body: Any) -> dict[str, Any]:
        """PUT a JSON body; see `get`."""
        return self._ask("PUT", path, body)

    def post(self, *path: str, body: Any) -> dict[str, Any]:
        """POST a JSON body; see `get`."""
        return self._ask("POST", path, body)

    def delete(self, *path: str) -> dict[str, Any]:
        """DELETE; see `get`."""
        return self._ask("DELETE", path, None)

    def put_bytes(self, *path: str, query: str, body: bytes) -> dict[str, Any]:
        """PUT bytes as they are; see `get`."""
        url = self._where.server + "/".join([BASE, *(quote(part, safe="") for part in path)])
        return self._read(self._request("PUT", f"{url}?{query}", {"Accept": "application/json"}, body))

    def piece(self, path: str, first: int, last: int) -> Answer:
        """GET the bytes `first` to `last`, both included, of a file the server serves; any status is an answer.

        Raises:
            Unreachable: no answer.
        """
        return self._request("GET", self._where.server + path, {"Range": f"bytes={first}-{last}"}, None)

    def failed(self, answer: Answer) -> Exception:
        """What an error answer says, as an error to raise."""
        try:
            said = json.loads(answer.body).get("error")
        except (ValueError, AttributeError, RecursionError):
            said = None
        return self._failed(answer.status, said)

    def _ask(self, method: str, path: tuple[str, ...], body: Any, query: str = "") -> dict[str, Any]:
        url = self._where.server + "/".join([BASE, *(quote(part, safe="") for part in path)])
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        return self._read(self._request(method, url + (f"?{query}" if query else ""), headers, data))

    def _request(self, method: str, url: str, headers: dict[str, str], body: bytes | None) -> Answer:
        if self._where.token is not None:
            headers["Authorization"] = f"Bearer {self._where.token}"
        try:
            return self._http.request(method, url, headers=headers, body=body, timeout_s=30.0, max_bytes=_LIMIT)
        except HttpError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: HttpError) -> Unreachable:
        where = self._where
        if error.code == "tls-files":
            # nothing was asked yet: a file on this side is wrong
            hint = error.hint or f"see {where.origin}"
            return Unreachable(error.message, cause=error.cause, hint=hint, code=error.code)
        hint = "start one with `llmgw up` or `llmgw server`, or name yours with `--server URL` or `LLMGW_SERVER`"
        if where.origin != "the default":
            hint = f"check that it runs and that the address is right (it comes from {where.origin})"
        message, cause = f"no llmgw server at `{where.server}`", error.cause or error.message
        if where.server.startswith("https://"):
            from llmgw.system import http_words  # brings ssl, which questions in the clear do without

            trouble = http_words.tls_trouble(error)
            if trouble is None and where.certificate is not None and any(words in cause for words in _HUNG_UP):
                # with TLS 1.3 a server that does not take our certificate says so after the handshake, or just leaves
                from llmgw.pki.listing import show_certificate

                standing = show_certificate(Path(where.certificate[0]), time.time()).words
                message = f"no secure connection to `{where.server}`"
                hint = (
                    f"it may not accept the certificate `{where.certificate[0]}` ({standing}): "
                    "see `http.tls.client_ca` and `http.tls.client_crl` in server.yaml"
                )
            if trouble is not None:
                message, hint = f"no secure connection to `{where.server}`", trouble or hint
                if trouble == http_words.TRUST:
                    trusted = f"`{where.ca}` (`ca` of {where.origin})" if where.ca else "this machine's own"
                    hint = (
                        f"trusted are the CAs of {trusted}; name its CA under `ca` of a context in "
                        "`~/.config/llmgw/ctl.yaml`, or in `SSL_CERT_FILE`"
                    )
        elif any(words in cause for words in _HUNG_UP):
            hint = f"if it serves TLS, write `https://`; {hint}"
        return Unreachable(message, cause=cause, hint=error.hint or hint)

    def _read(self, answer: Answer) -> dict[str, Any]:
        try:
            data = json.loads(answer.body)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise ApiError(
                f"what answers at `{self._where.server}` is not an llmgw server",
                cause=f"status {answer.status} without a JSON object",
                hint=f"the address comes from {self._where.origin}",
            )
        if 200 <= answer.status < 300:
            return data
        raise self._failed(answer.status, data.get("error"))

    def _failed(self, status: int, said: Any) -> Exception:
        said = said if isinstance(said, dict) else {}

        def part(name: str) -> str:
            value = said.get(name)
            return value if isinstance(value, str) else ""

        message = part("message") or f"the server answered {status}"
        if status == 401:
            return ApiError(
                f"the server refused the token: {message}" if self._where.token else "the server needs a token",
                cause=self._where.token_words,
                hint="name the server's admin token with `--token-file FILE` or `LLMGW_TOKEN_FILE`, "
                "or run as a user who may read it",
                code="unauthorized",
            )
        problems = said.get("problems")
        if isinstance(problems, list) and problems:
            return ConfigError(message, [str(p) for p in problems], hint=part("hint"))
        failure = ApiError(message, cause=part("cause"), hint=part("hint"), code=part("code"))
        if failure.code in ("usage", "name-invalid", "unit-invalid"):
            failure.exit_code = UsageError.exit_code  # type: ignore[misc]  # what was typed is wrong
        return failure
