"""Usage against real llama-servers and the Prometheus counters they keep themselves.

Two replicas of a chat model and one of an embedding model, two keys. What an engine counts, by experiment: every token
it makes, whether or not somebody still listens; every prompt token, in one counter those it reads and in another those
it finds in its cache.

1. Whole answers only: prompt and completion tokens are exactly the engines'.
2. With one in six broken off by its client: each request's line in the access log is compared with what was asked.
   What the engines made beyond the whole answers is what they made for the broken-off ones: at least what those had
   passed on, at most what they had asked for.
3. Streams of a slow model, each broken off: what the engine made beyond what was passed on is what was on its way.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from attrs import define, frozen
from gateway_fakes import Gateway, gateway, model, post, replica, wait_for
from real_engines import Llama, end, start_llama

from llmgw.domain.routing import RouteKey
from llmgw.providers.llamacpp import LlamaCpp

KEYS = ("ann", "bob")
THREADS = 12
WHOLE_PART = 0.4
BROKEN_OF_THE_REST = 1 / 6
SAID = ("say it", "what will the rain do to the hill", "how can the bird and the sand be one", "no")
SYSTEM = "you are like the wind " * 8
TOO_LONG = "word " * 5000
MOST_ON_THEIR_WAY = 8
# events between the last token and the usage: who goes in between leaves them counted as tokens
CLOSING = {"/v1/chat/completions": 1, "/v1/messages": 1, "/v1/responses": 3}
PATHS = LlamaCpp.capabilities.endpoints


@frozen
class Asked:
    """A request: `breaks` is the number of events after which the client goes, None when it stays."""

    id: str
    key: str
    path: str
    body: dict[str, Any]
    tokens: int
    breaks: int | None = None

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def shape(self) -> str:
        """Requests of one shape have prompts of one length."""
        return json.dumps([self.path, [self.body.get(name) for name in ("messages", "prompt", "input")]])


@define
class Seen:
    """What came back; `usage` is what the client was told, None when it did not ask or went."""

    status: int = 0
    usage: tuple[int, int] | None = None


def make(dice: random.Random, number: int, breaking: bool) -> Asked:
    """The next request of a client."""
    kind, stream = dice.random(), dice.random() < 0.6
    said, tokens = dice.choice(SAID), dice.randint(2, 12)
    breaks = None
    if breaking:
        # at once, at the first event, in the middle, close to the end
        breaks = dice.choice((0, 1, 1, 4, 4, 12, 12, 30))
        tokens = 120
    messages = [{"role": "user", "content": said}]
    if dice.random() < 0.3:
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    body: dict[str, Any] = {"model": "chat"} | ({"stream": True} if stream else {})
    if kind < 0.45:
        path = "/v1/chat/completions"
        if not breaking and dice.random() < 0.03:
            body |= {"messages": [{"role": "user", "content": TOO_LONG}], "max_tokens": tokens}
        else:
            body |= {"messages": messages, "max_tokens": tokens}
        body |= _options(dice, stream)
    elif kind < 0.65:
        path = "/v1/completions"
        body |= {"prompt": said, "max_tokens": tokens} | _options(dice, stream)
        if stream and dice.random() < 0.3:
            # llama-server tells the tokens of all of them in streams only
            more: dict[str, Any] = {"n": 2} if dice.random() < 0.5 else {"prompt": list(SAID[:2])}
            body, tokens = body | more, 2 * tokens
    elif kind < 0.8:
        path = "/v1/messages"
        body |= {"messages": messages[-1:], "max_tokens": tokens}
    elif kind < 0.92 or breaking:
        path = "/v1/responses"
        body |= {"input": said, "max_output_tokens": tokens}
    else:
        path, tokens = "/v1/embeddings", 0
        body = {"model": "embed", "input": said if dice.random() < 0.5 else list(SAID)}
    return Asked(f"r{number}", dice.choice(KEYS), path, body, tokens, breaks)


def _options(dice: random.Random, stream: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": dice.random() < 0.5}} if stream and dice.random() < 0.6 else {}


def stay(connection: http.client.HTTPConnection, asked: Asked) -> Seen:
    """Send it and read the whole answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {asked.key}", "X-Request-Id": asked.id}
    connection.request("POST", asked.path, json.dumps(asked.body), headers)
    answer = connection.getresponse()
    data = answer.read()
    seen = Seen(answer.status)
    if answer.status == 200:
        events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")] if asked.stream else [data]
        seen.usage = _usage([json.loads(event) for event in events])
    return seen


