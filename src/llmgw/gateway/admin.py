"""Everything that is not the data plane's own goes, as it is, to the control process's unix socket."""

from __future__ import annotations

import re

import msgspec

from llmgw.gateway.errors import Answer
from llmgw.gateway.head import header_lines
from llmgw.gateway.relay import Relay
from llmgw.gateway.reply import Reply
from llmgw.gateway.upstream import Upstream

_HOP = frozenset(
    b"connection content-length keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_OURS = frozenset((b"host", b"expect", b"forwarded", b"x-real-ip", b"x-request-id"))
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_ANSWER_TIMEOUT_S = 60.0
_PATIENCE_S = 2.0


class AdminRelay(Relay):
    """One request to the admin socket. The connection is its own and closes with it."""

    def start(self) -> None:
        """Connect and send."""
        self._spawn(self._connect())

    def check(self, now: float) -> None:
        """An event stream may be silent for ever; only the head of the answer has a deadline."""
        options = self.plane.options
        if self._paused:
            if now - self.last > options.token_gap_timeout_s:
                self.cancel()
                self.client.abort()
        elif self.plane.draining and not self._headed and self.head.method == "GET" and now - self.began > _PATIENCE_S:
            # it waits for news: whoever asked asks again
            self.give_up("this gateway process ends; ask again")
        elif not self._headed and now - self.began > _ANSWER_TIMEOUT_S:
            self._fail(self._away(f"it did not answer within {_ANSWER_TIMEOUT_S:g} s", 504))

    def lost(self, words: str) -> None:
        """The control process ended in the middle of its answer."""
        if not self._ended:
            self._fail(self._away(words, 502))

    async def _connect(self) -> None:
        path = self.plane.admin_path
        try:
            upstream = await self.plane.pool.connect_unix(path)
        except OSError as error:
            self._task = None
            self._fail(self._away(f"its socket cannot be reached: {error}", 503))
            return
        self._task = None
        self._attach(upstream)
        upstream.ask(self, self._request(), self.body, head_only=self.head.method == "HEAD")

    def _request(self) -> bytes:
        head = self.head
        lines = [b"%b %b HTTP/1.1\r\nHost: %b\r\n" % (head.method.encode("ascii"), head.target, head.host)]
        fields = header_lines(head.fields)
        dropped = _HOP | _OURS | _named(fields)
        for name, value in fields:
            if name not in dropped and not name.startswith(b"x-forwarded-"):
                lines.append(b"%b: %b\r\n" % (name, value))
        if self.body or head.method not in ("GET", "HEAD", "OPTIONS"):
            lines.append(b"Content-Length: %d\r\n" % len(self.body))
        lines.append(b"X-Forwarded-For: %b\r\n" % self.client.peer.encode("ascii", "replace"))
        if self.client.operator:
            lines.append(b"X-Forwarded-Operator: %b\r\n" % self.client.operator.encode("ascii"))
        lines.append(b"X-Forwarded-Proto: %b\r\n" % (b"https" if self.client.secure else b"http"))
        lines.append(b"X-Request-Id: %b\r\nConnection: close\r\n\r\n" % self.request_id)
        return b"".join(lines)

    def _on_head(self, upstream: Upstream, reply: Reply) -> None:
        self._answer_fields = reply.fields
        length = upstream.length
        if self.head.method == "HEAD":
            length = reply.length
        self._open(reply.status, self._lines(), length)

    def _lines(self) -> bytes:
        dropped = _HOP | _named(self._answer_fields)
        lines = []
        for name, value in self._answer_fields:
            if name not in dropped and name != b"x-request-id" and _VALUE.fullmatch(value):
                lines.append(b"%b: %b\r\n" % (name, value))
                if name == b"content-type" and value.startswith(b"text/event-stream"):
                    self._endless = True  # a page that looks on comes again by itself
                    lines.append(b"x-accel-buffering: no\r\n")
        lines.append(b"x-request-id: %b\r\n" % self.request_id)
        return b"".join(lines)

    def _away(self, cause: str, status: int) -> Answer:
        message = "the control process is away; models go on being served under /v1"
        hint = "see whether `llmgw server` runs and what its log says"
        headers = (("Retry-After", "2"),)
        if self.head.path.startswith("/api/"):
            error = {"code": "control-away", "message": message, "cause": cause, "hint": hint}
            return Answer(status, msgspec.json.encode({"error": error}), headers=headers)
        text = f"{message}\n{cause}\n{hint}\n"
        return Answer(status, text.encode(), content_type="text/plain; charset=utf-8", headers=headers)


def _named(fields: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The headers that a Connection header declares to be for one hop only."""
    return frozenset(
        option.strip(b" \t").lower() for name, value in fields if name == b"connection" for option in value.split(b",")
    )
