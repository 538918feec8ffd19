"""A release made by hand: both architectures, checksums that hold, a signature that a stranger can check."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_a_release_by_hand_is_complete_and_its_signature_verifies(tmp_path: Path) -> None:
    key, signers = tmp_path / "key", tmp_path / "signers"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    signers.write_text(f'release namespaces="llmgw-release" {key.with_suffix(".pub").read_text()}')
    made = subprocess.run(
        [str(ROOT / "scripts" / "release.sh"), "--skip-tests", "--sign", str(key)], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    out = ROOT / "dist" / "release"
    names = {path.name for path in out.iterdir()}
    assert {"SHA256SUMS", "SHA256SUMS.sig"} < names
    for arch in ("x86_64", "aarch64"):
        assert len([name for name in names if name.endswith(f"-linux-{arch}.pyz")]) == 1
        assert len([name for name in names if name.endswith(f"-linux-{arch}.cdx.json")]) == 1
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=out, check=True)
    verify = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "release", "-n", "llmgw-release"]
    signature = [*verify, "-s", str(out / "SHA256SUMS.sig")]
    sums = (out / "SHA256SUMS").read_bytes()
    assert subprocess.run(signature, input=sums, capture_output=True).returncode == 0
    assert subprocess.run(signature, input=sums + b"0", capture_output=True).returncode != 0
