"""Usage against the fake engine, which counts the tokens it makes."""

from __future__ import annotations

import hashlib
import random
import tempfile
import threading
from pathlib import Path

from gateway_fakes import Gateway, ask, gateway, model, post, read_until, replica, wait_for

from llmgw.domain.routing import RouteKey

KEYS = ("ann", "bob")
THREADS = 8


class Tally:
    """What the clients saw."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.whole = dict.fromkeys(KEYS, 0)
        self.tokens = dict.fromkeys(KEYS, 0)
        self.broken = 0


def client(made: Gateway, seed: int, count: int, tally: Tally) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        key, stream, tokens = dice.choice(KEYS), dice.random() < 0.6, dice.randint(1, 12)
        breaks = stream and dice.random() < 0.16
        more = {"stream": True} if stream else {}
        if stream and dice.random() < 0.5:
            more["stream_options"] = {"include_usage": dice.random() < 0.5}
        body = ask(max_tokens=5000 if breaks else tokens, **more)
        with made.connect() as sock:
            sock.settimeout(120)
            sock.sendall(post("/v1/chat/completions", body, f"Authorization: Bearer {key}"))
            if breaks:
                read_until(sock, b'"t2 "')
            else:
                end = b"0\r\n\r\n" if stream else b"}}"
                got = read_until(sock, end)
                assert got.startswith(b"HTTP/1.1 200 "), got[:300]
        with tally.lock:
            tally.broken += breaks
            if not breaks:
                tally.whole[key] += 1
                tally.tokens[key] += tokens


def run(requests: int) -> str:
    """Send that many, compare, and say what was found; AssertionError where it differs."""
    each = requests // THREADS
    total = each * THREADS
    keys = tuple(RouteKey(name, hashlib.sha256(name.encode()).hexdigest()) for name in KEYS)
    with tempfile.TemporaryDirectory() as temp, gateway(Path(temp)) as made:
        engine = made.engine(slots=64)
        made.routes(model(replica(engine)), keys=keys, required=True)
        tally = Tally()
        threads = [threading.Thread(target=client, args=(made, seed, each, tally)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made.control is not None
        told = made.control.usage
        wait_for(lambda: told("requests") == total, f"usage of {total} requests", 30)
        wait_for(lambda: engine.stats()["in_flight"] == 0, "the engine to be idle", 30)
        counted = engine.stats()["tokens"]
        for key in KEYS:
            assert told("completion", key=key) == tally.tokens[key], key
            assert told("requests", key=key) - told("partial_requests", key=key) == tally.whole[key], key
        assert told("partial_requests") == tally.broken
        assert told("unknown_requests") == 0
        made_for_broken = counted - told("completion")
        partial = told("partial_completion")
        assert 3 * tally.broken <= partial <= made_for_broken, (partial, made_for_broken)
        return (
            f"fake engine: {total} requests: {told('completion')} tokens of whole answers, as the engine counted; "
            f"{tally.broken} broken off, marked, {partial} tokens passed on of {made_for_broken} made"
        )
