"""The page shows what nodes say and runs none of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from domain_views import GIB, QWEN, facts, gpu, node, status
from server_fakes import Plane, new_control, request, stream

from llmgw.domain.engines import EngineState, EngineStatus, Progress
from llmgw.domain.facts import CpuFacts, Finding, NodeWarning, OsFacts, Truth
from llmgw.domain.replicas import ReplicaState
from llmgw.server.admin import Parts
from llmgw.server.auth import AdminToken, Gate, Sessions
from llmgw.server.page.view import build, cells, shape
from llmgw.server.web import Web, make_app

EVIL = "<img src=x onerror=alert(1)>\"'<script>alert(2)</script>{{ 7*7 }}"


class Tags(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    yield made
    made.close()


@pytest.fixture
def socket_path(plane: Plane, tmp_path: Path) -> Iterator[Path]:
    control = new_control(tmp_path)
    control.start()
    gate = Gate(AdminToken("x" * 16), Sessions(plane.clock), hosts=(), open_page=True, secure=False)
    parts = Parts(plane.state, plane.fleet, plane.deploy, control, plane.clock, 5.0)
    web = Web(tmp_path / "admin.sock", lambda stopping: make_app(parts, gate, stopping))
    web.start()
    yield tmp_path / "admin.sock"
    web.stop()
    control.stop()


def speak(plane: Plane, say: str) -> None:
    """A node that puts `say` into every text it can put on the page."""
    told = evolve(
        facts(labels={"rack": say}, gpus=(evolve(gpu("u1"), name=say),)),
        cpu=CpuFacts("x86_64", 4, say),
        os=OsFacts("debian", name=say),
    )
    told = evolve(told, nvidia=evolve(told.nvidia, driver=Finding(Truth.NO, say)))
    engine = EngineStatus("llama.cpp", say, say, EngineState.FAILED, say, 1.0, Progress(1, 2), passed_over=say)
    failed = evolve(status("qwen#0", 1, ReplicaState.FAILED, say), last_log=(say, say))
    made = node(engines=(engine,), replicas=(failed,), gpu_free={"u1": GIB}).report
    assert made is not None
    plane.fleet.reported("n1", evolve(made, facts=told, warnings=(NodeWarning("w", say, 1.0),)))


def test_hostile_words_in_every_field_are_text_and_nothing_else(plane: Plane, socket_path: Path) -> None:
    plane.join("n1")
    report = node().report
    assert report is not None
    plane.fleet.reported("n1", report)
    plane.deploy.apply(evolve(QWEN, model=EVIL))
    plane.deploy.pass_once()
    plane.fleet.left("n1", "i1", EVIL)
    plane.join("n1", version=EVIL)
    speak(plane, EVIL)
    plane.deploy.pass_once()
    html = request(socket_path, "GET", "/").text
    page = Tags(html)
    assert page.text.count(EVIL) >= 12
    assert "<img" not in html
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert scripts == [{"src": "/page/page.js", "defer": None}]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert not any(attrs.get("style") for _, attrs in page.tags)


def test_the_page_shows_words_progress_warnings_and_refusals_unchanged(plane: Plane, socket_path: Path) -> None:
    plane.join("n1")
    plane.deploy.apply(QWEN)
    words = "installing: fetching llama-b1.tar.gz, 5 MB of 30 MB"
    engine = EngineStatus("llama.cpp", "b1", "cpu", EngineState.INSTALLING, words, 1.0, Progress(5, 30))
    made = node(engines=(engine,)).report
    assert made is not None
    plane.fleet.reported("n1", evolve(made, warnings=(NodeWarning("no-avx2", "the CPU has no AVX2", 1.0),)))
    plane.deploy.pass_once()
    page = Tags(request(socket_path, "GET", "/").text)
    for line in (words, "the CPU has no AVX2", f"n1: {words}", "no node can run `qwen`: its only node refuses"):
        assert line in page.text
    bars = {str(a["data-k"]): a for tag, a in page.tags if tag == "progress"}
    assert bars["node/n1/engine/0/bar"]["value"] == str(5 / 30)
    states = {str(a.get("data-k")): a.get("data-state") for tag, a in page.tags if tag == "span"}
    assert states["node/n1/presence"] == "connected"
    assert states["node/n1/engine/0/state"] == "installing"
    assert states["model/qwen/state"] == "refused"


def test_an_empty_cluster_says_what_to_do(plane: Plane, socket_path: Path) -> None:
    plane.deploy.pass_once()
    text = Tags(request(socket_path, "GET", "/").text).text
    assert "No node has ever connected. Start llmgw agent" in text
    assert "llmgw ctl apply -f" in text


def test_a_node_that_has_not_probed_is_not_shown_as_empty(plane: Plane, socket_path: Path) -> None:
    plane.join("n1")
    made = node(probed=False, engines=()).report
    assert made is not None
    plane.fleet.reported("n1", made)
    plane.deploy.pass_once()
    text = Tags(request(socket_path, "GET", "/").text).text
    assert "connected, has not finished probing" in text
    assert "hardware not known yet" in text


def test_every_cell_has_a_place_of_its_own_and_the_shape_follows_them(plane: Plane) -> None:
    plane.join("n1")
    plane.deploy.apply(QWEN)
    speak(plane, "a")
    tree = build(plane.deploy.pass_once(), ())
    keys = [cell.key for cell in cells(tree)]
    assert len(keys) == len(set(keys))
    speak(plane, "b")
    assert shape(build(plane.deploy.pass_once(), ())) == shape(tree)
    plane.join("n2")
    assert shape(build(plane.deploy.pass_once(), ())) != shape(tree)


def events(answer: Any) -> Iterator[dict[str, Any]]:
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_the_stream_sends_everything_first_and_then_only_what_changed(plane: Plane, socket_path: Path) -> None:
    plane.join("n1")
    speak(plane, "first words")
    plane.deploy.pass_once()
    connection, answer = stream(socket_path, "/page/live")
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = events(answer)
    first = next(told)
    page = Tags(request(socket_path, "GET", "/").text)
    body = next(attrs for tag, attrs in page.tags if tag == "body")
    assert first["shape"] == body["data-shape"]
    assert {cell[0] for cell in first["cells"]} == {attrs["data-k"] for _, attrs in page.tags if "data-k" in attrs}
    report = node().report
    assert report is not None
    speak(plane, EVIL)
    plane.deploy.pass_once()
    second = next(told)
    changed = {cell[0]: cell[1] for cell in second["cells"]}
    assert changed["node/n1/engine/0/words"] == EVIL
    assert "node/n1/name" not in changed
    answer.close()
    connection.close()
