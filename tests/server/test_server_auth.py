"""Who may pass: a table over the real socket, and the rules one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_fakes import Answer, FakeClock, Plane, new_control, request

from llmgw.errors import StateError
from llmgw.server.admin import Parts
from llmgw.server.auth import SESSION_S, AdminToken, Gate, Sessions, load_token
from llmgw.server.web import Web, make_app

TOKEN = "correct horse battery staple"


class Door:
    """An admin socket behind a gate."""

    def __init__(self, directory: Path, *, open_page: bool) -> None:
        self.plane = Plane(directory)
        self.path = directory / "admin.sock"
        self._control = new_control(directory)
        self._control.start()
        hosts = ("gateway.lab",) if open_page else None
        gate = Gate(
            AdminToken(TOKEN), Sessions(self.plane.clock), hosts=hosts, open_page=open_page, secure=not open_page
        )
        parts = Parts(self.plane.state, self.plane.fleet, self.plane.deploy, self._control, self.plane.clock, 5.0)
        self._web = Web(self.path, lambda stopping: make_app(parts, gate, stopping))
        self._web.start()

    def ask(self, method: str, target: str, body: bytes | None = None, **headers: str) -> Answer:
        return request(
            self.path, method, target, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    def close(self) -> None:
        self._web.stop()
        self._control.stop()
        self.plane.close()


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path, open_page=True)
    yield door
    door.close()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path, open_page=False)
    yield door
    door.close()


BEARER = {"Authorization": f"Bearer {TOKEN}"}
STATUS = "/api/v1/status"
PROFILE = "/api/v1/profiles/x"


@pytest.mark.parametrize(
    ("method", "target", "headers", "status"),
    [
        ("GET", STATUS, BEARER, 200),
        ("GET", STATUS, {"Authorization": f"bearer  {TOKEN}"}, 200),
        ("GET", STATUS, {}, 401),
        ("GET", STATUS, {"Authorization": "Bearer wrong"}, 401),
        ("GET", STATUS, {"Authorization": TOKEN}, 401),
        ("GET", STATUS, {"Authorization": f"Basic {TOKEN}"}, 401),
        ("GET", "/api/v1/nothing", {}, 401),
        ("DELETE", PROFILE, {}, 401),
        ("DELETE", PROFILE, BEARER, 404),
        ("DELETE", PROFILE, BEARER | {"Origin": "http://localhost:8080"}, 404),
        ("DELETE", PROFILE, BEARER | {"Origin": "http://evil.example"}, 403),
        ("DELETE", PROFILE, BEARER | {"Origin": "http://localhost:9999"}, 403),
        ("DELETE", PROFILE, BEARER | {"Origin": "null"}, 403),
        ("PUT", PROFILE, BEARER | {"Origin": "http://evil.example"}, 403),
        ("POST", "/page/logout", {"Origin": "http://evil.example"}, 403),
        ("POST", "/page/login", {"Origin": "http://evil.example"}, 403),
        ("GET", STATUS, BEARER | {"Origin": "http://evil.example"}, 200),
        ("GET", STATUS, BEARER | {"Host": "evil.example"}, 421),
        ("GET", "/", {"Host": "evil.example"}, 421),
        ("GET", "/", {"Host": "localhost.evil.example"}, 421),
        ("GET", "/", {"Host": "x@localhost"}, 421),
        ("GET", "/", {"Host": ""}, 421),
        ("GET", "/", {"Host": "GATEWAY.lab:8080"}, 200),
        ("GET", "/", {"Host": "127.0.0.1:8080"}, 200),
        ("GET", "/", {"Host": "[::1]:8080"}, 200),
        ("GET", "/", {}, 200),
        ("GET", "/page/page.css", {}, 200),
        ("GET", "/page/page.js", {}, 200),
        ("GET", "/page/../auth.py", {}, 404),
    ],
)
def test_on_loopback(loopback: Door, method: str, target: str, headers: dict[str, str], status: int) -> None:
    answer = loopback.ask(method, target, **headers)
    assert answer.status == status, answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    if status in (401, 403, 421):
        assert answer.json()["error"]["message"]


def test_two_host_headers_are_refused(loopback: Door) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(loopback.path))
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert raw.recv(100).split()[1] in (b"400", b"421")


def test_off_loopback_the_page_asks_for_the_token_and_keeps_a_strict_cookie(network: Door) -> None:
    asked = network.ask("GET", "/", Host="any.name:8080")
    assert asked.status == 200
    assert 'action="/page/login"' in asked.text
    assert 'data-k="summary"' not in asked.text
    assert network.ask("GET", "/page/live").status == 401
    wrong = network.ask("POST", "/page/login", b"token=wrong")
    assert wrong.status == 403
    assert "That is not the admin token" in wrong.text
    assert "set-cookie" not in wrong.headers
    right = network.ask("POST", "/page/login", b"token=correct+horse+battery+staple")
    assert (right.status, right.headers["location"]) == (303, "/")
    cookie = right.headers["set-cookie"]
    assert {"HttpOnly", "Secure", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
    session = cookie.split(";")[0]
    assert TOKEN not in cookie
    assert 'data-k="summary"' in network.ask("GET", "/", Cookie=session).text
    assert network.ask("GET", STATUS, Cookie=session).status == 401
    network.ask("POST", "/page/logout", Cookie=session)
    assert 'action="/page/login"' in network.ask("GET", "/", Cookie=session).text


def test_a_made_up_or_expired_session_reads_nothing(network: Door) -> None:
    right = network.ask("POST", "/page/login", b"token=correct+horse+battery+staple")
    session = right.headers["set-cookie"].split(";")[0]
    assert 'action="/page/login"' in network.ask("GET", "/", Cookie="llmgw_session=x").text
    network.plane.clock.pass_time(SESSION_S)
    assert 'action="/page/login"' in network.ask("GET", "/", Cookie=session).text


def test_a_login_form_that_is_too_long_is_refused(network: Door) -> None:
    assert network.ask("POST", "/page/login", b"token=" + b"x" * 5000).status == 413


def test_many_logins_do_not_fill_the_memory() -> None:
    sessions = Sessions(FakeClock())
    first = sessions.create()
    for _ in range(1000):
        last = sessions.create()
    assert sessions.valid(last)
    assert not sessions.valid(first)


def test_a_token_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "admin.token"
    load_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text().strip()
    assert len(token) > 40
    assert load_token(path).accepts(token)
    assert not load_token(path).accepts(token + "x")
    assert not load_token(path).accepts("")


def test_a_token_everybody_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    load_token(path)
    path.chmod(0o644)
    with pytest.raises(StateError, match="can be read by every user"):
        load_token(path)


@pytest.mark.parametrize("content", ["", "short", "\n \n"])
def test_an_empty_or_short_token_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "admin.token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(StateError, match="unusable"):
        load_token(path)