def _usage(events: list[Any]) -> tuple[int, int] | None:
    """Prompt and completion tokens by a reading of its own: whole JSON, not the gateway's search for an object."""
    found: dict[str, int] = {}
    several = [event["usage"] for event in events if "timings" in event and event.get("usage")]
    if len(several) > 1:
        # of two choices for one prompt, or of two prompts of different lengths
        return sum({each["prompt_tokens"] for each in several}), sum(each["completion_tokens"] for each in several)
    for event in events:
        for holder in (event, event.get("message"), event.get("response")):
            said = holder.get("usage") if isinstance(holder, dict) else None
            found |= {name: value for name, value in (said or {}).items() if isinstance(value, int)}
    if "prompt_tokens" in found:
        return found["prompt_tokens"], found.get("completion_tokens", 0)
    if "input_tokens" in found:
        return found["input_tokens"] + found.get("cache_read_input_tokens", 0), found["output_tokens"]
    return None


def go(made: Gateway, asked: Asked) -> Seen:
    """Send it and leave in the middle."""
    assert asked.breaks is not None
    with made.connect() as sock:
        sock.settimeout(120)
        lines = (f"Authorization: Bearer {asked.key}", f"X-Request-Id: {asked.id}")
        sock.sendall(post(asked.path, asked.body, *lines))
        data = b""
        while data.count(b"data: {") < (asked.breaks if asked.stream else 0):
            more = sock.recv(65536)
            if not more or data.endswith(b"0\r\n\r\n"):
                break
            data += more
        if not asked.stream and asked.breaks > 1:
            # somewhere in the engine's work, or after it
            sock.settimeout(0.002 * asked.breaks)
            try:
                data = sock.recv(65536)
            except TimeoutError:
                data = b""
        sock.shutdown(socket.SHUT_RDWR)
    return Seen(int(data[9:12]) if data else 0)


def client(made: Gateway, wanted: list[Asked], seen: dict[str, Seen]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=120)
    for asked in wanted:
        seen[asked.id] = stay(connection, asked) if asked.breaks is None else go(made, asked)
    connection.close()


def phase(
    made: Gateway, wanted: list[Asked], log_path: Path, threads: int = THREADS
) -> tuple[dict[str, Seen], dict[str, Any]]:
    """Send them all; returns what the clients saw and the lines of the access log, by request."""
    seen: dict[str, Seen] = {}
    parts = [wanted[i::threads] for i in range(threads)]
    clients = [threading.Thread(target=client, args=(made, part, seen)) for part in parts]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert set(seen) == {asked.id for asked in wanted}, "a client ended early"
    ids = {asked.id for asked in wanted}

    def lines() -> dict[str, Any]:
        read = (json.loads(line) for line in log_path.read_text().splitlines())
        return {line["id"]: line for line in read if line["id"] in ids}

    wait_for(lambda: len(lines()) == len(wanted), f"{len(wanted)} lines of the access log", 60)
    return seen, lines()


@define
class Sums:
    """Tokens of many requests, by the gateway."""

    prompt: int = 0
    completion: int = 0
    partial: int = 0
    requests: int = 0
    broken: int = 0


class Books:
    """What the gateway told the control process, and what the engines counted, since the last look."""

    def __init__(self, made: Gateway, engines: list[Llama]) -> None:
        self._made, self._engines = made, engines
        self._told, self._counted = Sums(), (0, 0)

    def look(self, lines: dict[str, Any]) -> tuple[Sums, tuple[int, int]]:
        """The difference to the last look, once all of it is told and the engines rest."""
        counted = sum(line["status"] == 200 or line["partial"] for line in lines.values())
        wait_for(lambda: self._sums().requests - self._told.requests == counted, f"usage of {counted} requests", 60)
        for engine in self._engines:
            _await_rest(engine)
        sums, counters = (
            self._sums(),
            (sum(e.prompt() for e in self._engines), sum(e.predicted() for e in self._engines)),
        )
        before, self._told = self._told, sums
        old, self._counted = self._counted, counters
        rows = Sums(*(getattr(sums, name) - getattr(before, name) for name in Sums.__slots__ if name[0] != "_"))
        return rows, (counters[0] - old[0], counters[1] - old[1])

    def _sums(self) -> Sums:
        assert self._made.control is not None
        names = ("prompt", "completion", "partial_completion", "requests", "partial_requests")
        return Sums(*map(self._made.control.usage, names))


