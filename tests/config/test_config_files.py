"""YAML to attrs values: every problem at once, each with its line, its path and what may stand there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pytest
from attrs import field, frozen

from llmgw.config import AbsolutePath, Bytes, HostPort, Problem, Seconds, ServerUrl, at_least, checked, load, load_text
from llmgw.errors import ConfigError


@frozen(kw_only=True)
class Inner:
    name: str
    count: int = checked(at_least(1, 9), default=1)
    on: bool = False


@frozen(kw_only=True)
class Outer:
    title: str
    wait_s: Seconds = 5.0
    room_bytes: Bytes | None = None
    inner: tuple[Inner, ...] = ()
    labels: Mapping[str, str] = field(factory=dict)
    mode: Literal["ray", "mp"] = "mp"
    where: AbsolutePath = "/"
    listen: HostPort = field(factory=lambda: HostPort("127.0.0.1", 1))
    servers: Annotated[tuple[ServerUrl, ...], "one-or-many"] = ()
    ratio: float = 0.5


def problems(text: str, kind: type = Outer, **given: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_text(text, "f.yaml", kind, **given)  # type: ignore[arg-type]
    return caught.value.problems


def test_values_are_read_in_their_types() -> None:
    read = load_text(
        """
title: a
wait: 1m30s
room: 2GiB
inner: [{name: x, count: 3, on: true}]
labels: {zone: no, at: 12:30, "1": "2"}
mode: ray
where: /srv
listen: "[::1]:80"
servers: https://host
ratio: 1
""",
        "f.yaml",
        Outer,
    )
    assert read == Outer(
        title="a",
        wait_s=90.0,
        room_bytes=2 << 30,
        inner=(Inner(name="x", count=3, on=True),),
        labels={"zone": "no", "at": "12:30", "1": "2"},
        mode="ray",
        where="/srv",
        listen=HostPort("::1", 80),
        servers=(ServerUrl(True, "host", 7443),),
        ratio=1.0,
    )


def test_all_problems_of_a_file_are_told_at_once_in_the_order_of_the_file() -> None:
    text = """\
titel: a
wait: 5
inner:
  - name: 0.10
    count: 12
  - count: x
    on: yes
