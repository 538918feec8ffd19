"""A node without a certificate joins with a token, once; and a node whose certificate grows old gets a new one."""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner
from cryptography import x509
from wire_helpers import CLOCK, Authority, Fleet, running_agent, running_listener, wait_for

from llmgw.agent.dialling import parse_server
from llmgw.agent.join import JoinLine, enroll, join_command, read_line
from llmgw.agent.renew import Renewal, finish, store
from llmgw.domain.facts import Truth
from llmgw.errors import LinkError, LlmgwError, PkiError, TlsError, UsageError
from llmgw.pki.keys import certificate_pem, key_pem, load_key, make_request, new_key, read_certificates
from llmgw.server.join import LINE_PREFIX, Registrar
from llmgw.server.listener import Listener
from llmgw.server.state import State, open_state
from llmgw.wire.identity import Identity, peer_identity
from llmgw.wire.messages import Issued
from llmgw.wire.tls import TlsFiles, TlsSource

DAY_S = 86400.0


class House:
    """A server that signs: CA, state, registrar and listener."""

    def __init__(self, directory: Path, *, life_s: float = 30 * DAY_S, signs: bool = True) -> None:
        self.ca = Authority(directory / "pki")
        self.state: State = open_state(str(directory / "s" / "state.db"))
        self.files = self.ca.server()
        self.fleet = Fleet()
        self.registrar = Registrar(
            self.state,
            CLOCK,
            bundle=self.ca.dir / "ca.pem",
            key=self.ca.dir / "ca-key.pem" if signs else None,
            cert=Path(self.files.cert),
            node_life_s=life_s,
        )

    def line(self, port: int, node_id: str | None = None, ttl_s: float = 3600.0) -> JoinLine:
        made = self.registrar.create_token(node_id, ttl_s, "127.0.0.1", port)
        assert made.line not in repr(made)
        return read_line(made.line)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.state.close()


@pytest.fixture
def listener(house: House) -> Iterator[Listener]:
    with running_listener(house.fleet, tls=house.files, registrar=house.registrar) as running:
        yield running


def _join(line: JoinLine, node_id: str = "node-a") -> tuple[str, bytes, x509.Certificate]:
    return enroll(parse_server(line.server), line, node_id, CLOCK)


def test_a_node_joins_with_a_line_and_connects_with_what_it_got(
    house: House, listener: Listener, tmp_path: Path
) -> None:
    ca, key, certificate = _join(house.line(listener.port))
    assert peer_identity(certificate) == Identity("node-a", "node")
    assert ca == (house.ca.dir / "ca.pem").read_text()
    files = TlsFiles(*(str(tmp_path / name) for name in ("ca", "cert", "key")))
    Path(files.ca).write_text(ca)
    store(files, key, certificate)
    assert os.stat(files.key).st_mode & 0o777 == 0o600
    with running_agent([f"https://127.0.0.1:{listener.port}"], tls=files) as agent:
        agent.wait_connected()
    told = house.fleet.certificates["node-a"]
    assert told is not None
    assert told.serial == f"{certificate.serial_number:x}"


def test_a_token_used_fifty_times_at_once_has_one_winner(house: House, listener: Listener) -> None:
    line = house.line(listener.port)
    results: list[str] = []
    start = threading.Barrier(50)

    def try_it(number: int) -> None:
        start.wait()
        try:
            _join(line, f"node-{number}")
            results.append("joined")
        except LlmgwError as error:
            results.append(f"{error.code}: {error.words()}")

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("joined") == 1
    lost = [words for words in results if words != "joined"]
    assert len(lost) == 49
    assert all("join-refused" in words and "used already" in words for words in lost), lost


def test_a_token_is_bound_expires_and_is_never_stored_in_the_clear(
    house: House, listener: Listener, tmp_path: Path
) -> None:
    bound = house.line(listener.port, "node-b")
    with pytest.raises(LinkError, match="the join token is for another node"):
        _join(bound)
    _join(bound, "node-b")
    house.state.add_node("node-old", 1.0)
    with pytest.raises(LinkError, match="is known already"):
        _join(house.line(listener.port), "node-old")
    _join(house.line(listener.port, "node-old"), "node-old")
    late = house.registrar.create_token(None, 60.0, "127.0.0.1", listener.port)
    house.registrar._clock = _Later(61.0)  # type: ignore[assignment]
    with pytest.raises(LinkError, match="has expired"):
        _join(read_line(late.line))
    token = read_line(late.line).token.encode()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "s").iterdir())
    assert token not in stored
    with pytest.raises(UsageError, match="from `1m` to `7d`"):
        house.registrar.create_token(None, 1.0, None, 1)


class _Later:
    def __init__(self, by_s: float) -> None:
        self._by_s = by_s

    def now(self) -> float:
        return time.time() + self._by_s


