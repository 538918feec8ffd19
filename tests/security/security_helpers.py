"""What the security tests share: odd certificates of a true CA, agents as processes, and waiting with a deadline."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.wire.tls import TlsFiles

WIRE = Path(__file__).resolve().parent.parent / "wire"


def odd_certificate(
    ca_dir: Path,
    file: str,
    names: list[str],
    *,
    role: str = "llmgw:node:node-a",
    usage: Any = ExtendedKeyUsageOID.CLIENT_AUTH,
) -> TlsFiles:
    """A certificate the CA in `ca_dir` really signed, such as llmgw's own code would not issue."""
    ca = x509.load_pem_x509_certificate((ca_dir / "ca.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((ca_dir / "ca-key.pem").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(role)]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    cert_path, key_path = ca_dir / f"{file}.pem", ca_dir / f"{file}-key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.touch(0o600)
    key_path.write_bytes(pem)
    return TlsFiles(str(ca_dir / "ca.pem"), str(cert_path), str(key_path))


class AgentProcess:
    """`llmgw agent` as a process, its log, and what `llmgw agent status` says."""

    def __init__(self, root: Path, url: str, tls: TlsFiles, node_id: str = "node-a") -> None:
        root.mkdir(parents=True)
        self.config = root / "agent.yaml"
        self.log_path = root / "log"
        self.config.write_text(
            yaml.safe_dump(
                {
                    "server": url,
                    "node_id": node_id,
                    "mgmt_addr": "127.0.0.1",
                    "heartbeat_interval": "500ms",
                    "reconnect_base": "200ms",
                    "reconnect_max": "1s",
                    "engines_dir": str(root / "engines"),
                    "weights_dir": str(root / "weights"),
                    "supervisor": {"work_dir": str(root / "work")},
                    "tls": {"ca": tls.ca, "cert": tls.cert, "key": tls.key},
                }
            )
        )
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmgw", "agent", "-c", str(self.config)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, "HOME": str(root)},
            )  # fmt: skip

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def status(self) -> str:
        """The text of `llmgw agent status`."""
        from click.testing import CliRunner

        from llmgw.agent.app import status_command

        if not (self.config.parent / "work" / "status.json").exists():
            return ""
        return CliRunner().invoke(status_command, [], obj=self.config, catch_exceptions=False).output

    def raw_status(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.config.parent / "work" / "status.json").read_text())
        return read

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)


def wait_for(condition: Callable[[], Any], what: Callable[[], str], timeout_s: float = 20.0) -> Any:
    """Poll until `condition` holds; its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what()}"
        time.sleep(0.05)
