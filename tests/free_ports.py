"""Ports for servers that the tests start."""

import random
import socket


def free_port() -> int:
    """A port nobody listens on, outside the range the kernel hands to connections and probes of other tests."""
    while True:
        port = random.SystemRandom().randrange(10_000, 19_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
