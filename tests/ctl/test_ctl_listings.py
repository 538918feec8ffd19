"""What the listings show: the nodes' own words, letter for letter, whatever the form and the width."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from click.testing import Result
from ctl_server import FAILED, HOSTILE, INSTALLING, NODES, REFUSAL, ROUTES, AdminServer, node

from llmgw.ctl.text import escape
from llmgw.errors import ApiError, UsageError

Ctl = Callable[..., Result]

LISTINGS = [
    ("nodes",), ("nodes", "gpu-a-01"), ("engines",), ("profiles",), ("replicas",), ("explain", "big"), ("status",),
    ("keys", "list"),
]  # fmt: skip


def last_column(output: str, header: str = "WORDS") -> str:
    """The last column of a table, its lines joined as they were before they were wrapped."""
    lines = output.splitlines()
    if header in lines[0]:
        return " ".join(line[lines[0].index(header) :] for line in lines[1:])
    return " ".join(line[4:] for line in lines if line.startswith("    "))


def test_nodes_show_states_engines_and_words_in_a_table(ctl: Ctl) -> None:
    lines = ctl("nodes").output.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "NODE", "gpu-a-01", "gpu-a-01", "gpu-a-01", "node-b", "node-c", "node-c", "node-d", "node-e",
    ]  # fmt: skip
    assert lines[1].split() == ["gpu-a-01", "connected", "llama.cpp", "b10991", "ready", "ready"]
    assert lines[2].endswith(f"vllm ? failed                {FAILED}")
    assert lines[3].endswith("-                            warning: its clock is 40 s ahead")
    assert lines[4].endswith(INSTALLING)
    assert lines[5].split("  ")[-1] == "lost: no report for 61 s (3 beats of 5 s)"
    assert lines[7].split() == ["node-d", "connected", "?", *"has not looked at its engines yet".split()]
    assert lines[8].split()[:3] == ["node-e", "connected", "-"]


@pytest.mark.parametrize("columns", [None, 200, 100, 80, 52])
def test_words_are_never_cut_at_any_width(ctl: Ctl, columns: int | None) -> None:
    output = ctl("nodes", columns=columns).output
    joined = last_column(output)
    assert INSTALLING in joined
    assert FAILED in joined
    if columns is not None:
        assert max(len(line) for line in output.splitlines()) <= columns


def test_a_very_narrow_terminal_gets_blocks_and_no_word_is_lost(ctl: Ctl) -> None:
    output = ctl("nodes", columns=40).output
    assert "NODE     gpu-a-01\nSTATE    connected\nENGINES  vllm ? failed\nWORDS    failed: libgomp.so.1" in output
    assert " ".join(FAILED.split()) in " ".join(output.split())


@pytest.mark.parametrize("listing", LISTINGS)
@pytest.mark.parametrize("columns", [None, 30, 80, 120])
def test_every_listing_draws_at_any_width(ctl: Ctl, listing: tuple[str, ...], columns: int | None) -> None:
    result = ctl(*listing, columns=columns)
    assert result.exit_code == 0
    assert result.output.strip()
    assert "None" not in result.output


@pytest.mark.parametrize("listing", LISTINGS)
def test_json_and_yaml_carry_what_the_server_said(ctl: Ctl, listing: tuple[str, ...]) -> None:
    path = "/api/v1/" + "/".join(listing).removesuffix("/list")
    said = ROUTES[("GET", path)]
    if len(listing) == 2 and listing[0] == "nodes":
        said = said["nodes"][0]
    assert json.loads(ctl(*listing, "-o", "json").output) == said
    assert yaml.safe_load(ctl(*listing, "-o", "yaml").output) == said


@pytest.mark.parametrize("output", ["table", "wide", "json", "yaml"])
def test_words_stand_letter_for_letter_in_every_form(ctl: Ctl, output: str) -> None:
    shown = ctl("nodes", "-o", output).output
    assert INSTALLING in shown
    assert FAILED in shown


def test_wide_is_never_wrapped_and_shows_more(ctl: Ctl) -> None:
    lines = ctl("nodes", "-o", "wide", columns=60).output.splitlines()
    assert len(lines) == 9
    assert lines[1].split()[5:] == ["cuda-13.3", *"1m - 1s 0.1.0 - debian 12 x86_64, 64 cores 512 GB 1 ready".split()]
    assert "in 30s" in lines[2]
    assert INSTALLING in lines[4]


@pytest.mark.parametrize("output", ["table", "wide", "json", "yaml"])
def test_a_node_cannot_steer_the_terminal(ctl: Ctl, admin: AdminServer, output: str) -> None:
    evil = node(
        "n\u202e1",
        words=HOSTILE,
        engines=[{"name": "\x1b[31m", "state": "failed", "words": HOSTILE, "version": "\x07"}],
    )
    admin.routes[("GET", "/api/v1/nodes")] = {"nodes": [evil]}
    for columns in (None, 60):
        shown = ctl("nodes", "-o", output, columns=columns).output
        assert not [c for c in shown if not c.isprintable() and c != "\n"]
        if output == "json":
            assert json.loads(shown)["nodes"] == [evil]
        elif output == "yaml":
            assert yaml.safe_load(shown)["nodes"] == [evil]
        else:
            assert escape(HOSTILE) in last_column(shown)


def test_one_node_is_described_in_full(ctl: Ctl) -> None:
    shown = ctl("nodes", "gpu-a-01").output
    for part in (
        "Host name       gpu-a-01", "Labels          rack=r12", "System          Debian GNU/Linux 12",
        "CPU flags       avx2 avx512f", "Memory          512 GB", "Memory limit    -",
        "NVIDIA driver   yes: driver 580.95.05 is loaded", "GPU 0           H100, 80 GB, GPU-1",
        "Fabric ib-a     mlx5_0; 200 Gb/s; yes: port 1 of mlx5_0 is active", "Memory available  300 GB",
        "70 GB free, 12 % busy, 41 °C", "1.0 TB free of 2.0 TB", FAILED, "in 30s", "10.0.0.11:17000",
        "log: error loading model: bad magic", "no: being fetched", "its clock is 40 s ahead",
    ):  # fmt: skip
        assert part in shown


def test_what_a_node_has_not_told_yet_is_not_taken_for_nothing(ctl: Ctl) -> None:
    shown = ctl("nodes", "node-d").output
    assert "Last probed  ?" in shown
    assert shown.count("not yet known") == 6
    assert "none" not in shown


def test_engines_are_shown_beside_what_is_wanted(ctl: Ctl) -> None:
    lines = ctl("engines").output.splitlines()
    assert lines[1].split() == ["llama.cpp", "b10991", "gpu-a-01", "b10991", "ready", "ready"]
    assert lines[2].endswith(INSTALLING)
    vllm = next(line for line in lines if line.startswith("vllm"))
    assert vllm.split()[:5] == ["vllm", "-", "gpu-a-01", "?", "failed"]
    assert lines[-1].endswith("wanted on nodes with gpu=yes, reported by none")


def test_a_refused_profile_shows_each_node_s_own_words(ctl: Ctl) -> None:
    for shown in (ctl("profiles").output, ctl("explain", "big").output):
        for line in REFUSAL.lines():
            assert line in shown
    assert "a change of it waits" in ctl("profiles").output
    assert ctl("profiles").output.splitlines()[1].split()[:4] == ["qwen", "llama.cpp", "1/2", "ready"]
    assert ctl("explain", "qwen").output == (
        "qwen: ready: 1 of 2 replicas is ready\n  gpu-a-01: holds the weights already\n"
    )


def test_of_hundreds_of_refusals_the_listing_shows_some_and_says_where_the_rest_is(
    ctl: Ctl, admin: AdminServer
) -> None:
    nodes = [{"node_id": f"n{number:03}", "code": "label", "words": "has no label `rack`"} for number in range(300)]
    refusal = {"profile": "big", "words": "no node can run `big`: all 300 nodes refuse", "nodes": nodes}
    entry = {"profile": {"name": "big", "engine": "llama.cpp"}, "state": "refused", "words": refusal["words"]}
    admin.routes[("GET", "/api/v1/profiles")] = {"profiles": [{**entry, "refusal": refusal}]}
    lines = ctl("profiles").output.splitlines()
    assert len(lines) == 13
    assert lines[-1].endswith("… and 290 more nodes: `llmgw ctl explain big`")
    assert len(json.loads(ctl("profiles", "-o", "json").output)["profiles"][0]["refusal"]["nodes"]) == 300


def test_replicas_show_where_they_run_and_how_they_ended(ctl: Ctl) -> None:
    lines = ctl("replicas").output.splitlines()
    assert lines[1].split() == ["qwen#0", "gpu-a-01", "ready", "1h", "ready"]
    assert lines[3].endswith("exited 1")
    assert lines[4].split()[:3] == ["big#0", "-", "pending"]
    assert "10.0.0.11:17000" in ctl("replicas", "-o", "wide").output


def test_logs_are_asked_for_by_the_replica_s_name_and_escaped(ctl: Ctl, admin: AdminServer) -> None:
    assert ctl("logs", "qwen#0", "-n", "7").output == "loading\nevil \\x1b[31m red\ndone\n"
    assert admin.asked[-1][1] == "/api/v1/replicas/qwen%230/logs?lines=7"


def test_status_shows_gateways_and_says_when_there_is_none(ctl: Ctl, admin: AdminServer) -> None:
    shown = ctl("status").output
    assert "2h ago" in shown
    assert "77       127.0.0.1:8080  0.1.0    9         qwen 2" in shown
    assert "connected 4, lost 1" in shown
    admin.routes[("GET", "/api/v1/status")] = {"version": "0.1.0", "gateways": []}
    assert "no gateway is connected" in ctl("status").output


def test_empty_listings_say_what_to_do(ctl: Ctl, admin: AdminServer) -> None:
    for noun, hint in (
        ("nodes", "llmgw agent"), ("engines", "no engine is wanted"), ("profiles", "ctl apply"),
        ("replicas", "ctl apply"),
        ("keys", "keys create"),
    ):  # fmt: skip
        admin.routes[("GET", f"/api/v1/{noun}")] = {noun: []}
        assert hint in ctl(*([noun, "list"] if noun == "keys" else [noun])).output


def test_the_nodes_are_what_the_server_gave(ctl: Ctl) -> None:
    assert json.loads(ctl("nodes", "-o", "json").output) == {"nodes": NODES}


def test_a_log_goes_on_when_the_server_was_away_and_ends_with_its_replica(ctl: Ctl, admin: AdminServer) -> None:
    away = {"error": {"code": "control-away", "message": "the control process is away", "cause": "", "hint": ""}}
    gone = {"error": {"code": "not-found", "message": "there is no replica `qwen#0`", "cause": "", "hint": ""}}
    steps: list[tuple[int, Any]] = [
        (200, {"lines": ["one"], "cursor": "c1"}), (503, away), (503, away),
        (200, {"lines": ["two"], "cursor": "c2"}), (404, gone),
    ]  # fmt: skip
    asked: list[str] = []

    def answer(target: str, _: Any) -> tuple[int, Any]:
        asked.append(target.partition("cursor=")[2])
        return steps.pop(0)

    admin.routes[("GET", "/api/v1/replicas/qwen%230/logs")] = answer
    with pytest.raises(ApiError, match="there is no replica"):
        ctl("logs", "qwen#0", "-f")
    assert asked == ["", "c1", "c1", "c1", "c2"]


def test_logs_of_the_previous_run_are_asked_for_and_cannot_be_followed(ctl: Ctl, admin: AdminServer) -> None:
    ctl("logs", "qwen#0", "--previous")
    assert admin.asked[-1][1] == "/api/v1/replicas/qwen%230/logs?lines=100&previous=true"
    with pytest.raises(UsageError, match="do not go together"):
        ctl("logs", "qwen#0", "-f", "--previous")
