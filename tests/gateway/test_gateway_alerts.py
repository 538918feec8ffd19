"""A TLS handshake that fails tells the client why, by TLS's own alert."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from gateway_fakes import Gateway


def join(made: Gateway) -> bytes:
    # with TLS 1.3 a client has finished its handshake before its certificate is looked at
    with made.connect() as sock:
        return sock.recv(4096)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_whose_certificate_is_refused_learns_that_from_an_alert(
    start: Callable[..., Gateway], tmp_path: Path, version: ssl.TLSVersion
) -> None:
    operators, strangers = trustme.CA(), trustme.CA()
    operators.cert_pem.write_to_path(tmp_path / "operators.pem")
    made = start("--tls-client-ca", str(tmp_path / "operators.pem"), secure=True)
    assert made.context is not None
    made.context.minimum_version = made.context.maximum_version = version
    assert made.fetch("GET", "/healthz")[0] == 200  # none is needed
    strangers.issue_cert("ann").configure_cert(made.context)
    with pytest.raises(ssl.SSLError, match="ALERT_UNKNOWN_CA"):
        join(made)
    operators.issue_cert("ann").configure_cert(made.context)
    assert made.fetch("GET", "/healthz")[0] == 200
