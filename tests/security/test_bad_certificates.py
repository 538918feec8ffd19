"""The bad-certificate matrix with real agents: the cause stands in both logs and in `llmgw agent status`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from attrs import evolve, frozen
from cryptography.x509.oid import ExtendedKeyUsageOID
from security_helpers import AgentProcess, odd_certificate, wait_for
from wire_helpers import Authority, Fleet, running_listener

from llmgw.pki import authority
from llmgw.wire.tls import TlsFiles

YEAR_S = 365 * 86400.0


@frozen
class Place:
    """Two CAs in directories of their own; only `ca` is trusted."""

    ca: Authority
    rogue: Authority


@frozen
class Case:
    """What the agent shows, what it and the server must say. `server`: what the server shows instead of its own."""

    agent: Callable[[Place], TlsFiles]
    agent_words: str
    server_words: str
    server: Callable[[Place], TlsFiles] | None = None


def _good(place: Place) -> TlsFiles:
    return place.ca.node("good", replace=True)


def _own_ca(files: TlsFiles, place: Place) -> TlsFiles:
    return evolve(files, ca=str(place.ca.dir / "ca.pem"))


def _odd(file: str, names: list[str], **given: object) -> Callable[[Place], TlsFiles]:
    return lambda place: odd_certificate(place.ca.dir, file, names, **given)  # type: ignore[arg-type]


def _revoked(place: Place) -> TlsFiles:
    files = place.ca.node("node-r")
    authority.revoke(place.ca.dir, "node-r", now=time.time())
    return files


def _missing(place: Place) -> TlsFiles:
    files = place.ca.node("node-m")
    Path(files.cert).unlink()
    return files


IS_FOR = "the certificate is for node"
MATRIX = {
    "rogue CA": Case(lambda p: _own_ca(p.rogue.node(), p), "unknown ca", "unknown ca"),
    "wrong EKU": Case(
        _odd("eku", ["node-a"], usage=ExtendedKeyUsageOID.SERVER_AUTH), "certificate for another purpose",
        "certificate for another purpose",
    ),
    "wrong role": Case(lambda p: p.ca.operator("node-a"), "that of operator `node-a`", "that of operator `node-a`"),
    "no role": Case(
        _odd("norole", ["node-a"], role="urn:x"), "`node-a`, without a role", "`node-a`, without a role"
    ),
    "expired": Case(
        lambda p: p.ca.node("node-x", now=time.time() - 2 * YEAR_S), "certificate expired", "certificate expired"
    ),
    "not yet valid": Case(
        lambda p: p.ca.node("node-y", now=time.time() + 86400, days=30), "is not valid for another",
        "certificate not yet valid",
    ),
    "none": Case(_missing, "cannot read `", ""),
    "two CNs": Case(_odd("two", ["node-a", "node-b"]), "2 common names", "2 common names"),
    "NUL in CN": Case(_odd("nul", ["node-a\0.evil"]), "NUL", "NUL"),
    "another node's": Case(lambda p: p.ca.node("node-b"), f"{IS_FOR} `node-b`", f"{IS_FOR} `node-b`"),
    "other case": Case(lambda p: p.ca.node("Node-A"), f"{IS_FOR} `Node-A`", f"{IS_FOR} `Node-A`"),
    "look-alike": Case(
        _odd("alike", ["n\N{CYRILLIC SMALL LETTER O}de-a"], role="llmgw:node:node-a"),
        "its role is for `'node-a'`", "its role is for `'node-a'`",
    ),
    "revoked": Case(_revoked, "certificate revoked", "certificate revoked"),
    "server for another name": Case(
        _good, "name mismatch, it is for `elsewhere.test`", "certificate for another name or role",
        lambda p: p.ca.server("elsewhere.test", ()),
    ),
    "server of a rogue CA": Case(
        _good, "unknown ca: the peer's certificate is not accepted", "unknown ca",
        lambda p: _own_ca(p.rogue.server("rogue.test"), p),
    ),
    "server is a node": Case(
        _good, "certificate for another purpose", "certificate for another purpose", lambda p: p.ca.node("mitm")
    ),
    "server expired": Case(
        _good, "certificate expired", "certificate expired",
        lambda p: p.ca.server("old.test", ("127.0.0.1",), now=time.time() - 2 * YEAR_S),
    ),
}  # fmt: skip


@pytest.mark.timeout(240)
def test_each_bad_certificate_is_refused_with_its_cause_in_both_logs_and_in_the_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(Authority(tmp_path / "pki"), Authority(tmp_path / "rogue"))
    shown = {name: case.agent(place) for name, case in MATRIX.items()}
    crl = place.ca.dir / "crl.pem"
    fleets = {name: Fleet() for name in MATRIX}
    agents: dict[str, AgentProcess] = {}
    with caplog.at_level(logging.INFO, "llmgw.server"), ExitStack() as stack:
        address_of: dict[str, int] = {}
        threads: dict[str, set[int | None]] = {}

        def server_log(name: str) -> str:
            return "\n".join(each.getMessage() for each in list(caplog.records) if each.thread in threads[name])

        for name, case in MATRIX.items():
            tls = case.server(place) if case.server else evolve(place.ca.server(replace=True), crl=str(crl))
            listener = stack.enter_context(running_listener(fleets[name], tls=tls))
            address_of[name] = listener.port
            threads[name] = {each.ident for each in (listener._link._thread, *listener._workers)}
            url = f"https://127.0.0.1:{listener.port}"
            agents[name] = AgentProcess(tmp_path / name.replace(" ", "-"), url, shown[name])
            stack.callback(agents[name].stop)
        for name, case in MATRIX.items():
            agent = agents[name]
            wait_for(
                lambda agent=agent, case=case: case.agent_words in agent.status(),
                lambda name=name, agent=agent: f"{name} in the status\n{agent.status()}\n{agent.log()[-1500:]}",
                60,
            )
            assert f"not connected to `https://127.0.0.1:{address_of[name]}`" in agent.status()
            wait_for(
                lambda agent=agent, case=case: case.agent_words in agent.log(),
                lambda name=name, agent=agent: f"{name} in the agent's log\n{agent.log()[-1500:]}",
            )
            wait_for(
                lambda case=case, name=name: case.server_words in server_log(name),
                lambda name=name: f"{name} in the server's log\n{server_log(name)[-1500:]}",
            )
            assert " connected to" not in agent.log().replace("not connected to", ""), name
    assert [(name, fleet.hellos) for name, fleet in fleets.items() if fleet.hellos] == []
