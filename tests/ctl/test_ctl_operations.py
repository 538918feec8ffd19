"""What `drain`, `undrain`, `scale` and `events` send and print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from ctl_server import NOW, AdminServer

from llmgw.ctl import events as events_module
from llmgw.errors import ApiError

Ctl = Callable[..., Result]


def test_drain_posts_and_prints_the_servers_words(ctl: Ctl, admin: AdminServer) -> None:
    admin.routes[("POST", "/api/v1/nodes/node-b/drain")] = {"words": "draining: 1 replica to move: qwen\x1b[31m#0"}
    admin.routes[("POST", "/api/v1/nodes/node-b/undrain")] = {"words": "takes replicas"}
    assert ctl("drain", "node-b").output == "node-b: draining: 1 replica to move: qwen\\x1b[31m#0\n"
    assert ctl("undrain", "node-b").output == "node-b: takes replicas\n"
    with pytest.raises(ApiError, match="there is no"):
        ctl("drain", "nobody")


def test_drain_waits_until_the_node_is_empty(ctl: Ctl, admin: AdminServer) -> None:
    steps = iter(["draining: 1 replica to move: qwen#0", "drained: nothing of llmgw serves here"])
    admin.routes[("POST", "/api/v1/nodes/node-b/drain")] = {"words": "draining: 1 replica to move: qwen#0"}
    admin.routes[("GET", "/api/v1/nodes/node-b")] = lambda _, __: (200, {"drain_words": next(steps)})
    result = ctl("drain", "--wait", "node-b")
    assert result.stdout.splitlines()[-1] == "node-b: drained: nothing of llmgw serves here"
    assert result.stderr == "node-b: draining: 1 replica to move: qwen#0\n"


def test_a_draining_nodes_words_stand_in_the_listing(ctl: Ctl, admin: AdminServer) -> None:
    nodes = [dict(item) for item in admin.routes[("GET", "/api/v1/nodes")]["nodes"]]
    nodes[1] |= {"draining": True, "drain_words": "draining: 2 replicas to move: a#0, b#0"}
    admin.routes[("GET", "/api/v1/nodes")] = {"nodes": nodes}
    lines = [line for line in ctl("nodes").output.splitlines() if "node-b" in line]
    assert "draining: 2 replicas to move: a#0, b#0" in "\n".join(lines)
    assert "connected, draining" in lines[0]


def test_scale_sends_a_number_and_says_how_the_profile_stands(ctl: Ctl, admin: AdminServer) -> None:
    asked: list[Any] = []

    def scale(_: str, body: Any) -> tuple[int, Any]:
        asked.append(body)
        return 200, {"replicas_ready": 1, "replicas_wanted": 3, "words": "1 of 3 replicas ready"}

    admin.routes[("POST", "/api/v1/profiles/qwen/scale")] = scale
    assert ctl("scale", "qwen", "3").output == "qwen: 1 of 3 ready; 1 of 3 replicas ready\n"
    assert asked == [{"replicas": 3}]
    assert ctl("scale", "qwen", "many").exit_code == 2


EVENT = {"seq": 7, "at": NOW - 60, "kind": "replica", "subject": "qwen#0", "words": "goes to node b\x1b[0m"}


def test_events_are_a_table_and_json(ctl: Ctl, admin: AdminServer) -> None:
    admin.routes[("GET", "/api/v1/events")] = {"events": [EVENT]}
    lines = ctl("events", "-n", "5").output.splitlines()
    assert lines[0].split() == ["AGE", "KIND", "ABOUT", "WORDS"]
    assert lines[1].split() == ["1m", "replica", "qwen#0", "goes", "to", "node", "b\\x1b[0m"]
    assert admin.asked[-1][1] == "/api/v1/events?limit=5"
    assert '"seq": 7' in ctl("events", "-o", "json").output
    admin.routes[("GET", "/api/v1/events")] = {"events": []}
    assert ctl("events").output == "nothing has happened yet\n"


def test_followed_events_come_one_a_line_and_a_server_that_is_away_is_waited_for(
    ctl: Ctl, admin: AdminServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_PAUSE_S", 0.01)
    answers: list[tuple[int, Any]] = [
        (200, {"events": [EVENT]}),
        (500, {"error": {"message": "the server failed"}}),
        (500, {"error": {"message": "the server failed"}}),
        (200, {"events": [EVENT | {"seq": 9, "subject": "", "kind": "server", "words": "started"}]}),
    ]

    real = events_module._line
    seen: list[str] = []

    def line(item: dict[str, Any]) -> str:
        seen.append(str(item["seq"]))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(item)

    monkeypatch.setattr(events_module, "_line", line)
    admin.routes[("GET", "/api/v1/events")] = lambda _, __: answers.pop(0)
    result = ctl("events", "-f")
    assert result.exit_code == 0
    assert result.stdout.endswith(" replica qwen#0: goes to node b\\x1b[0m\n")
    assert result.stderr == "error: the server failed\n"
    assert seen == ["7", "9"]
    assert [target for _, target, _ in admin.asked][1:] == ["/api/v1/events?after=7&wait=10"] * 3


def test_nodes_are_forgotten_by_name_with_the_servers_words(ctl: Ctl, admin: AdminServer) -> None:
    for name in ("a", "b"):
        admin.routes[("DELETE", f"/api/v1/nodes/{name}")] = {"words": "is forgotten"}
    assert ctl("forget", "a", "b").output == "a: is forgotten\nb: is forgotten\n"
