"""Files of TLS change while agents are connected: nobody is dropped but those whose certificate was revoked."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

import pytest
from attrs import evolve
from wire_helpers import Authority, Fleet, running_agent, running_listener, wait_for

from llmgw.domain.facts import Truth
from llmgw.pki import authority
from llmgw.wire.tls import TlsFiles, TlsSource


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


def _put(source: str | Path, target: str | Path, *more: str | Path) -> None:
    """Replace a file as an administrator's tool does: by renaming."""
    new = Path(f"{target}.new")
    new.write_bytes(b"".join(Path(each).read_bytes() for each in (source, *more)))
    shutil.copymode(source, new)
    os.replace(new, target)


def test_a_certificate_revoked_while_it_is_connected_is_cut_within_five_seconds(
    ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = ca.node("node-a"), ca.node("node-b")
    ca.node("nobody")
    authority.revoke(ca.dir, "nobody", now=time.time())
    crl = ca.dir / "crl.pem"
    fleet = Fleet()
    with (
        caplog.at_level(logging.WARNING, "llmgw.server"),
        running_listener(fleet, tls=evolve(ca.server(), crl=str(crl))) as listener,
        running_agent([f"https://127.0.0.1:{listener.port}"], tls=bad) as agent,
        running_agent([f"https://127.0.0.1:{listener.port}"], "node-b", tls=good) as other,
    ):
        agent.wait_connected()
        other.wait_connected()
        began = time.monotonic()
        authority.revoke(ca.dir, "node-a", now=time.time())
        wait_for(lambda: agent.state is Truth.NO and "revoked" in agent.words, "cut with words", 5.0)
        assert time.monotonic() - began < 5.0
        wait_for(lambda: "certificate revoked" in agent.words, f"and kept out; last: {agent.words}")
        assert "node `node-a`" in caplog.text
        assert "is revoked since" in caplog.text
        assert other.state is Truth.YES
    assert [node for node, _, words in fleet.lefts if "revoked" in words] == ["node-a"]


def test_a_session_ends_with_the_certificate_it_began_with(ca: Authority) -> None:
    short = ca.node("node-a", days=6 / 86400)
    with (
        running_listener(Fleet(), tls=ca.server()) as listener,
        running_agent([f"https://127.0.0.1:{listener.port}"], tls=short) as agent,
    ):
        agent.wait_connected()
        wait_for(lambda: agent.state is Truth.NO and "certificate expired" in agent.words, "cut when it expires", 15.0)


def test_a_list_of_one_of_two_cas_locks_nobody_of_the_other_out(ca: Authority, tmp_path: Path) -> None:
    second = Authority(tmp_path / "second")
    bundle = tmp_path / "both.pem"
    bundle.write_bytes((ca.dir / "ca.pem").read_bytes() + (second.dir / "ca.pem").read_bytes())
    ca.node("nobody")
    authority.revoke(ca.dir, "nobody", now=time.time())
    server = TlsFiles(str(bundle), ca.server().cert, str(ca.dir / "gateway.test-key.pem"), str(ca.dir / "crl.pem"))
    new = evolve(second.node("node-n"), ca=str(bundle))
    with (
        running_listener(Fleet(), tls=server) as listener,
        running_agent([f"https://127.0.0.1:{listener.port}"], "node-n", tls=new) as agent,
    ):
        agent.wait_connected()


def test_a_list_of_a_stranger_revokes_nothing(ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stranger = Authority(tmp_path / "stranger")
    node = ca.node("node-a")
    shutil.copy(node.cert, stranger.dir / "node-a.pem")
    import llmgw.wire.identity as identity

    serial = identity.certified(__import__("llmgw.pki.keys", fromlist=["x"]).read_certificates(Path(node.cert))[0])
    authority.revoke(stranger.dir, serial.serial, now=time.time())
    files = evolve(ca.server(), crl=str(stranger.dir / "crl.pem"))
    with caplog.at_level(logging.WARNING, "llmgw.wire.revocation"):
        TlsSource(files, "server").current()
    assert "signed by none of the CAs in use" in caplog.text


def test_files_that_cannot_be_used_leave_the_old_ones_in_force_and_say_so(
    ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = ca.node("node-a")
    fleet = Fleet()
    with (
        caplog.at_level(logging.ERROR, "llmgw.wire.tls"),
        running_listener(fleet, tls=ca.server()) as listener,
        running_agent([f"https://127.0.0.1:{listener.port}"], tls=files, heartbeat_interval_s=0.1) as agent,
    ):
        agent.wait_connected()
        Path(files.cert).write_text("nonsense")
        wait_for(lambda: "cannot use" in agent.words, "said in the words")
        assert agent.state is Truth.YES
        assert "stay in use" in caplog.text
        ca.node("node-a", replace=True)
        wait_for(lambda: "cannot use" not in agent.words, "said no more")
        assert agent.state is Truth.YES


def test_ca_server_and_node_certificates_are_rotated_under_live_sessions(ca: Authority, tmp_path: Path) -> None:
    fresh = Authority(tmp_path / "fresh")
    nodes = [f"node-{number}" for number in range(5)]
    place = tmp_path / "etc"
    place.mkdir()
    issued = {name: ca.node(name) for name in nodes}
    files = {}
    for name in nodes:
        for kind, source in (("cert", issued[name].cert), ("key", issued[name].key), ("ca", issued[name].ca)):
            _put(source, place / f"{name}-{kind}")
        files[name] = TlsFiles(*(str(place / f"{name}-{kind}") for kind in ("ca", "cert", "key")))
    own = ca.server()
    for kind in ("ca", "cert", "key"):
        _put(getattr(own, kind), place / f"server-{kind}")
    server = TlsFiles(*(str(place / f"server-{kind}") for kind in ("ca", "cert", "key")))
    old_ca, new_ca = ca.dir / "ca.pem", fresh.dir / "ca.pem"
    fleet = Fleet()
    with running_listener(fleet, tls=server) as listener:
        url = f"https://127.0.0.1:{listener.port}"
        agents = []
        from contextlib import ExitStack

        with ExitStack() as stack:
            for name in nodes:
                agents.append(stack.enter_context(running_agent([url], name, tls=files[name])))
            for agent in agents:
                agent.wait_connected()
            for target in ("server", *nodes):
                _put(old_ca, place / f"{target}-ca", new_ca)
            renewed = fresh.server()
            _put(renewed.key, place / "server-key")
            _put(renewed.cert, place / "server-cert")
            for name in nodes:
                again = fresh.node(name)
                _put(again.key, place / f"{name}-key")
                _put(again.cert, place / f"{name}-cert")
            for target in ("server", *nodes):
                _put(new_ca, place / f"{target}-ca")
            late = fresh.node("node-late")
            with running_agent([url], "node-late", tls=late) as newcomer:
                newcomer.wait_connected()
            stale = ca.node("node-stale")
            with running_agent([url], "node-stale", tls=evolve(stale, ca=str(new_ca))) as refused:
                refused.wait_words("unknown ca")
            assert [agent.state for agent in agents] == [Truth.YES] * len(agents)
            assert [hello.node_id for hello in fleet.hellos] == [*nodes, "node-late"] or len(fleet.hellos) == 6
            assert [left for left in fleet.lefts if left[0] in nodes] == []
