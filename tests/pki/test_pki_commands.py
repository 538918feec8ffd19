"""`llmgw ctl cert …` end to end on a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmgw.ctl.certs import cert
from llmgw.errors import PkiError
from llmgw.server import settings as server_settings
from llmgw.wire.tls import TlsFiles, client_context, server_context


def _run(*argv: str) -> Result:
    return CliRunner().invoke(cert, list(argv), catch_exceptions=False)


def test_from_nothing_to_certificates_that_tls_accepts(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    assert _run("init", "--dir", str(pki)).exit_code == 0
    server = _run("issue-server", "gw.test", "--san", "127.0.0.1", "--san", "localhost", "--dir", str(pki))
    assert server.stdout == f"issued `{pki}/gw.test.pem`, key `{pki}/gw.test-key.pem`\n"
    # what is printed goes into the file as it is
    told = server.stderr.strip().removeprefix("agents.tls in server.yaml: ")
    written = server_settings.loads(f"agents:\n  listen: 0.0.0.0:7443\n  tls: {told}\n", "server.yaml").agents.tls
    assert written is not None
    server_context(TlsFiles(written.ca, written.cert, written.key))
    node = _run("issue-client", "gpu-a-01", "--dir", str(pki))
    assert node.stderr == (
        "copy them to the node; tls in agent.yaml: "
        "{ca: /etc/llmgw/ca.pem, cert: /etc/llmgw/gpu-a-01.pem, key: /etc/llmgw/gpu-a-01-key.pem}\n"
        f"all three in one file: `{pki}/gpu-a-01-bundle.pem`\n"
    )
    assert _run("issue-operator", "anna", "--dir", str(pki)).exit_code == 0
    server_context(TlsFiles(f"{pki}/ca.pem", f"{pki}/gw.test.pem", f"{pki}/gw.test-key.pem"))
    client_context(TlsFiles(f"{pki}/ca.pem", f"{pki}/gpu-a-01.pem", f"{pki}/gpu-a-01-key.pem"))
    listed = json.loads(_run("list", "--dir", str(pki), "-o", "json").stdout)["certificates"]
    assert [(Path(each["path"]).stem, each["role"]) for each in listed] == [
        ("anna", "operator"), ("ca", "ca"), ("gpu-a-01", "node"), ("gw.test", "server"),
    ]  # fmt: skip
    table = _run("list", "--dir", str(pki)).stdout.splitlines()
    assert table[0].split() == ["FILE", "ROLE", "NAME", "SERIAL", "HOSTS", "STANDING"]
    assert len(table) == 5
    with pytest.raises(PkiError, match="is there already"):
        _run("issue-client", "gpu-a-01", "--dir", str(pki))
    assert _run("issue-client", "gpu-a-01", "--dir", str(pki), "--replace").exit_code == 0


def test_help_loads_no_cryptography() -> None:
    code = "import sys, llmgw.ctl.certs; sys.exit('cryptography' in sys.modules or 'OpenSSL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
