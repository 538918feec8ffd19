"""What a hostile or slow peer cannot do to the server and to the others."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from attrs import evolve
from wire_helpers import CLOCK, Authority, Fleet, Source, running_agent, running_listener, wait_for

from llmgw.domain.engines import EngineSpec
from llmgw.domain.report import Desired
from llmgw.errors import AddressInUse, LinkError
from llmgw.wire.conn import LinkLimits
from llmgw.wire.link import Link
from llmgw.wire.messages import PROTOCOL, Ack, Answer, Hello, Refused, Report, encode


def _hello(node_id: str = "peer") -> bytes:
    return encode(Hello(PROTOCOL, node_id, "0.1.0", "b", "i", CLOCK.now(), 5.0))


@contextmanager
def _peer(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as peer:
        yield peer


def _all(peer: socket.socket) -> bytes:
    """What the server still says, until it closes."""
    got = b""
    try:
        while data := peer.recv(65536):
            got += data
    except ConnectionError:
        pass
    return got


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_silent_sockets_delay_no_good_agent_and_are_closed(secure: bool, tmp_path: Path) -> None:
    ca = Authority(tmp_path / "pki") if secure else None
    limits = LinkLimits(handshake_s=2.5, first_message_s=2.5)
    fleet = Fleet()
    with ExitStack() as stack:
        listener = stack.enter_context(running_listener(fleet, tls=ca.server() if ca else None, limits=limits))
        silent = [stack.enter_context(_peer(listener.port)) for _ in range(200)]
        began = time.monotonic()
        url = f"{'https' if ca else 'http'}://127.0.0.1:{listener.port}"
        with running_agent([url], tls=ca.node() if ca else None) as agent:
            agent.wait_connected()
            assert time.monotonic() - began < 2.0
            for peer in silent:
                words = _all(peer)
                assert words == b"" if ca else b"said nothing llmgw knows within 2s" in words


def test_ten_megabytes_without_a_newline_close_the_connection_and_cost_little() -> None:
    fleet = Fleet()
    with running_listener(fleet) as listener, _peer(listener.port) as peer:
        refused = b""
        try:
            peer.sendall(b"x" * (10 << 20))
            refused = _all(peer)
        except ConnectionError:
            refused = b"too long, and the connection was reset"
        assert b"too long" in refused
        with running_agent([f"http://127.0.0.1:{listener.port}"]) as agent:
            agent.wait_connected()


def test_a_line_too_long_is_refused_with_words() -> None:
    with running_listener(Fleet()) as listener, _peer(listener.port) as peer:
        peer.sendall(b"x" * 66_000)
        assert json.loads(_all(peer)) == {
            "type": "refused",
            "code": "wire-invalid",
            "words": "the peer sent a line that is too long: 65536 bytes are allowed",
        }


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"not JSON"),
        (encode(Ack(1)), b"the first message must be `hello`"),
        (encode(Answer("1")) + encode(Ack(1)), b"the first message must be `hello`"),
        (_hello("-rf"), b"is not a node id"),
        (_hello("a\u202eb"), b"is not a node id"),
        (_hello() + _hello(), b"`hello` came twice"),
        (_hello() + encode(Ack(1)), b"`ack` is not for the server to hear now"),
        (_hello() + b'{"type":"report","report":{"seq":"1"}}\n', b"not a valid Report"),
    ],
    ids=["HTTP", "no hello", "answer first", "option", "bidi", "hello twice", "ack", "bad report"],
)
def test_a_peer_that_breaks_the_protocol_is_refused_with_words(sent: bytes, words: bytes) -> None:
    fleet = Fleet()
    with running_listener(fleet) as listener, _peer(listener.port) as peer:
        peer.sendall(sent)
        last = _all(peer).splitlines()[-1]
        assert json.loads(last)["type"] == "refused"
        assert words in last
        wait_for(lambda: len(fleet.lefts) == len(fleet.hellos), "everybody who came has left")


def test_trickled_bytes_do_not_extend_the_hello_deadline() -> None:
    with running_listener(Fleet(), limits=LinkLimits(first_message_s=0.5)) as listener, _peer(listener.port) as peer:
        began = time.monotonic()
        peer.settimeout(0.02)
        got = b""
        for byte in b'{"type":"unknown"}\n' * 100:
            try:
                peer.sendall(bytes([byte]))
                data = peer.recv(1000)
                got += data
                if not data:
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert b"said nothing llmgw knows within 500ms" in got
        assert time.monotonic() - began < 5.0


def test_a_peer_that_resets_leaves_with_words() -> None:
    fleet = Fleet()
    with running_listener(fleet) as listener:
        with _peer(listener.port) as peer:
            peer.sendall(_hello())
            assert b"welcome" in peer.recv(1000)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_for(lambda: fleet.lefts, "left")
    assert fleet.lefts == [("peer", "i", "the connection broke: the peer reset the connection")]


def test_a_peer_that_does_not_read_is_disconnected_when_too_much_waits_for_it() -> None:
    fleet = Fleet()
    limits = LinkLimits(outbox_bytes=1 << 20)
    with running_listener(fleet, limits=limits) as listener, _peer(listener.port) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(_hello())
        handle = wait_for(lambda: fleet.agents.get("peer"), "admitted")
        deadline = time.monotonic() + 20
        while not fleet.lefts and time.monotonic() < deadline:
            handle.say(Refused("x", "y" * 500_000))
        wait_for(lambda: fleet.lefts, "left")
    assert fleet.lefts[0][2].startswith("the peer does not take what is sent to it: ")


def test_stale_desired_sets_are_replaced_before_a_slow_peer() -> None:
    fleet = Fleet()
    engines = tuple(EngineSpec(f"engine-{n}", "v" * 1000) for n in range(100))
    with running_listener(fleet, limits=LinkLimits(outbox_bytes=1 << 20)) as listener, _peer(listener.port) as peer:
        peer.sendall(_hello())
        handle = wait_for(lambda: fleet.agents.get("peer"), "admitted")
        # 40 MB in all: far more than the outbox and the kernel hold.
        for generation in range(1, 401):
            handle.send_desired(Desired(generation, 1, engines))
        lines = peer.makefile("rb")
        generations = []
        while not generations or generations[-1] < 400:
            message = json.loads(lines.readline())
            if message["type"] == "desired":
                generations.append(message["desired"]["generation"])
        assert generations == sorted(generations)
        assert len(generations) < 300
        assert fleet.lefts == []


def test_a_flood_of_reports_waits_in_the_kernel_and_not_in_memory() -> None:
    fleet = Fleet()
    fleet.hold.clear()
    template = Source().report(1, None, None, None)
    count = 25_000
    flood = b"".join(encode(Report(evolve(template, seq=seq))) for seq in range(count))
    limits = LinkLimits(bytes_per_s=None, lines_per_s=None)
    with running_listener(fleet, limits=limits) as listener, _peer(listener.port) as peer:
        peer.sendall(_hello())
        assert b"welcome" in peer.recv(1000)
        sender = threading.Thread(target=peer.sendall, args=(flood,), daemon=True)
        sender.start()
        sender.join(1.0)
        assert sender.is_alive(), "the server read it all although nobody handled it"
        fleet.hold.set()
        reader = threading.Thread(target=_all, args=(peer,), daemon=True)
        reader.start()
        wait_for(lambda: len(fleet.reports) == count, "all handled once somebody does", 30.0)
        sender.join()
        peer.shutdown(socket.SHUT_WR)
        reader.join()


def test_one_address_cannot_take_all_connections(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "llmgw.wire.door"),
        running_listener(Fleet(), limits=LinkLimits(per_address=3)) as listener,
        ExitStack() as stack,
    ):
        peers = [stack.enter_context(_peer(listener.port)) for _ in range(3)]
        peers[0].sendall(_hello())
        assert b"welcome" in peers[0].recv(1000)
        with _peer(listener.port) as turned_away:
            assert _all(turned_away) == b""
        assert "too many connections from 127.0.0.1" in caplog.text
        peers.pop().close()

        def joined() -> bool:
            with _peer(listener.port) as peer:
                try:
                    peer.sendall(_hello("later"))
                    return b"welcome" in peer.recv(1000)
                except ConnectionError:
                    return False

        wait_for(joined, "a place is free again")


def test_a_taken_address_is_refused_with_words() -> None:
    with (
        running_listener(Fleet()) as listener,
        pytest.raises(AddressInUse, match="the address is taken"),
        running_listener(Fleet(), port=listener.port),
    ):
        pytest.fail("two listeners on one port")


class _Nobody:
    def opened(self, conn: object) -> None: ...
    def received(self, conn: object, message: object) -> None: ...
    def closed(self, conn: object, error: object) -> None: ...


def test_a_link_that_was_stopped_takes_nothing_more() -> None:
    link = Link(_Nobody(), CLOCK)
    link.start()
    link.stop()
    link.stop()
    with pytest.raises(LinkError, match="llmgw is stopping"):
        link.listen("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(LinkError, match="llmgw is stopping"):
        link.dial(socket.AF_INET, server.getsockname(), "127.0.0.1", None)


def test_a_link_that_never_ran_can_be_stopped() -> None:
    link = Link(_Nobody(), CLOCK)
    link.listen("127.0.0.1", 0)
    link.stop()
