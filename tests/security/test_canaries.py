"""Canary secrets: every secret of a working cluster is looked for wherever it must not be."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml

from llmgw.agent.join import read_line

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from chaos_lib.cluster import ChaosCluster, cluster  # noqa: E402


def _processes(root: Path) -> Iterator[Path]:
    """Every process that has to do with this cluster, by its command line or environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{root}/".encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                    yield entry


def _key_bodies(root: Path) -> dict[str, bytes]:
    """A line out of the middle of each private key on disk."""
    found = {}
    for path in root.rglob("*.pem"):
        match = re.search(rb"PRIVATE KEY-----\n([^\n]+)\n", path.read_bytes())
        if match:
            found[f"private key {path.name}"] = match[1]
    return found


def _ask(made: ChaosCluster, method: str, path: str, body: bytes, **headers: str) -> tuple[dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", made.http_port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return dict(answer.headers.items()), answer.read()
    finally:
        connection.close()


@pytest.mark.timeout(240)
def test_no_secret_is_in_a_log_a_command_line_an_engines_environment_or_an_error() -> None:
    with cluster() as made:
        files = made._tls
        signing = {"ca_key": str(made.pki / "ca-key.pem")}
        made._tls = lambda name: files(name) | (signing if name == "server" else {})  # type: ignore[method-assign]
        made.start_server()
        secrets: dict[str, bytes] = {"admin token": made.token_file.read_bytes().strip()}
        said: list[bytes] = []

        # a node joins with a token; a second use of it, a broken one and a wrong one make errors
        line = made.ctl("join-token", "create", "--node", "node-1", "--address", "127.0.0.1").stdout.strip()
        secrets |= {"join line": line.encode(), "join token": read_line(line).token.encode()}
        config = made.configure_agent("node-1", **made.agent_config())
        read = yaml.safe_load(config.read_text())
        home = made.root / "node-1"
        read["tls"] = {kind: str(home / f"{kind}.pem") for kind in ("ca", "cert", "key")}
        config.write_text(yaml.safe_dump(read))
        for text, code in ((line, 0), (line, 1), (line[:-30], 2), ("nonsense", 2)):
            joined = subprocess.run(
                [*made.command, "agent", "-c", str(config), "join"],
                input=f"{text}\n", capture_output=True, text=True, env=made.env,
            )  # fmt: skip
            assert joined.returncode == code, joined.stderr
            said.append((joined.stdout + joined.stderr).encode())
        made.start("node-1", "agent", "-c", str(config))
        made.until(lambda: made._usable() == 1, 60, "the node to have its engine")

        # a client's key, a replica with its own key, traffic
        made.serve("m", 1, slots=2)
        made.await_ready("m", 1)
        key = made.api("POST", "/keys", {"name": "client"})["key"]
        secrets["client key"] = key.encode()
        made.until(lambda: made.chat("m")[0] in (200, 401), 30, "an answer")
        for given in (key, key[:-3] + "xyz"):
            bearer = {"Authorization": f"Bearer {given}"}
            _, body = _ask(made, "POST", "/v1/chat/completions", b'{"model":"nowhere"}', **bearer)
            said.append(body)
        with contextlib.closing(sqlite3.connect(made.root / "server" / "state.db")) as state:
            (replica_key,) = state.execute("SELECT api_key FROM assignments").fetchone()
        secrets["replica key"] = replica_key.encode()
        assert len(replica_key) > 16

        # the page: a login that fails, one that works, and its session
        form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": made.url}
        token = secrets["admin token"].decode()
        for guess in (token + "x", token):
            headers, body = _ask(made, "POST", "/page/login", urlencode({"token": guess}).encode(), **form)
            said.append(body)
        cookie = headers.get("Set-Cookie") or headers["set-cookie"]
        assert "SameSite=strict" in cookie
        assert "HttpOnly" in cookie
        secrets["page session"] = cookie.split("=", 1)[1].split(";")[0].encode()
        # errors of the admin API, with and without the token, and of ctl
        for path in ("/api/v1/nothing", "/api/v1/explain/none"):
            for headers_ in ({}, {"Authorization": f"Bearer {token}"}, {"Authorization": f"Bearer {token}x"}):
                said.append(_ask(made, "GET", path, b"", **headers_)[1])
        said.append(made.ctl("explain", "none", code=None).stderr.encode())
        said += [json.dumps(made.api("GET", path)).encode() for path in ("/status", "/nodes", "/replicas", "/keys")]
        secrets |= _key_bodies(made.root)
        assert len(secrets) >= 9, sorted(secrets)

        time.sleep(1.0)  # one more report of everybody
        running = list(_processes(made.root))
        engine = made.replicas("m")[0]["pid"]
        assert f"/proc/{engine}" in map(str, running)
        places: dict[str, bytes] = {f"log {path.name}": path.read_bytes() for path in made.root.rglob("*.log")}
        kept = [path for path in home.rglob("*") if path.is_file() and "log" in path.name]
        places |= {f"log {path}": path.read_bytes() for path in kept}
        places |= {f"what was said {number}": text for number, text in enumerate(said)}
        for process in running:
            with contextlib.suppress(OSError):
                places[f"command line of {process.name}"] = (process / "cmdline").read_bytes()
                places[f"environment of {process.name}"] = (process / "environ").read_bytes()
        assert any(name.startswith("log server") for name in places)
        assert len(running) >= 4, "server, gateway, agent and engine"
        found = [f"{what} in {where}" for what, s in secrets.items() for where, text in places.items() if s in text]
        assert found == []