def _await_rest(engine: Llama) -> None:
    """Wait until no slot works. Not often: each look delays llama-server's own look for clients that have gone."""
    deadline = time.monotonic() + 120
    while engine.busy():
        assert time.monotonic() < deadline, "an engine does not come to rest"
        threading.Event().wait(1.5)


def whole_only(
    wanted: list[Asked], seen: dict[str, Seen], lines: dict[str, Any], books: Books
) -> tuple[str, dict[str, int]]:
    """The first phase's demands; returns words, and the prompt tokens of each shape."""
    rows, (prompt, predicted) = books.look(lines)
    shapes: dict[str, int] = {}
    refused = 0
    for asked in wanted:
        line, got = lines[asked.id], seen[asked.id]
        if got.status == 400:
            refused += 1
            assert line["status"] == 400, line
            continue
        _check_whole(asked, got, line, shapes)
    assert rows.requests == len(wanted) - refused
    assert (rows.broken, rows.partial) == (0, 0)
    assert (rows.prompt, rows.completion) == (prompt, predicted), (rows, prompt, predicted)
    return (
        f"{rows.requests} whole answers: {rows.prompt} prompt and {rows.completion} completion tokens, exactly as the "
        f"engines counted; {refused} refused by the engine, not counted by either"
    ), shapes


def _check_whole(asked: Asked, got: Seen, line: Any, shapes: dict[str, int]) -> None:
    assert (line["status"], line["partial"], line["key"]) == (200, False, asked.key), (asked, line)
    assert line["completion"] == asked.tokens, (asked, line)
    assert shapes.setdefault(asked.shape, line["prompt"]) == line["prompt"], (asked, line)
    if got.usage is not None:
        assert got.usage == (line["prompt"], line["completion"]), (asked, got, line)


def with_broken(
    wanted: list[Asked], seen: dict[str, Seen], lines: dict[str, Any], books: Books, shapes: dict[str, int]
) -> str:
    """The second phase's demands; returns words."""
    rows, (prompt, predicted) = books.look(lines)
    log, kinds = Sums(), Counter[str]()
    most = unread = 0
    for asked in wanted:
        line, got = lines[asked.id], seen[asked.id]
        if asked.breaks is None:
            if got.status == 400:
                kinds["refused"] += 1
                continue
            _check_whole(asked, got, line, shapes)
        elif line["status"] == 200 and not line["partial"]:
            # the client's leaving came after the end
            kinds["late"] += 1
            _check_whole(asked, Seen(200), line, shapes)
        elif not line["partial"]:
            # it left before any engine was asked
            assert (line["status"], line["completion"], line["prompt"]) == (499, None, None), line
            kinds["queued"] += 1
            continue
        else:
            assert 0 < (line["completion"] or 1) <= asked.tokens + CLOSING.get(asked.path, 0), (asked, line)
            log.broken += 1
            log.partial += line["completion"] or 0
            kinds["unheard"] += line["completion"] is None
            most += asked.tokens
            if line["prompt"] is None:
                unread += shapes[asked.shape]
        log.requests += 1
        log.prompt += line["prompt"] or 0
        log.completion += 0 if line["partial"] else line["completion"]
    assert rows == log, (rows, log)
    made_for_broken, read_for_broken = predicted - rows.completion, prompt - rows.prompt
    assert rows.partial <= made_for_broken <= most, (rows, predicted, most)
    assert 0 <= read_for_broken <= unread, (rows, prompt, unread)
    return (
        f"with clients that go: {rows.requests - rows.broken} whole answers, {rows.completion} completion tokens, each "
        f"answer's as asked for; {rows.broken} broken off, all marked, {kinds['unheard']} of them before a token: "
        f"{rows.partial} tokens passed on, {made_for_broken} made by the engines, {most} asked for; {kinds['late']} "
        f"more went after the end and count as whole, {kinds['queued']} before any engine was asked and do not count; "
        f"{rows.prompt} prompt tokens, and {read_for_broken} for broken-off answers whose prompt the engines had not "
        f"told ({unread} at most); {kinds['refused']} refused"
    )


