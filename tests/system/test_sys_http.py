"""The HTTP client against real servers: answers, and every way of not getting one."""

from __future__ import annotations

import gzip
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from github_server import FileServer

from llmgw.errors import HttpError
from llmgw.system.http import Headers, Http, is_loopback


@pytest.fixture
def http() -> Iterator[Http]:
    with Http() as client:
        yield client


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as running:
        yield running


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def tls(ca: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(*names).configure_cert(context)
    return context


def failure(http: Http, url: str, **options: object) -> HttpError:
    with pytest.raises(HttpError) as caught:
        http.request("GET", url, **options)  # type: ignore[arg-type]
    return caught.value


def test_a_whole_answer_has_status_headers_and_body(http: Http, server: FileServer) -> None:
    url = server.url_of("/a")
    server.put("/a", b"hello")
    answer = http.request("GET", url)
    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.headers["CONTENT-LENGTH"] == answer.headers["content-length"] == "5"
    assert "hello" not in repr(answer)


def test_an_error_status_is_an_answer(http: Http, server: FileServer) -> None:
    assert http.request("GET", server.url_of("/nowhere")).status == 404


def test_it_says_who_it_is_and_sends_the_callers_headers(http: Http, server: FileServer) -> None:
    server.put("/a", b"")
    http.request("POST", server.url_of("/a"), headers={"X-One": "1"}, body=b"{}")
    asked = server.requests[0]
    assert asked.method == "POST"
    assert asked.headers["user-agent"].startswith("llmgw/")
    assert asked.headers["x-one"] == "1"


def test_redirects_are_answers_and_are_not_followed(http: Http, server: FileServer) -> None:
    server.put("/a", redirect=server.url_of("/b"))
    assert http.request("GET", server.url_of("/a")).status == 302
    assert len(server.requests) == 1


def test_a_compressed_body_is_handed_over_as_it_came(http: Http, server: FileServer) -> None:
    raw = gzip.compress(b"x" * 10000)
    server.put("/a", raw, headers={"Content-Encoding": "gzip"})
    assert http.request("GET", server.url_of("/a")).body == raw
    with http.stream(server.url_of("/a")) as stream:
        assert b"".join(stream) == raw


def test_a_connection_is_used_again_after_a_whole_answer(http: Http, server: FileServer) -> None:
    server.put("/a", b"hello")
    for _ in range(3):
        http.request("GET", server.url_of("/a"))
    pool = http._pools["", False].connection_from_url(server.url)
    assert pool.num_connections == 1


def test_a_body_longer_than_allowed_is_refused(http: Http, server: FileServer) -> None:
    server.put("/a", endless=True)
    error = failure(http, server.url_of("/a"), max_bytes=1000)
    assert error.status == 200
    assert "longer than 1000 bytes" in error.words()


def test_a_trickling_answer_ends_at_the_deadline(http: Http, server: FileServer) -> None:
    server.put("/a", b"x" * 1000, drip=(1, 0.05))
    begun = time.monotonic()
    error = failure(http, server.url_of("/a"), timeout_s=0.4)
    assert time.monotonic() - begun < 5
    assert "timed out" in error.words()


def test_silence_is_told_as_a_timeout(http: Http, server: FileServer) -> None:
    server.put("/a", silent=True)
    error = failure(http, server.url_of("/a"), timeout_s=0.2)
    assert error.status is None
    assert "timed out: it sent nothing more" in error.words()


def test_a_refused_connection_is_told_with_host_and_port(http: Http) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        error = failure(http, f"http://127.0.0.1:{port}/a?key=secret")
    assert error.status is None
    assert f"`127.0.0.1:{port}` refused the connection" in error.words()
    assert "secret" not in error.words()


def test_a_name_that_does_not_resolve_is_told(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert "the name of `nowhere.invalid:80` does not resolve" in failure(http, "http://nowhere.invalid/").words()


def test_a_cut_body_is_told(http: Http, server: FileServer) -> None:
    server.put("/a", b"x" * 1000, cuts=[10])
    assert "closed the connection before the answer was complete" in failure(http, server.url_of("/a")).words()


def test_a_peer_that_hangs_up_is_told(http: Http) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            connection, _ = listening.accept()
            connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        words = failure(http, f"http://127.0.0.1:{listening.getsockname()[1]}/").words()
        thread.join()
    assert "closed the connection without an answer" in words


def test_a_peer_that_speaks_something_else_is_told(http: Http) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def chatter() -> None:
            connection, _ = listening.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.close()

        thread = threading.Thread(target=chatter)
        thread.start()
        words = failure(http, f"http://127.0.0.1:{listening.getsockname()[1]}/").words()
        thread.join()
    assert "does not speak HTTP" in words


@pytest.mark.parametrize("url", ["ftp://host/", "nonsense", "http://[::1"])
def test_what_is_not_an_http_address_is_refused_in_words(http: Http, url: str) -> None:
    assert "address" in failure(http, url).words()


def test_a_header_with_a_newline_is_refused_without_being_shown(http: Http, server: FileServer) -> None:
    error = failure(http, server.url_of("/a"), headers={"Authorization": "Bearer hush\nX: y"})
    assert "characters that are not allowed" in error.words()
    assert "hush" not in error.words()


def test_tls_with_the_named_authority_works(ca: trustme.CA, tmp_path: Path) -> None:
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with FileServer("localhost", tls(ca, "localhost")) as server, Http(ca_file=str(tmp_path / "ca.pem")) as http:
        server.put("/a", b"safe")
        assert http.request("GET", server.url_of("/a")).body == b"safe"


def test_an_unknown_authority_is_told_as_a_tls_problem(ca: trustme.CA, http: Http) -> None:
    with FileServer("localhost", tls(ca, "localhost")) as server:
        words = failure(http, server.url_of("/a")).words()
    assert "TLS problem: the certificate of `localhost:" in words
    assert "is not trusted" in words


def test_a_certificate_for_another_name_is_told(ca: trustme.CA, tmp_path: Path) -> None:
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with FileServer("localhost", tls(ca, "other.test")) as server, Http(ca_file=str(tmp_path / "ca.pem")) as http:
        words = failure(http, server.url_of("/a")).words()
    assert "TLS problem" in words
    assert "localhost" in words


def test_https_to_a_plain_server_is_told_as_a_tls_problem(http: Http, server: FileServer) -> None:
    assert "TLS problem" in failure(http, server.url_of("/a").replace("http:", "https:")).words()


def test_a_missing_authority_file_is_told(tmp_path: Path) -> None:
    with Http(ca_file=str(tmp_path / "none.pem")) as http:
        assert "none.pem" in failure(http, "https://127.0.0.1:1/").words()


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


def test_a_proxy_of_the_environment_is_asked_with_its_login(server: FileServer, clean_env: pytest.MonkeyPatch) -> None:
    server.put("http://far.invalid/a", b"by proxy")
    clean_env.setenv("http_proxy", f"http://me:hush@127.0.0.1:{server.port}")
    with Http() as http:
        assert http.request("GET", "http://far.invalid/a").body == b"by proxy"
        asked = server.requests[0]
        assert asked.headers["proxy-authorization"].startswith("Basic ")


def test_no_proxy_loopback_and_a_switch_go_past_the_proxy(server: FileServer, clean_env: pytest.MonkeyPatch) -> None:
    server.put("/a", b"direct")
    clean_env.setenv("http_proxy", "http://127.0.0.1:1")
    with Http() as http:
        assert http.request("GET", server.url_of("/a")).body == b"direct"
        assert "proxy" in failure(http, "http://far.invalid/a").words()
        clean_env.setenv("no_proxy", ".invalid")
        assert "does not resolve" in failure(http, "http://far.invalid/a").words()
    clean_env.delenv("no_proxy")
    with Http(use_proxies=False) as http:
        assert "does not resolve" in failure(http, "http://far.invalid/a").words()


def test_a_proxys_password_is_never_shown(clean_env: pytest.MonkeyPatch) -> None:
    clean_env.setenv("https_proxy", "http://me:hush@127.0.0.1:1")
    with Http() as http:
        assert "hush" not in failure(http, "https://far.invalid/a").words()
    clean_env.setenv("https_proxy", "socks5://me:hush@127.0.0.1:1")
    with Http() as http:
        error = failure(http, "https://far.invalid/a")
    assert "not an http proxy" in error.words()
    assert "hush" not in error.words()


def test_a_reader_can_be_woken_from_another_thread(http: Http, server: FileServer) -> None:
    server.put("/a", b"x" * 1000, hold=threading.Event())
    with http.stream(server.url_of("/a"), read_timeout_s=30) as stream:
        pieces = iter(stream)
        assert next(pieces)
        waker = threading.Thread(target=stream.abort)
        waker.start()
        with pytest.raises(HttpError):
            b"".join(pieces)
        waker.join()


def test_headers_do_not_care_for_case() -> None:
    headers = Headers({"ETag": "x"})
    assert headers["etag"] == headers["ETAG"] == "x"
    assert "etag" in headers
    assert headers.get("no") is None


def test_loopback_is_recognised() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("", "10.0.0.1", "example.com", "localhost.example.com")))


def test_importing_the_room_does_not_load_the_library() -> None:
    code = "import sys, llmgw.system.http; sys.exit('urllib3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
