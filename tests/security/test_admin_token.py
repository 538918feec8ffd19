"""The admin token may be kept on the server as a hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

from llmgw.server.auth import AdminToken, load_token


def test_a_token_file_may_hold_the_hash_of_the_token(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"correct horse battery").hexdigest()
    path = tmp_path / "admin.token"
    path.touch(0o600)
    path.write_text(f"sha256:{digest}\n")
    token = load_token(path)
    assert token.accepts("correct horse battery")
    assert not token.accepts(f"sha256:{digest}"), "the hash itself opens nothing"
    assert not AdminToken("plain token of old").accepts(f"sha256:{digest}")