def on_their_way(made: Gateway, count: int, log_path: Path, books: Books) -> str:
    """The third phase, one stream after the other; returns words."""
    dice = random.Random(count)
    wanted = []
    for i in range(count):
        body = {"messages": [{"role": "user", "content": dice.choice(SAID)}], "max_tokens": 400, "stream": True}
        path = dice.choice(("/v1/chat/completions", "/v1/messages"))
        wanted.append(Asked(f"w{i}", KEYS[0], path, body | {"model": "slow"}, 400, dice.randint(2, 12)))
    _, lines = phase(made, wanted, log_path, threads=1)
    rows, (_, predicted) = books.look(lines)
    assert (rows.requests, rows.broken, rows.completion) == (count, count, 0), rows
    more = predicted - rows.partial
    assert 0 <= more <= count * MOST_ON_THEIR_WAY, (predicted, rows)
    return (
        f"{count} streams of a slow model, each broken off: {rows.partial} tokens passed on, {predicted} made by the "
        f"engine, {more / count:.1f} a stream on their way"
    )


def run(requests: int, assets: Path) -> str:
    """Send that many, compare, and say what was found; AssertionError where it differs."""
    dice = random.Random(requests)
    count = int(requests * WHOLE_PART)
    first = [make(dice, i, False) for i in range(count)]
    second = [make(dice, i, dice.random() < BROKEN_OF_THE_REST) for i in range(count, requests)]
    # prompts of every shape have to be known by then
    first = [*_each_shape(second), *first][: max(count, 1)]
    keys = tuple(RouteKey(name, hashlib.sha256(name.encode()).hexdigest()) for name in KEYS)
    running = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temp:
        work = Path(temp)
        try:
            engines = []
            for i, (gguf, *flags) in enumerate(
                (
                    ("tiny.gguf", "--jinja"),
                    ("tiny.gguf", "--jinja"),
                    ("tiny-embedding.gguf", "--embeddings"),
                    ("slow.gguf", "--jinja"),
                )
            ):
                flags += ["-c", "8192", "-np", "4", "-t", "1", "--cache-ram", "0"]
                process, engine = start_llama(assets / "llama-b1", assets / gguf, work / f"engine-{i}.log", *flags)
                running.append(process)
                engines.append(engine)
            log_path = work / "access.log"
            with gateway(work / "gateway", "--access-log", str(log_path)) as made:
                chat = (replica(engines[0].port, "chat#0"), replica(engines[1].port, "chat#1", "node-b"))
                made.routes(
                    model(*chat, name="chat", endpoints=PATHS),
                    model(replica(engines[2].port, "embed#0"), name="embed", endpoints=PATHS),
                    model(replica(engines[3].port, "slow#0"), name="slow", endpoints=PATHS),
                    keys=keys,
                    required=True,
                )
                books = Books(made, engines)
                books.look({})
                seen, lines = phase(made, first, log_path)
                words, shapes = whole_only(first, seen, lines, books)
                seen, lines = phase(made, second, log_path)
                more = with_broken(second, seen, lines, books, shapes)
                last = on_their_way(made, max(8, requests // 200), log_path, books)
        finally:
            end(running)
    took = time.monotonic() - began
    return f"real llama-servers, {len(first) + len(second)} requests in {took:.0f} s\n  {words}\n  {more}\n  {last}"


def _each_shape(wanted: list[Asked]) -> list[Asked]:
    """One whole request of each shape."""
    found: dict[str, Asked] = {}
    for asked in wanted:
        if asked.body.get("messages", [{}])[-1].get("content") != TOO_LONG:
            found.setdefault(asked.shape, asked)
    return [Asked(f"s{i}", asked.key, asked.path, asked.body, asked.tokens) for i, asked in enumerate(found.values())]
