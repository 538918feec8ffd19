"""Named engines: the configuration names a binary, and it is seen to run before it is used."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from pathlib import Path

from attrs import frozen

from llmgw.domain.engines import NamedProbe
from llmgw.errors import ProofFailed
from llmgw.install.prove import Prover


@frozen
class Seen:
    """What a named engine said of itself. `version` is None when it ran and did not say."""

    version: str | None
    words: str


def see_named(prover: Prover, probe: NamedProbe, *, quick: bool = False) -> Seen:
    """Run a named engine's checks.

    Args:
        quick: only the checks that are repeated at every re-check.

    Raises:
        ProofFailed: the binary is missing or a check failed.
    """
    binary = Path(probe.binary)
    if not binary.exists():
        raise ProofFailed(f"`{binary}` does not exist", hint="correct the path in agent.yaml")
    if not os.access(binary, os.X_OK) or not binary.is_file():
        raise ProofFailed(f"`{binary}` is not an executable file", hint="correct the path or its mode")
    with tempfile.TemporaryDirectory(prefix="llmgw-named-", ignore_cleanup_errors=True) as scratch:
        proofs = prover.prove(None, probe.checks, Path(scratch), lambda _: None, threading.Event(), quick=quick)
    match = re.search(probe.version, "\n".join(proof.words for proof in proofs), re.MULTILINE)
    return Seen(match[1] if match else None, "; ".join(f"{proof.title}: {proof.words}" for proof in proofs))
