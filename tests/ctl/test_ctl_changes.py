"""What `apply`, `delete` and `keys` send, and what they say when it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from ctl_server import AdminServer

from llmgw.config import profile_from_json
from llmgw.domain.profiles import Profile
from llmgw.errors import ApiError, ConfigError, UsageError

Ctl = Callable[..., Result]


@pytest.fixture
def taken(admin: AdminServer) -> list[Profile]:
    """The profiles the server has accepted."""
    kept: list[Profile] = []

    def put(target: str, body: Any) -> tuple[int, Any]:
        profile = profile_from_json(body, target.rsplit("/", 1)[1])
        kept.append(profile)
        return 200, {"changed": len(kept) == 1, "profile": body}

    for name in ("a", "b", "c"):
        admin.routes[("PUT", f"/api/v1/profiles/{name}")] = put
    return kept


def test_apply_sends_every_profile_of_files_directories_and_stdin(
    ctl: Ctl, taken: list[Profile], tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "1.yaml").write_text("name: a\nmodel: m\nmemory: 2GiB\n---\nname: b\nmodel: m\n")
    (tmp_path / "d" / "notes.txt").write_text("not a profile")
    result = ctl("apply", "-f", str(tmp_path / "d"), "-f", "-", stdin="name: c\nmodel: m\n")
    assert result.output == "a: changed\nb: unchanged\nc: unchanged\n"
    assert taken == [
        Profile(name="a", model="m", memory_bytes=2 << 30),
        Profile(name="b", model="m"),
        Profile(name="c", model="m"),
    ]


def test_apply_sends_nothing_while_any_file_has_a_problem(ctl: Ctl, taken: list[Profile], tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("name: a\nmodel: m\n")
    bad.write_text("name: a\nmodel: m\n---\nname: b\nslot: 1\n")
    with pytest.raises(ConfigError) as caught:
        ctl("apply", "-f", str(good), "-f", str(bad), "-f", str(tmp_path / "none.yaml"))
    assert caught.value.message == "nothing was applied"
    said = [p.replace(str(tmp_path), "") for p in caught.value.problems]
    assert said[0] == "/bad.yaml:4: model: is required"
    assert said[1].startswith("/bad.yaml:5: slot: unknown key, did you mean `slots`?")
    assert said[2:] == ["`/none.yaml` does not exist"]
    assert taken == []
    bad.write_text("name: a\nmodel: m\n")
    with pytest.raises(ConfigError, match="profile `a` is in"):
        ctl("apply", "-f", str(good), "-f", str(bad))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no `.yaml` file"):
        ctl("apply", "-f", str(tmp_path / "empty"))


def test_apply_goes_on_after_a_refusal_and_tells_every_problem(
    ctl: Ctl, admin: AdminServer, taken: list[Profile]
) -> None:
    error = {
        "code": "config-invalid",
        "message": "profile `a` has 2 problems",
        "problems": ["x: y", "z: w"],
        "hint": "h",
    }
    admin.routes[("PUT", "/api/v1/profiles/a")] = lambda *_: (400, {"error": error})
    with pytest.raises(ConfigError) as caught:
        ctl("apply", "-f", "-", stdin="name: a\nmodel: m\n---\nname: b\nmodel: m\n")
    assert caught.value.message == "1 of 2 profiles were not applied"
    assert caught.value.problems == ("a: x: y", "a: z: w")
    assert [p.name for p in taken] == ["b"]


def test_delete_names_what_is_not_there_in_the_server_s_words(ctl: Ctl, admin: AdminServer) -> None:
    assert ctl("delete", "qwen").output == "qwen: deleted\n"
    with pytest.raises(ApiError) as caught:
        ctl("delete", "a/b")
    assert admin.asked[-1][:2] == ("DELETE", "/api/v1/profiles/a%2Fb")
    assert (caught.value.code, caught.value.hint) == ("not-found", "look at the list")


def test_a_new_key_goes_to_standard_output_alone(ctl: Ctl, admin: AdminServer) -> None:
    result = ctl("keys", "create", "alice", "-m", "qwen,big", "-m", "small")
    assert result.stdout == "lgw-secret\n"
    assert "not shown again" in result.stderr
    assert admin.asked[-1][2] == {"name": "alice", "models": ["qwen", "big", "small"]}
    admin.routes[("POST", "/api/v1/keys")] = {"name": "bob", "key": "s", "warning": "others \x1b[1m are served too"}
    warned = ctl("keys", "create", "bob")
    assert (warned.stdout, "warning: others \\x1b[1m are served too" in warned.stderr) == ("s\n", True)
    assert ctl("keys", "delete", "alice").output == "alice: deleted\n"
    assert "alice" in ctl("keys", "list").output


def test_one_name_that_fails_keeps_no_other_from_its_turn(ctl: Ctl, admin: AdminServer) -> None:
    kept = {"b", "d"}

    def delete(target: str, _: Any) -> tuple[int, Any]:
        name = target.rsplit("/", 1)[1]
        if name in kept:
            return 200, {}
        return 404, {"error": {"code": "not-found", "message": f"there is no key `{name}`", "cause": "", "hint": ""}}

    for name in ("a", "b", "c", "d"):
        admin.routes[("DELETE", f"/api/v1/keys/{name}")] = delete
    with pytest.raises(ApiError, match="there is no key `c`"):
        ctl("keys", "delete", "a", "b", "c", "d")
    asked = [target.rsplit("/", 1)[1] for method, target, _ in admin.asked if method == "DELETE"]
    assert asked == ["a", "b", "c", "d"]


def test_what_the_server_calls_wrongly_typed_ends_with_the_code_for_that(ctl: Ctl, admin: AdminServer) -> None:
    said = {"error": {"code": "usage", "message": "`since` must be a day", "cause": "", "hint": ""}}
    admin.routes[("GET", "/api/v1/usage")] = lambda *_: (400, said)
    with pytest.raises(ApiError) as caught:
        ctl("usage", "--since", "yesterday")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("lasting", ["0s", "99999999999d"])
def test_a_key_that_cannot_expire_then_is_refused_in_words_of_the_option(ctl: Ctl, lasting: str) -> None:
    with pytest.raises(UsageError, match=f"a key cannot expire after `{lasting}`"):
        ctl("keys", "create", "alice", "--expires", lasting)


def test_a_file_that_is_not_there_is_told_with_the_option_it_was_named_by(ctl: Ctl) -> None:
    with pytest.raises(ConfigError) as caught:
        ctl("apply", "-f", "/nonexistent.yaml")
    assert caught.value.hint == "name an existing file with `-f FILE`"
