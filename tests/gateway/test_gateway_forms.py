"""Multipart bodies: `model` is read as other parsers read it, or the form is refused; the bytes go on unchanged."""

from __future__ import annotations

import email.parser
import email.policy
import io
import json
import socket
import threading

import openai
import pytest
from gateway_fakes import Gateway, model, post, read_all, replica
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway.errors import RequestRefused
from llmgw.gateway.forms import boundary_of, read_form

SPEECH = "/v1/audio/transcriptions"
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\nm'
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
NESTED = b"Content-Disposition: form-data; name=x\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n"


def form(*parts: bytes, boundary: bytes = b"b", end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--%b\r\n%b\r\n" % (boundary, part) for part in parts) + end


def fields(content_type: str, body: bytes) -> dict[str, bytes]:
    """What another parser reads."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1")
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    return {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)
        for part in message.iter_parts()
    }


def echo(connection: socket.socket, request: bytes) -> None:
    """An engine that parses the form with another parser, and says what it found."""
    head, _, body = request.partition(b"\r\n\r\n")
    content_type = next(x[14:] for x in head.decode().split("\r\n") if x.lower().startswith("content-type: "))
    found = fields(content_type, body)
    said = json.dumps({"text": found["model"].decode(), "size": len(found["file"]), "type": content_type}).encode()
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said)
    )


# -- boundaries


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (
            b"multipart/form-data; boundary=----WebKitFormBoundary7MA4YWxkTrZu0gW",
            b"----WebKitFormBoundary7MA4YWxkTrZu0gW",
        ),
        (b'Multipart/Form-Data;Boundary="a b=c?"', b"a b=c?"),
        (b"multipart/form-data; charset=utf-8; boundary=" + b"x" * 70, b"x" * 70),
        (b"application/json", None),
        (b"", None),
    ],
)
def test_a_boundary_is_read_by_the_grammar(content_type: bytes, boundary: bytes | None) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"; boundary=",
        b'; boundary=""',
        b"; boundary=" + b"x" * 71,
        b'; boundary="' + b"x" * 71 + b'"',
        b'; boundary="ends in space "',
        b"; boundary=a; boundary=b",
        b"; boundary=a; BOUNDARY=a",
        b"; boundary=a b",
        b"; boundary=a/b",
        b'; boundary="a\\"b"',
        b'; boundary="a',
        b"; boundary*=utf-8''a",
        b" boundary=a",
        b"; boundary=a, text/plain",
    ],
)
def test_a_form_without_one_valid_boundary_is_refused(rest: bytes) -> None:
    with pytest.raises(RequestRefused) as refused:
        boundary_of(b"multipart/form-data" + rest)
    assert refused.value.answer.status == 400
    assert b"boundary" in refused.value.answer.body


# -- fields


@pytest.mark.parametrize(
    "body",
    [
        form(MODEL, FILE + b"x"),
        form(FILE + b"x" * 5_000_000, MODEL),
        form(MODEL, end=b"--b--"),
        form(b'content-disposition:Form-Data ; NAME=model ;\t x="y"\r\nContent-Type: text/plain\r\n\r\nm'),
        form(FILE.replace(b"a.wav", "ü%22.wav".encode()) + b" --b\r\n --b--\r\n-b", MODEL),
        form(b'Content-Disposition: form-data; name="Model"\r\n\r\nother', MODEL),
        form(b'Content-Disposition: form-data; name="prompt"\r\n\r\n' + MODEL.replace(b"m", b"n"), MODEL),
    ],
)
def test_the_model_is_found_wherever_it_stands(body: bytes) -> None:
    assert read_form(bytearray(body), b"b").model == "m"
    assert fields("multipart/form-data; boundary=b", body)["model"] == b"m"


@pytest.mark.parametrize(("value", "stream"), [(b"true", True), (b"True", True), (b"false", False), (b"", False)])
def test_stream_is_read(value: bytes, stream: bool) -> None:
    body = form(MODEL, b'Content-Disposition: form-data; name="stream"\r\n\r\n' + value)
    assert read_form(body, b"b").stream is stream


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "does not begin"),
        (b'{"model":"m"}', "does not begin"),
        (b"\r\n" + form(MODEL), "does not begin"),
        (b"preamble\r\n" + form(MODEL), "does not begin"),
        (form(MODEL, end=b""), "without its last"),
        (form(MODEL, end=b"--b"), "does not end in CR LF"),
        (form(MODEL, end=b"--b-"), "does not end in CR LF"),
        (form(MODEL)[:40], "without its last"),
        (b"--b\r\n" + FILE + b"and then nothing", "without its last"),
        (form(MODEL) + form(MODEL.replace(b"m", b"n")), "follows the last"),
        (form(MODEL) + b"epilogue", "follows the last"),
        (form(MODEL, MODEL), "two fields `model`"),
        (form(MODEL, FILE + b"x", MODEL.replace(b"\r\n\r\nm", b"\r\n\r\nn")), "two fields `model`"),
        (form(FILE + b"x"), "no `model`"),
        (form(MODEL[:-1]), "no `model`"),
        (form(end=b"--b--"), "no `model`"),
        # nested: the outer boundary is the beginning of the inner one
        (form(FILE + b"x\r\n" + form(MODEL, boundary=b"bb", end=b"--bb--")), "CR LF"),
        (form(NESTED + form(MODEL, boundary=b"c", end=b"--c--")), "no `model`"),
        (b"--b \r\n" + MODEL + b"\r\n--b--", "CR LF"),
        (b"--b\n" + MODEL + b"\n--b--", "CR LF"),
        (form(FILE + b"x\n--b", MODEL), "does not follow CR LF"),
        (form(FILE + b"x\r--b--", MODEL), "does not follow CR LF"),
        (form(MODEL + b"\r\nx"), "control characters"),
        (form(MODEL + b"\r"), "control characters"),
        (form(MODEL + b"\x00"), "control characters"),
        (form(MODEL + b"\xff"), "UTF-8"),
        (form(MODEL + b"m" * 256), "longer than 256"),
        (form(MODEL + b"m" * 5_000_000), "longer than 256"),
        (form(MODEL.replace(b"; name", b"; filename=x; name")), "is a file"),
        (form(MODEL.replace(b"; name", b"; filename*=utf-8''x; name")), "is a file"),
        (form(b"Content-Transfer-Encoding: base64\r\n" + MODEL), "encoded"),
        (form(MODEL.replace(b"; name", b"; name=x; name")), "one `content-disposition"),
        (form(MODEL.replace(b"; name", b"; name*=utf-8''x; name")), "one `content-disposition"),
        (form(b'Content-Disposition: form-data; name="x"\r\n' + MODEL), "one `content-disposition"),
        (form(MODEL.replace(b"form-data", b"attachment")), "one `content-disposition"),
        (form(b"Content-Type: text/plain\r\n\r\nm"), "one `content-disposition"),
        (form(MODEL.replace(b'"model"', b'"mod\\el"')), "one `content-disposition"),
        (form(MODEL.replace(b'"model"', b'"x"; filename="\\"; name="model"')), "one `content-disposition"),
        (form(MODEL.replace(b'"model"', b'"model')), "one `content-disposition"),
        (form(MODEL.replace(b"\r\n\r\n", b"\r\n folded: x\r\n\r\n")), "malformed"),
        (form(MODEL.replace(b": form", b" : form")), "malformed"),
        (form(MODEL.replace(b"form-data", b"form\n-data")), "malformed"),
        (form(b"\r\nm"), "malformed"),
        (form(b"X: " + b"x" * 9000 + b"\r\n" + MODEL), "no head"),
        (form(*[b"X: x\r\n" * 16 + MODEL]), "malformed"),
        (form(*[FILE] * 70, MODEL), "more than 63 parts"),
    ],
)  # fmt: skip
def test_a_form_that_could_be_read_in_two_ways_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        read_form(bytearray(body), b"b")
    assert refused.value.answer.status == 400
    assert words in json.loads(refused.value.answer.body)["error"]["message"]


@given(st.binary(max_size=300), st.binary(max_size=10), st.integers(0, 400), st.integers(0, 3))
def test_what_is_taken_of_a_damaged_form_another_parser_reads_alike(file: bytes, put: bytes, at: int, cut: int) -> None:
    body = form(MODEL, FILE + file)
    body = body[:at] + put + body[at + cut :]
    try:
        found = read_form(body, b"b").model
    except RequestRefused:
        return
    assert fields("multipart/form-data; boundary=b", body)["model"].decode() == found


# -- through the gateway


@pytest.fixture
def engine(plane: Gateway) -> None:
    upstream = plane.scripted(echo)
    plane.routes(
        model(replica(upstream), endpoints=(SPEECH, "/v1/audio/translations", "/v1/audio/speech")),
        model(replica(upstream, "n#0"), name="n"),
    )


@pytest.mark.usefixtures("engine")
def test_the_openai_client_transcribes(plane: Gateway) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{plane.port}/v1", api_key="x", max_retries=0) as client:
        answer = client.audio.transcriptions.create(model="m", file=("a.wav", io.BytesIO(bytes(range(256)) * 4000)))
        assert (answer.text, answer.model_extra["size"]) == ("m", 1_024_000)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.audio.transcriptions.create(model="x", file=("a.wav", b"x"))
        with pytest.raises(openai.NotFoundError, match="does not answer"):
            client.audio.transcriptions.create(model="n", file=("a.wav", b"x"))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("path", "chunked"), [(SPEECH, False), ("/v1/audio/translations", True)])
def test_a_form_goes_to_the_engine_as_it_came(plane: Gateway, path: str, chunked: bool) -> None:
    boundary = b"'a.b_c+d-e'" * 6
    body = form(FILE + b"\x00\r\n--x" * 1_000_000, MODEL, boundary=boundary, end=b"--" + boundary + b"--")
    content_type = b'multipart/form-data; charset=utf-8; boundary="%b"' % boundary
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: %b\r\n" % (path.encode(), content_type)
    if chunked:
        sizes = [body[at : at + 70_001] for at in range(0, len(body), 70_001)]
        raw = b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(x), x) for x in sizes)
        raw += b"0\r\n\r\n"
    else:
        raw = b"Content-Length: %d\r\n\r\n" % len(body) + body
    with plane.connect() as sock:
        sender = threading.Thread(target=sock.sendall, args=(head + raw,))
        sender.start()
        answer = read_all(sock)
        sender.join()
    said = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert said == {"text": "m", "size": 6_000_000, "type": content_type.decode()}


@pytest.mark.usefixtures("engine")
def test_a_form_without_a_boundary_is_refused_before_its_body_is_sent(plane: Gateway) -> None:
    with plane.connect() as sock:
        sock.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data\r\nContent-Length: 9999999\r\n\r\n"
            % SPEECH.encode()
        )
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_form" in answer


@pytest.mark.usefixtures("engine")
def test_a_bad_form_leaves_the_connection_in_step(plane: Gateway) -> None:
    with plane.connect() as sock:
        for body, status in ((form(MODEL, MODEL), b"400"), (form(MODEL, FILE + b"x"), b"200")):
            raw = post(SPEECH, body).replace(b"application/json", b"multipart/form-data; boundary=b")
            sock.sendall(raw)
            got = b""
            while b"}" not in got.partition(b"\r\n\r\n")[2]:
                got += sock.recv(65536)
            assert got.startswith(b"HTTP/1.1 " + status), got


@pytest.mark.usefixtures("engine")
def test_a_form_where_json_is_wanted_is_refused(plane: Gateway) -> None:
    status, _, body = plane.fetch(
        "POST", "/v1/audio/speech", form(MODEL), {"Content-Type": "multipart/form-data; boundary=b"}
    )
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_json")
