"""The server's own certificates are told before they end: status, page, log and events."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import yaml
from server_fakes import eventually

from llmgw.pki.authority import init_ca, issue_server
from llmgw.server import settings as server
from llmgw.server.deploy import Outlook
from llmgw.server.own_certificates import CertificateWatch, OwnCertificate, look
from llmgw.server.page.view import build, cells
from llmgw.system.clock import RealClock

DAY = 86400.0


def settings(pki: Path) -> server.ServerSettings:
    tls = {"ca": f"{pki}/ca.pem", "cert": f"{pki}/gw.pem", "key": f"{pki}/gw-key.pem"}
    front = {"cert": f"{pki}/web.pem", "key": f"{pki}/web-key.pem"}
    return server.loads(yaml.safe_dump({"agents": {"tls": tls}, "http": {"tls": front}}), "server.yaml")


def test_each_file_says_how_long_it_lasts_and_when_to_worry(tmp_path: Path) -> None:
    now = time.time()
    init_ca(tmp_path, None, days=3650, now=now)
    issue_server(tmp_path, "gw", (), days=365, now=now)
    issue_server(tmp_path, "web", (), days=90, now=now)

    def worries(at: float) -> list[str]:
        return [item.key for item in look(settings(tmp_path), at) if item.worry]

    found = {item.key: item for item in look(settings(tmp_path), now)}
    assert list(found) == ["agents.tls.cert", "agents.tls.ca", "http.tls.cert"]
    assert found["agents.tls.cert"].not_after == pytest.approx(now + 365 * DAY, abs=2)
    assert found["http.tls.cert"].words.startswith("valid until ")
    assert worries(now) == []
    assert worries(now + 71 * DAY) == []
    assert worries(now + 73 * DAY) == ["http.tls.cert"]
    assert worries(now + 336 * DAY) == ["agents.tls.cert", "http.tls.cert"]
    assert worries(now + 3471 * DAY) == ["agents.tls.cert", "agents.tls.ca", "http.tls.cert"]
    (tmp_path / "web.pem").unlink()
    (gone,) = (item for item in look(settings(tmp_path), now) if item.worry)
    assert (gone.key, gone.words) == ("http.tls.cert", "cannot be read: No such file or directory")


def test_a_worry_is_told_once_for_each_change_of_its_words(caplog: pytest.LogCaptureFixture) -> None:
    said = ["9 days left"]
    told: list[str] = []

    def find() -> tuple[OwnCertificate, ...]:
        return (OwnCertificate("http.tls.cert", "/w.pem", 1.0, said[-1], bool(said[-1])),)

    watch = CertificateWatch(find, told.append, RealClock(), every_s=0.005)
    with caplog.at_level(logging.WARNING):
        watch.start()
        try:
            assert len(told) == 1
            said.append("8 days left")
            eventually(lambda: len(told) == 2, "the second sentence")
        finally:
            watch.stop()
    assert told == [
        f"http.tls.cert `/w.pem`: {n} days left; docs/certificates.md says how to replace it" for n in (9, 8)
    ]
    assert caplog.text.count("days left") == 2


def test_a_worry_stands_on_the_page() -> None:
    tree = build(Outlook(), (), ["http.tls.cert `/w.pem`: 9 days left"])
    assert "http.tls.cert `/w.pem`: 9 days left" in [cell.text for cell in cells(tree)]
