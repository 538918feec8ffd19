"""The short way of a token: from an engine's socket to the client's in one function, while nothing is out of the usual.

The reads of a stream are nearly all alike: one chunk with one event in it, no usage, and a client that keeps up. For
these the pump stands in the place of the engine connection's reader, and does at once what `Upstream.data_received`,
`Frames.feed`, `Serve.on_data` and the transport's `write` would do one after the other, with the same outcome. Whatever
is not as usual it hands to them.

With hundreds of streams the cost of a token is that of memory that is in no cache, so what counts is how many objects
are touched. The pump is one object, and uses the sockets by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from os import read, write
from typing import TYPE_CHECKING, Any

from llmgw.gateway.loop import LARGE, SMALL, DirectTransport
from llmgw.gateway.tls import FrontProtocol, front_of

if TYPE_CHECKING:
    from llmgw.gateway.serve import Serve
    from llmgw.gateway.upstream import Upstream


def _first(total: int) -> bytes:
    """What `total` bytes begin with if they are one whole chunk, and its data begins an event with an object."""
    for digits in (1, 2, 3, 4):
        size = total - digits - 4
        if size > 0 and len(b"%x" % size) == digits:
            return b"%x\r\ndata: {" % size
    return b"\x00"


_FIRST = [_first(total) for total in range(SMALL + 1)]
_WHERE = [slice(len(first)) for first in _FIRST]
_EVENT = b"\ndata: {"
_EVENT_AT = [len(first) - len(_EVENT) for first in _FIRST]


class Pump:
    """Reads the stream of one request. Takes itself out when the answer has ended; a pause in reading takes it out too.

    Attributes:
        events, token_at: what `Serve` has to be told (`fold`): events since then, and when the last one came.
    """

    __slots__ = (
        "_from", "_gaps", "_now", "_serve", "_size", "_to", "_upstream", "_usual", "_write", "events", "token_at",
    )  # fmt: skip

    def __init__(self, serve: Serve, upstream: Upstream) -> None:
        assert serve.stats is not None
        assert serve.token_at is not None
        self._serve = serve
        self._upstream = upstream
        self._from = upstream.transport._sock_fd
        # with TLS the protocol that encrypts stands for the socket
        front = front_of(serve.client.transport)
        self._to: Any = serve.client.transport._sock_fd if front is None else front
        self._write: Callable[[Any, bytes], int] = write if front is None else FrontProtocol.pass_on
        self._now = serve.plane.now
        self._gaps = serve.stats.gap.fresh
        self._usual = self._is_usual()
        self._size = SMALL
        self.events = 0
        self.token_at = serve.token_at

    def ready(self) -> None:
        """The socket is readable: called by the loop."""
        try:
            data = read(self._from, self._size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            source: Any = self._upstream.transport
            source._fatal_error(error, "a socket could not be read")
            return
        size = len(data)
        if (
            self._usual
            and size <= SMALL
            and data[_WHERE[size]] == _FIRST[size]
            and data[-4:] == b"\n\n\r\n"
            and data.rfind(_EVENT) == _EVENT_AT[size]
            and data.rfind(b'"usage"') < 0
        ):
            self.events += 1
            now = self._now()
            self._gaps.append(now - self.token_at)
            self.token_at = now
            try:
                sent = self._write(self._to, data)
            except OSError:
                sent = 0  # the standard way meets the same error and knows what to do
            if sent != size:
                self._usual = False
                self._serve.client.transport.write(data[sent:])
            return
        self._unusual(data)

    def fold(self) -> None:
        """Tell `Serve`."""
        serve = self._serve
        serve.events += self.events
        self.events = 0
        serve.token_at = self.token_at

    def _is_usual(self) -> bool:
        """Whether the next event may pass here. What the loop holds back for the client leaves first, or is known."""
        transport: Any = self._serve.client.transport if self._write is write else self._to.transport
        if transport is None:
            return False
        transport.send_now()
        return self._serve.usual()

    def _unusual(self, data: bytes) -> None:
        serve, upstream = self._serve, self._upstream
        source: Any = upstream.transport
        self.fold()
        if len(data) == self._size:
            self._size = LARGE
        if data:
            try:
                upstream.data_received(data)
            except Exception as error:
                source._fatal_error(error, "an event could not be handled")
                return
        else:
            source._read_ready__on_eof()
        if upstream.receiver is serve:
            self._usual = self._is_usual()
            self.token_at = serve.token_at  # type: ignore[assignment]
        else:
            readers = source._loop.readers
            if readers[self._from] == self.ready:
                readers[self._from] = source._read_ready


def install(serve: Serve, upstream: Upstream) -> Pump | None:
    """Let a pump read `upstream` for `serve`, whose client has had the head and the first token."""
    source, target = upstream.transport, serve.client.transport
    if source.__class__ is not DirectTransport or not (target.__class__ is DirectTransport or front_of(target)):
        return None
    readers, fd = source._loop.readers, source._sock_fd
    if readers[fd] != source._read_ready:
        return None
    pump = Pump(serve, upstream)
    readers[fd] = pump.ready
    return pump