def test_a_server_of_another_ca_never_sees_the_token(
    house: House, listener: Listener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = house.line(listener.port)
    (tmp_path / "mitm").mkdir()
    mitm = House(tmp_path / "mitm")
    seen: list[str] = []
    mitm.registrar.enroll = lambda token, node_id, csr: seen.append(token)  # type: ignore[method-assign]
    with running_listener(mitm.fleet, tls=mitm.files, registrar=mitm.registrar) as trap:
        url = f"https://127.0.0.1:{trap.port}"
        with pytest.raises(TlsError, match="its CA has another fingerprint"):
            _join(evolve(line, server=url))
        # The true CA is public: showing it is not enough without a certificate of it.
        mitm.registrar.authority = (house.ca.dir / "ca.pem").read_text  # type: ignore[method-assign]
        with pytest.raises(TlsError, match="is not of the CA the join line names"):
            _join(evolve(line, server=url))
    # A node's own certificate of the true CA does not make it a server.
    node = evolve(house.ca.node("mitm-node"))
    with (
        running_listener(mitm.fleet, tls=node, registrar=mitm.registrar) as trap,
        pytest.raises(TlsError, match=r"certificate of a node|purpose|not for `127\.0\.0\.1`"),
    ):
        _join(evolve(line, server=f"https://127.0.0.1:{trap.port}"))
    assert seen == []
    mitm.state.close()
    _join(line)


def test_a_server_that_signs_nothing_says_so_before_it_hears_the_token(tmp_path: Path) -> None:
    house = House(tmp_path, signs=False)
    with running_listener(house.fleet, tls=house.files, registrar=house.registrar) as listener:
        with pytest.raises(PkiError, match=r"`agents\.tls\.ca_key` is not set"):
            house.line(listener.port)
        fake = JoinLine(f"https://127.0.0.1:{listener.port}", "0" * 64, "t")
        with pytest.raises(LinkError, match="this server signs no certificates"):
            _join(fake)
    house.state.close()


def test_a_connection_without_a_certificate_can_do_nothing_but_join(house: House, listener: Listener) -> None:
    from llmgw.agent import join as module
    from llmgw.wire import messages

    class Impostor(messages.Join):
        pass

    real = messages.Join
    hello = messages.Hello(messages.PROTOCOL, "node-a", "0.1.0", "b", "i", CLOCK.now(), 5.0)
    line = house.line(listener.port)
    messages.Join = lambda *_: hello  # type: ignore[assignment,misc]
    try:
        with pytest.raises(LinkError, match="the agent shows no certificate"):
            module.enroll(parse_server(line.server), line, "node-a", CLOCK)
    finally:
        messages.Join = real  # type: ignore[misc]
    assert house.fleet.hellos == []


def test_the_command_writes_certificate_key_and_agent_yaml(house: House, listener: Listener, tmp_path: Path) -> None:
    line = house.registrar.create_token("gpu-a-01", 3600.0, "127.0.0.1", listener.port).line
    config = tmp_path / "etc" / "agent.yaml"
    argv = ["--dir", str(tmp_path / "etc")]
    done = CliRunner().invoke(join_command, argv, input=f"{line}\n", obj=config, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert line not in done.output
    from llmgw.agent import settings

    read = settings.load(config)
    assert (read.node_id, str(read.servers[0])) == ("gpu-a-01", f"https://127.0.0.1:{listener.port}")
    assert read.tls is not None
    files = TlsFiles(read.tls.ca, read.tls.cert, read.tls.key)
    with running_agent([str(read.servers[0])], "gpu-a-01", tls=files) as agent:
        agent.wait_connected()


@pytest.mark.parametrize("text", ["", "hello", LINE_PREFIX, LINE_PREFIX + "!!", LINE_PREFIX + "e30", "x" * 10_000])
def test_what_is_no_join_line_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(UsageError, match="that is not a join line") as caught:
        read_line(text)
    assert not text or text not in str(caught.value)


def test_a_line_folded_by_a_terminal_is_read(house: House) -> None:
    line = house.registrar.create_token(None, 3600.0, "gw.test:7443", 1).line
    folded = "\n".join(line[at : at + 40] for at in range(0, len(line), 40))
    assert read_line(f"  {folded}\n").server == "https://gw.test:7443"


def test_a_certificate_past_half_of_its_life_is_renewed_over_the_socket(house: House, listener: Listener) -> None:
    old = house.ca.node(days=1, now=time.time() - 0.7 * DAY_S)
    serial = read_certificates(Path(old.cert))[0].serial_number
    before_key = Path(old.key).read_bytes()
    with running_agent([f"https://127.0.0.1:{listener.port}"], tls=old, heartbeat_interval_s=0.2) as agent:
        agent.wait_connected()
        fresh = wait_for(lambda: _serial(old) != serial and read_certificates(Path(old.cert))[0], "a new certificate")
        assert peer_identity(fresh) == Identity("node-a", "node")
        assert fresh.not_valid_after_utc.timestamp() > time.time() + 29 * DAY_S
        told = wait_for(lambda: house.fleet.certificates.get("node-a"), "told to the fleet")
        wait_for(lambda: house.fleet.certificates["node-a"].serial == f"{fresh.serial_number:x}", "the new one shown")
        assert told.serial
        assert agent.state is Truth.YES
        assert len(house.fleet.hellos) == 1, "renewing must not drop the session"
        assert "expires in 30d" in agent.session.status().certificate or "29d" in agent.session.status().certificate
    assert Path(old.key).read_bytes() != before_key
    TlsSource(old, "client").current()
    assert not Path(f"{old.cert}.next").exists()


def _serial(files: TlsFiles) -> int:
    return read_certificates(Path(files.cert))[0].serial_number


def test_a_server_that_cannot_sign_makes_a_warning_with_its_words(tmp_path: Path) -> None:
    house = House(tmp_path, signs=False)
    old = house.ca.node(days=1, now=time.time() - 0.7 * DAY_S)
    with running_listener(house.fleet, tls=house.files, registrar=house.registrar) as listener:
        url = f"https://127.0.0.1:{listener.port}"
        with running_agent([url], tls=old, heartbeat_interval_s=0.1):
            found = wait_for(
                lambda: [w for _, r in list(house.fleet.reports) for w in r.warnings], "a warning in the report"
            )
    assert found[0].code == "certificate-renewal"
    assert "the server signs no certificates" in found[0].words
    house.state.close()


def test_a_request_for_another_node_or_a_weak_key_is_not_signed(house: House) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa

    with pytest.raises(PkiError, match="not for node `node-a`"):
        house.registrar.renew("node-a", make_request(new_key(), "node-b"))
    with pytest.raises(PkiError, match="neither ECDSA"):
        house.registrar.renew("node-a", make_request(rsa.generate_private_key(65537, 1024), "node-a"))  # type: ignore[arg-type]
    with pytest.raises(PkiError, match="the certificate request is refused"):
        house.registrar.renew("node-a", "nonsense")
    forged = make_request(new_key(), "node-a").splitlines()
    forged[3] = forged[3][::-1]
    with pytest.raises(PkiError, match="the certificate request is refused"):
        house.registrar.renew("node-a", "\n".join(forged))


def test_a_replacement_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    ca = Authority(tmp_path / "pki")
    files, other = ca.node("node-a"), ca.node("node-b")
    both = Path(other.key).read_bytes() + Path(other.cert).read_bytes()
    journal = Path(f"{files.cert}.next")
    journal.write_bytes(both)
    Path(files.key).write_bytes(Path(other.key).read_bytes())  # a power cut after the first of the two
    finish(files)
    assert Path(files.cert).read_bytes() == Path(other.cert).read_bytes()
    assert load_key(Path(files.key)).public_key() == read_certificates(Path(files.cert))[0].public_key()
    assert not journal.exists()
    finish(files)


def test_a_single_file_for_key_and_certificate_is_replaced_as_one(tmp_path: Path) -> None:
    ca = Authority(tmp_path / "pki")
    ca.node("node-a")
    bundle = str(ca.dir / "node-a-bundle.pem")
    files = TlsFiles(bundle, bundle, bundle)
    TlsSource(files, "client").current()
    key, other = new_key(), ca.node("node-c")
    del other
    from llmgw.pki.issuer import Issuer

    issuer = Issuer.load(ca.dir / "ca.pem", ca.dir / "ca-key.pem")
    made = issuer.issue("node-a", "node", key.public_key(), life_s=DAY_S, now=time.time())
    store(files, key_pem(key), made)
    TlsSource(files, "client").current()
    text = Path(bundle).read_bytes()
    assert certificate_pem(made) in text
    assert (ca.dir / "ca.pem").read_bytes() in text


def test_an_answer_nobody_asked_for_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca = Authority(tmp_path / "pki")
    files = ca.node()
    before = Path(files.cert).read_bytes()
    renewal = Renewal(files, "node-a", CLOCK)
    with caplog.at_level(logging.ERROR):
        renewal.take(Issued(Path(ca.node("node-b").cert).read_text()))
    assert Path(files.cert).read_bytes() == before
    assert "nobody asked for" in renewal.warnings()[0].words


def _line_of(data: Any) -> str:
    return LINE_PREFIX + base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")


def test_a_line_with_a_bad_fingerprint_is_refused() -> None:
    with pytest.raises(UsageError):
        read_line(_line_of({"server": "https://x", "ca": "zz", "token": "t"}))
