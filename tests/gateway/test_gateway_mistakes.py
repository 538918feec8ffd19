"""What users get wrong first: base URLs, encodings, TLS, a body too large. Each answer says what to do."""

from __future__ import annotations

import gzip
import json
import ssl
import time

import attrs
import openai
import pytest
from gateway_fakes import Gateway, ask, model, post, read_all, replica

from llmgw.domain.routing import Caps, RouteTable
from llmgw.gateway.plane import Plane
from llmgw.gateway.protocol import Client
from llmgw.gateway.settings import Options


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/embeddings", "/v1/embeddings"),
        ("/messages", "/v1/messages"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/models", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
    ],
)
def test_a_wrong_base_url_is_answered_with_the_right_path(plane: Gateway, path: str, meant: str) -> None:
    plane.routes(model(endpoints=("/v1/chat/completions", "/v1/messages")))
    for method in ("GET", "POST"):
        status, _, body = plane.fetch(method, path, {} if method == "POST" else None)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (404, "unknown_path")
        assert f"the path is {meant}:" in error["message"]


def test_the_openai_client_says_what_is_wrong_with_its_base_url(plane: Gateway) -> None:
    plane.routes(model())
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{plane.port}", api_key="any", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match=r"the path is /v1/chat/completions: a base URL ends in `/v1`"),
    ):
        client.chat.completions.create(model="m", messages=[])


def test_a_client_of_ollamas_api_is_not_asked_for_the_admin_token(plane: Gateway) -> None:
    for method, path in (("GET", "/api/tags"), ("POST", "/api/chat"), ("GET", "/api/version")):
        status, _, body = plane.fetch(method, path, {} if method == "POST" else None)
        assert status == 404
        assert "a base URL ending in `/v1`" in json.loads(body)["error"]["message"]


def test_other_paths_go_to_the_control_process_as_before(plane: Gateway) -> None:
    for path in ("/", "/v2/models", "/api/v1/models", "/modelsx", "/api/v1/chat/completions"):
        status, _, body = plane.fetch("GET", path)
        assert status == 503
        assert b"the control process is away" in body


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (gzip.compress(b"{}", mtime=0), 415, "compressed"),
        (b"\x28\xb5\x2f\xfd\x00", 415, "compressed"),
        (b"\xef\xbb\xbf{}", 400, "byte order mark"),
        (json.dumps(ask()).encode("utf-16"), 400, "UTF-16"),
        (json.dumps(ask()).encode("utf-16-le"), 400, "UTF-16"),
        (b"", 400, "it is empty"),
        (b"{", 400, "truncated"),
        (b'{"model":"m","temperature":NaN}', 400, "not valid JSON"),
        (b'{"model":"m","messages":' + b"[" * 100_000, 400, "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_is_answered_with_what_it_is(
    plane: Gateway, body: bytes, status: int, words: str
) -> None:
    plane.routes(model(replica(plane.engine())))
    got, _, answer = plane.fetch("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    assert got == status
    assert words in json.loads(answer)["error"]["message"]
    assert plane.chat()[0] == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict", "temperature"])
def test_a_number_that_is_none_is_refused_where_a_profile_has_bounds(plane: Gateway, name: str) -> None:
    plane.routes(attrs.evolve(model(replica(plane.engine())), caps=Caps(max_tokens=9, max_temperature=1.0)))
    text = b'{"model":"m","messages":[],"%b":1e999}' % name.encode()
    status, _, body = plane.fetch("POST", "/v1/chat/completions", text, {"Content-Type": "application/json"})
    assert (status, json.loads(body)["error"]["param"]) == (400, name)
    text = b'{"model":"m","\xff":1}'
    assert plane.fetch("POST", "/v1/chat/completions", text, {"Content-Type": "application/json"})[0] == 400
    assert plane.chat()[0] == 200


@pytest.mark.parametrize("text", [b'{"mod\\u0065l":"m"}', b'{"model":"\\u006d"}', b'{"model":"x","model":"m"}'])
def test_escapes_and_repeated_names_are_read_as_engines_read_them(plane: Gateway, text: bytes) -> None:
    plane.routes(model(replica(plane.engine())))
    assert plane.fetch("POST", "/v1/completions", text, {"Content-Type": "application/json"})[0] == 200


def test_tls_on_the_plain_port_is_refused_at_once(plane: Gateway) -> None:
    context = ssl.create_default_context()
    with plane.connect() as sock:
        began = time.monotonic()
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(sock, server_hostname="localhost")
        assert time.monotonic() - began < 10  # not the 15 s that a head may take
    with plane.connect() as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 50)
        assert b"speaks plain HTTP here" in read_all(sock)


class Wire:
    """A client's end: what was written to it, and whether it was cut off."""

    def __init__(self) -> None:
        self.got = b""
        self.cut = False

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.got += data

    def is_closing(self) -> bool:
        return self.cut

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def abort(self) -> None:
        self.cut = True


@pytest.mark.parametrize(("pause_s", "cut_after_s"), [(1.0, 30), (3.0, 3)])
def test_who_still_sends_when_refused_is_read_away_for_a_while(pause_s: float, cut_after_s: int) -> None:
    clock = [100.0]
    plane = Plane(Options(), "", lambda: clock[0])
    client, wire = Client(plane), Wire()
    client.connection_made(wire)  # type: ignore[arg-type]
    client.data_received(b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    assert wire.got.startswith(b"HTTP/1.1 404 ")
    while not wire.cut:
        clock[0] += pause_s
        client.check(clock[0])
        if not wire.cut:
            client.data_received(b"x" * 100)
    assert clock[0] - 100.0 == cut_after_s


def test_a_process_that_ends_does_not_wait_for_who_still_sends() -> None:
    clock = [100.0]
    plane = Plane(Options(), "", lambda: clock[0])
    client, wire = Client(plane), Wire()
    client.connection_made(wire)  # type: ignore[arg-type]
    client.data_received(b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    plane.draining = True
    for _ in range(3):
        clock[0] += 1.0
        client.data_received(b"x" * 100)
        client.check(clock[0])
    assert wire.cut


@pytest.mark.parametrize("at", ["balance.admit", "keys.check"])
def test_a_fault_of_the_gateways_own_is_an_answer_or_a_cut_and_never_silence(
    at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plane = Plane(Options(), "", lambda: 1.0)
    plane.apply(RouteTable(1, (model(replica(1)),)))

    def fail(*_: object) -> None:
        raise KeyError(at)

    room, _, name = at.partition(".")
    monkeypatch.setattr(getattr(plane, room), name, fail)
    client, wire = Client(plane), Wire()
    client.connection_made(wire)  # type: ignore[arg-type]
    client.data_received(post("/v1/chat/completions", ask()))
    if at == "balance.admit":
        assert wire.got.startswith(b"HTTP/1.1 500 ")
        assert b'"code":"internal"' in wire.got
    else:
        assert wire.cut
    assert at in caplog.text
    assert not plane.active
