"""Which server is asked, with which token, and what is said when that does not work."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from ctl_server import AdminServer, serving

from llmgw.ctl import contexts
from llmgw.ctl.client import Client
from llmgw.errors import ApiError, ConfigError, Unreachable, UsageError
from llmgw.system.http import Http


@pytest.fixture
def config(home: Path) -> Path:
    path = home / ".config" / "llmgw" / "ctl.yaml"
    path.parent.mkdir(parents=True)
    (home / "t1").write_text("token-one\n")
    (home / "t2").write_text("token-two\n")
    path.write_text(
        f"""current-context: one
contexts:
  one: {{server: "http://10.0.0.1:8080/", token_file: {home}/t1}}
  two: {{server: "https://two.example", token_file: {home}/t2, ca: /etc/ca.pem}}
"""
    )
    return path


def find(home: Path, **given: str) -> contexts.Where:
    env = {"HOME": str(home), **{k: v for k, v in given.items() if k.isupper()}}
    options = {k: v for k, v in given.items() if not k.isupper()}
    return contexts.find(env, default_token_file=str(home / "default.token"), **options)  # type: ignore[arg-type]


def test_without_any_setting_this_machine_is_asked(home: Path) -> None:
    where = find(home)
    assert (where.server, where.origin, where.token) == ("http://127.0.0.1:8080", "the default", None)
    assert where.token_words == f"no token was sent: `{home}/default.token`: no such file or directory"
    (home / "default.token").write_text("abc\n")
    assert find(home).token == "abc"


def test_option_beats_environment_beats_context(home: Path, config: Path) -> None:
    assert find(home).server == "http://10.0.0.1:8080"
    assert find(home).origin == f"context `one` of `{config}`"
    assert find(home, LLMGW_SERVER="http://e:1").server == "http://e:1"
    assert find(home, LLMGW_SERVER="http://e:1", server="http://o:1").server == "http://o:1"
    two = find(home, context="two")
    assert (two.server, two.token, two.ca) == ("https://two.example", "token-two", "/etc/ca.pem")
    assert find(home, LLMGW_SERVER="http://e:1", context="two").server == "https://two.example"


def test_token_option_beats_environment_beats_context(home: Path, config: Path) -> None:
    assert find(home).token == "token-one"
    assert find(home, LLMGW_TOKEN_FILE=str(home / "t2")).token == "token-two"
    assert find(home, LLMGW_TOKEN_FILE=str(home / "t2"), token_file=str(home / "t1")).token == "token-one"


def test_a_context_s_token_goes_to_no_other_server(home: Path, config: Path) -> None:
    assert find(home, server="http://other:8080").token is None
    assert find(home, server="https://two.example").token == "token-two"


def test_a_running_llmgw_up_is_found(home: Path) -> None:
    path = home / ".local" / "state" / "llmgw" / "up" / "ctl.yaml"
    path.parent.mkdir(parents=True)
    (home / "t").write_text("up-token")
    path.write_text(
        f"current-context: up\ncontexts:\n  up: {{server: 'http://127.0.0.1:9999', token_file: {home}/t}}\n"
    )
    assert (find(home).server, find(home).token) == ("http://127.0.0.1:9999", "up-token")
    moved = home / "s" / "llmgw" / "up"
    moved.mkdir(parents=True)
    path.rename(moved / "ctl.yaml")
    assert find(home, XDG_STATE_HOME=str(home / "s")).server == "http://127.0.0.1:9999"


def test_the_token_is_not_shown(home: Path, config: Path) -> None:
    assert "token-one" not in repr(find(home))


@pytest.mark.parametrize(
    "server", ["host:8080", "ftp://h", "http://", "http://u:secret@h", "http://h/path", "http://h:x"]
)
def test_an_address_that_is_none_is_refused(home: Path, server: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(home, server=server)
    assert "secret" not in caught.value.words()


def test_a_token_file_that_was_asked_for_must_be_readable(home: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        find(home, token_file="/nonexistent/t")
    (home / "empty").write_text("\n")
    with pytest.raises(UsageError, match="holds no token"):
        find(home, token_file=str(home / "empty"))


def test_problems_of_ctl_yaml_are_told_with_their_lines(home: Path, config: Path) -> None:
    config.write_text("current-context: x\ncontexts:\n  a: {server: h, tokn_file: /t}\n")
    with pytest.raises(ConfigError) as caught:
        find(home)
    assert [p.split(":")[1] for p in caught.value.problems] == ["1", "3"]
    config.write_text("contexts:\n  a: {server: h}\n")
    with pytest.raises(ConfigError, match="`h` is not the address of a server"):
        find(home)
    config.write_text("contexts:\n  a: {server: 'http://h'}\n")
    with pytest.raises(UsageError, match="there is no context `b`"):
        find(home, context="b")


def test_a_token_in_the_clear_over_a_network_is_noticed(home: Path) -> None:
    (home / "default.token").write_text("abc")
    exposed = {
        url: find(home, server=url).exposed for url in ("http://h", "https://h", "http://127.0.0.2", "http://[::1]")
    }
    assert exposed == {"http://h": True, "https://h": False, "http://127.0.0.2": False, "http://[::1]": False}


def test_a_server_that_is_not_there_is_one_clear_line_with_what_to_do(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with Http() as http, pytest.raises(Unreachable) as caught:
            Client(find(home, server=f"http://127.0.0.1:{port}"), http).get("nodes")
    assert caught.value.message == f"no llmgw server at `http://127.0.0.1:{port}`"
    assert "refused the connection" in caught.value.cause
    assert "`--server`" in caught.value.hint


def test_a_refused_token_names_the_file_it_came_from(
    ctl: Callable[..., Result], admin: AdminServer, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    with pytest.raises(ApiError) as caught:
        ctl("nodes", "--token-file", str(wrong))
    assert caught.value.code == "unauthorized"
    assert caught.value.cause == f"the token of `{wrong}` was sent"
    with Http() as http, pytest.raises(ApiError) as caught:
        Client(find(tmp_path, server=admin.url), http).get("nodes")
    assert caught.value.message == "the server needs a token"
    assert f"`{tmp_path}/default.token`: no such file" in caught.value.cause


def test_options_are_taken_before_and_after_the_noun(ctl: Callable[..., Result], admin: AdminServer) -> None:
    for args in (("--server", admin.url, "status"), ("status", "--server", admin.url)):
        assert ctl(*args).exit_code == 0


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"", b"[" * 100_000])
def test_something_else_than_llmgw_is_told_apart(home: Path, body: bytes) -> None:
    with (
        serving(lambda *_: (200, body)) as url,
        Http() as http,
        pytest.raises(ApiError, match="is not an llmgw server"),
    ):
        Client(find(home, server=url), http).get("nodes")


def test_an_error_answer_carries_the_server_s_own_words(home: Path) -> None:
    said = {"error": {"code": "state-failed", "message": "m", "cause": "c", "hint": "h"}}
    with serving(lambda *_: (500, said)) as url, Http() as http, pytest.raises(ApiError) as caught:
        Client(find(home, server=url), http).get("nodes")
    error = caught.value
    assert (error.code, error.message, error.cause, error.hint) == ("state-failed", "m", "c", "h")
    with (
        serving(lambda *_: (502, {"error": "x"})) as url,
        Http() as http,
        pytest.raises(ApiError, match="answered 502"),
    ):
        Client(find(home, server=url), http).get("nodes")