labels: {rack: 12}
mode: rai
where: srv
listen: 7443
servers: ["ftp://x", http://h:0]
ratio: "1"
"""
    assert problems(text) == (
        "f.yaml:1: titel: unknown key, did you mean `title`? valid: `title`, `wait`, `room`, `inner`, `labels`, "
        "`mode`, `where`, `listen`, `servers`, `ratio`",
        "f.yaml:1: title: is required",
        "f.yaml:2: wait: expected a duration with a unit, such as `5s` or `1m30s`, got the number 5",
        'f.yaml:4: inner[0].name: expected text, got the number 0.1, write it in quotes: `"0.10"`',
        "f.yaml:5: inner[0].count: must be from 1 to 9, is 12",
        "f.yaml:6: inner[1].count: expected a whole number, got the text `x`",
        "f.yaml:6: inner[1].name: is required",
        "f.yaml:7: inner[1].on: expected `true` or `false`, got the text `yes`",
        'f.yaml:8: labels.rack: expected text, got the number 12, write it in quotes: `"12"`',
        "f.yaml:9: mode: the text `rai` is not one of `ray`, `mp`",
        "f.yaml:10: where: expected an absolute path, got `srv`",
        'f.yaml:11: listen: expected text, got the number 7443, write it in quotes: `"7443"`',
        "f.yaml:12: servers[0]: expected `http://HOST:7443` or `https://HOST:7443`",
        "f.yaml:12: servers[1]: port 0 cannot be dialed",
        "f.yaml:13: ratio: expected a number, got the text `1`",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title: 1e5", 'f.yaml:1: title: expected text, got the number 100000.0, write it in quotes: `"1e5"`'),
        ("title: true", 'f.yaml:1: title: expected text, got `true`, write it in quotes: `"true"`'),
        ("title:", "f.yaml:1: title: expected text, got nothing"),
        ("title: [a]", "f.yaml:1: title: expected text, got a list"),
        ("title: a\ninner: {name: x}", "f.yaml:2: inner: expected a list, got a map"),
        ("title: a\ninner: [x]", "f.yaml:2: inner[0]: expected a map with `name`, `count`, `on`, got the text `x`"),
        ("title: a\nlabels: []", "f.yaml:2: labels: expected a map, got a list"),
        ("title: a\nwait: 5 apples", "f.yaml:2: wait: `5 apples` is not a duration, write a number with a unit"),
        (
            "title: a\nroom: 10",
            "f.yaml:2: room: expected a size with a unit, such as `16MB` or `2GiB`, got the number 10",
        ),
        ("title: a\ntitle: b", "f.yaml:1: title: given again on line 2, remove one of the two"),
        ("title: a\nlabels: {a: b, a: c}", "f.yaml:2: labels.a: given again on line 2"),
        ("title: a\nlabels: {<<: {a: b}}", "f.yaml:2: labels.<<: merging maps is not supported"),
        ("title: !!python/name:os.system", "f.yaml:1: title: the tag `tag:yaml.org,2002:python/name:os.system` is not"),
        ("? [a]\n: b\ntitle: a", "f.yaml:1: line 1: a key must be plain text"),
        ("title: &a [*a]", "f.yaml:1: title[0]: an alias that repeats without end"),
        ("just text", "f.yaml:1: expected a map with `title`"),
        ("", "f.yaml:1: title: is required"),
        ("title: a\n---\ntitle: b", "f.yaml:3: a second YAML document begins, expected one"),
        ("title: a\x07", "f.yaml:1: holds the unprintable character U+0007"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_line(text: str, said: str) -> None:
    assert problems(text)[0].startswith(said)


@pytest.mark.parametrize("text", ["010", "on", "no", "12:30", "2024-01-01", "0x10", "1_000", ".inf"])
def test_text_that_older_yaml_would_turn_into_something_else_stays_text(text: str) -> None:
    assert load_text(f"title: {text}", "f.yaml", Outer).title == text


def test_broken_yaml_is_told_with_line_and_snippet() -> None:
    (said,) = problems("title: a\nlabels: {a: b\nmode: ray\n")
    assert said.startswith("f.yaml:3: not valid YAML: while parsing a flow mapping, ")
    assert "\n    mode: ray\n" in said
    (said,) = problems("title: a\n\tmode: ray\n")
    assert "f.yaml:2: not valid YAML" in said


def test_a_password_in_a_broken_line_is_not_shown() -> None:
    (said,) = problems("title: postgresql://me:hunter2@db/x: y\n")
    assert "hunter2" not in said
    assert "not valid YAML" in said


def test_aliases_that_multiply_are_refused_without_being_expanded() -> None:
    bomb = "title: a\nlabels:\n  a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    for n in range(1, 12):
        bomb += f"  a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n"
    assert any("repeats without end" in said for said in problems(bomb))


def test_checks_between_keys_come_with_the_others() -> None:
    def cross(data: Mapping[str, object]) -> list[Problem]:
        return [Problem(("inner", 0, "name"), "is taken")]

    assert problems("title: 1\ninner:\n- name: x\n", cross=cross) == (
        'f.yaml:1: title: expected text, got the number 1, write it in quotes: `"1"`',
        "f.yaml:3: inner[0].name: is taken",
    )


def test_a_file_that_cannot_be_read_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.yaml` does not exist"):
        load(tmp_path / "nothing.yaml", Outer)
    with pytest.raises(ConfigError, match="is a directory"):
        load(tmp_path, Outer)
    (tmp_path / "latin.yaml").write_bytes(b"title: a\nlabels: {a: \xe9}\n")
    with pytest.raises(ConfigError, match=r"latin.yaml:2: not UTF-8 text"):
        load(tmp_path / "latin.yaml", Outer)
    (tmp_path / "big.yaml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load(tmp_path / "big.yaml", Outer)
