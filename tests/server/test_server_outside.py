"""What server.yaml names outside itself is looked at before anything starts: nothing of it fails invisibly."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_server_app import Server

from llmgw.pki.authority import init_ca, issue_node, issue_server
from llmgw.providers import registry
from llmgw.server import outside, settings


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pki")
    now = time.time()
    init_ca(made, None, days=2, now=now)
    issue_server(made, "gw", (), days=1, now=now)
    issue_server(made, "other", (), days=1, now=now)
    issue_node(made, "node-a", days=1, now=now)
    return made


def pair(pki: Path, cert: str, key: str = "") -> dict[str, str]:
    return {"cert": f"{pki}/{cert}.pem", "key": f"{pki}/{key or cert}-key.pem"}


def told(**file: Any) -> list[str]:
    """What `llmgw server --check` adds for a file with these keys."""
    return [words.removeprefix("warning: ") for words in outside.check(settings.loads(yaml.safe_dump(file), "s.yaml"))]


def test_certificates_that_cannot_serve_are_told_by_check(pki: Path) -> None:
    front = {"listen": "127.0.0.1:0"}
    assert told(http={**front, "tls": pair(pki, "gw")}) == []
    start = "the server would not start: cannot use "
    (gone,) = told(http={**front, "tls": {"cert": "/nonexistent/c.pem", "key": "/nonexistent/k.pem"}})
    assert gone == f"{start}`/nonexistent/c.pem` of http.tls: No such file or directory"
    (mixed,) = told(http={**front, "tls": pair(pki, "gw", "other")})
    assert mixed.endswith("with http.tls.key `" + f"{pki}/other-key.pem`: the key does not belong to the certificate")
    (node,) = told(http={**front, "tls": pair(pki, "node-a")})
    assert "not the certificate of a server (no `serverAuth` in it), so clients and browsers would refuse it" in node
    (ca,) = told(http={**front, "tls": {**pair(pki, "gw"), "client_ca": "/nonexistent/ca.pem"}})
    assert ca == f"{start}http.tls.client_ca `/nonexistent/ca.pem`: No such file or directory"
    (agents,) = told(agents={"tls": {"ca": f"{pki}/ca.pem", **pair(pki, "node-a")}})
    assert agents.startswith(f"{start}agents.tls.cert `{pki}/node-a.pem`: it is not the certificate of a server")


def test_a_key_others_can_read_is_told(pki: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes((pki / "gw-key.pem").read_bytes())
    key.chmod(0o644)
    (words,) = told(http={"tls": {"cert": f"{pki}/gw.pem", "key": str(key)}})
    assert words == f"http.tls.key `{key}` can be read by every user of this machine: `chmod 600` it"


def test_an_access_log_and_a_profiles_directory_that_are_not_there_are_told(tmp_path: Path) -> None:
    (log,) = told(gateway={"access_log": f"{tmp_path}/no/access.log"})
    assert log.startswith(f"gateway.access_log `{tmp_path}/no/access.log`: there is no directory `{tmp_path}/no`")
    (log,) = told(gateway={"access_log": str(tmp_path)})
    assert "is a directory" in log
    assert told(gateway={"access_log": f"{tmp_path}/access.log"}) == []
    (profiles,) = told(profiles_dir=f"{tmp_path}/no")
    assert profiles == f"profiles_dir `{tmp_path}/no` is no directory: no profile is applied from it"


def test_an_engine_nobody_provides_or_installs_is_told() -> None:
    (typo,) = told(engines={"lama.cpp": "b1"})
    assert typo.startswith("engines.lama.cpp: this server has no provider of that name, did you mean `llama.cpp`?")
    (named,) = told(engines={"vllm": "0.11.2"})
    assert named.startswith("engines.vllm: llmgw does not install this engine: name it under `engines.vllm` in the")
    assert "llama.cpp" in registry.load().providers
    assert told() == []


def test_a_server_without_a_usable_certificate_does_not_start(pki: Path, tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.settings["http"]["tls"] = pair(pki, "gw", "other")
    done = server.run()
    assert done.returncode == 1
    assert "cause: the key does not belong to the certificate" in done.stderr
    assert "gateway 0 started" not in done.stderr
    checked = server.run("--check")
    assert checked.returncode == 0
    assert "warning: the server would not start: cannot use http.tls.cert" in checked.stdout


def test_an_address_this_machine_lacks_is_not_called_taken(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.settings["http"]["listen"] = "192.0.2.1:8080"
    done = server.run()
    assert done.returncode == 1
    assert "hint: name an address this machine has under `http.listen`" in done.stderr
