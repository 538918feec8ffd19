"""What `llmgw up` says to its own server: apply the profile, watch it become ready, ask the question."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from llmgw.errors import ApiError, HttpError, LlmgwError
from llmgw.system.files import read_text, write_atomic
from llmgw.system.http import Http
from llmgw.up.choice import ENGINE, Choice
from llmgw.up.parts import Parts
from llmgw.up.watch import Watch, clean

_START_S = 30.0
_TURN_S = 0.2
_MANNER = "You are a helpful assistant. Answer in English, in one short sentence."


class Talk:
    """The client side of one `llmgw up`."""

    def __init__(self, http: Http, parts: Parts, watch: Watch, stop: threading.Event) -> None:
        self._http = http
        self._parts = parts
        self._watch = watch
        self._stop = stop

    def get_status(self, url: str) -> int:
        """Status of a GET to the outside.

        Raises:
            HttpError: nobody answered within a few seconds.
        """
        return self._http.request("GET", url, timeout_s=6.0, connect_timeout_s=4.0).status

    def await_server(self) -> None:
        """Wait until the server answers.

        Raises:
            LlmgwError: it ended, or does not answer in time; carries its own last line.
        """
        for _ in range(int(_START_S / _TURN_S)):
            self._parts.check()
            if self._api("GET", "/status", quiet=True) is not None or self._stop.is_set():
                return
            self._stop.wait(_TURN_S)
        raise LlmgwError("the server does not answer", cause=self._parts.its_error("server").words())

    def apply(self, choice: Choice) -> None:
        """Tell the server which model is wanted; the one an earlier `up` asked for is taken back when it is another."""
        kept = self._parts.state / "profile.txt"
        before = (read_text(kept) or "").strip()
        if before and before != choice.model_name:
            self._api("DELETE", f"/profiles/{quote(before, safe='')}", quiet=True)
        body = {"name": choice.model_name, "model": choice.model, "engine": ENGINE, "slots": 2, "context": 2048}
        self._api("PUT", f"/profiles/{quote(choice.model_name, safe='')}", body)
        write_atomic(kept, choice.model_name.encode())

    def await_ready(self, name: str, *, give_up: bool) -> None:
        """Show words and progress until the model is ready.

        Args:
            give_up: a failed engine or replica is an error; otherwise it is shown and waited for.

        Raises:
            LlmgwError: a part ended, or something failed and `give_up`.
        """
        while not self._stop.is_set():
            self._parts.check()
            for node in self._api("GET", "/nodes")["nodes"]:
                for engine in node["engines"]:
                    if engine["name"] == ENGINE:
                        self._show(ENGINE, engine, give_up)
            for replica in self._api("GET", "/replicas")["replicas"]:
                if replica["profile"] == name:
                    if replica["state"] != "pending":
                        self._show(name, replica, give_up)
                    if replica["state"] == "ready" and self._routed(name):
                        return
            self._stop.wait(_TURN_S)

    def _show(self, subject: str, status: dict[str, Any], give_up: bool) -> None:
        self._watch.show(subject, status["words"], status.get("progress"))
        if give_up and status["state"] == "failed":
            raise LlmgwError(f"{subject} is not ready", cause=status["words"], hint="the reason is in the words above")

    def _routed(self, name: str) -> bool:
        """True when the gateway knows that the model is ready: it may learn of it a moment later than the server."""
        try:
            answer = self._http.request("GET", f"{self._parts.url}/v1/models", timeout_s=5.0)
            return any(m["id"] == name and m.get("state") == "ready" for m in json.loads(answer.body)["data"])
        except (HttpError, ValueError, KeyError):
            return False

    def ask(self, name: str, question: str) -> Iterator[str]:
        """The streamed answer, piece by piece.

        Raises:
            LlmgwError: the gateway answered with an error, or the stream broke.
        """
        body = {
            "model": name,
            "stream": True,
            "max_tokens": 128,
            "temperature": 0,
            "messages": [{"role": "system", "content": _MANNER}, {"role": "user", "content": question}],
        }
        with self._http.stream(
            f"{self._parts.url}/v1/chat/completions",
            method="POST",
            headers={"Content-Type": "application/json"},
            body=json.dumps(body).encode(),
            read_timeout_s=120.0,
        ) as answer:
            if answer.status != 200:
                raise ApiError(
                    f"the gateway answered {answer.status}", cause=b"".join(answer).decode("utf-8", "replace")
                )
            yield from _contents(iter(answer))

    def _api(self, method: str, path: str, body: Any = None, *, quiet: bool = False) -> Any:
        token = (read_text(self._parts.token_file) or "").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            answer = self._http.request(method, f"{self._parts.url}/api/v1{path}", headers=headers, body=data)
            result = json.loads(answer.body)
        except (HttpError, ValueError):
            if quiet:
                return None
            raise
        if answer.status >= 400:
            if quiet:
                return None
            error = result.get("error", {})
            raise ApiError(
                error.get("message", f"the server answered {answer.status}"),
                cause=error.get("cause", ""),
                hint=error.get("hint", ""),
            )
        return result


def _contents(pieces: Iterator[bytes]) -> Iterator[str]:
    """The text in a stream of server-sent events of chat completion chunks."""
    buffer = b""
    for piece in pieces:
        buffer += piece
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ApiError("the answer broke off", cause=str(event["error"].get("message", event["error"])))
            for choice in event.get("choices", ()):
                text = choice.get("delta", {}).get("content")
                if text:
                    yield "".join(c if c in "\n\t" else clean(c) for c in text)
