"""The admin API over its real unix socket and uvicorn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen
from domain_views import engine, node, status
from server_fakes import FakeAgent, Plane, eventually, new_control, request

from llmgw.config import profile_from_json
from llmgw.domain.engines import EngineState, Progress
from llmgw.domain.replicas import ReplicaState
from llmgw.domain.report import NodeReport
from llmgw.server.admin import Parts
from llmgw.server.auth import BODY_LIMIT, AdminToken, Gate, Sessions
from llmgw.server.web import Web, make_app

TOKEN = "correct horse battery staple"
HOSTILE = "wörds, “letter for letter” <img src=x onerror=alert(1)> `ticks` \u202e\x1b[31m"


def report(**more: object) -> NodeReport:
    made = node(**more).report  # type: ignore[arg-type]
    assert made is not None
    return made


@frozen
class Api:
    """A running admin socket."""

    plane: Plane
    socket: Path

    def __call__(self, method: str, target: str, body: object = None, status: int = 200):  # type: ignore[no-untyped-def]
        answer = request(self.socket, method, f"/api/v1{target}", token=TOKEN, body=body)
        assert answer.status == status, answer.text
        return answer.json()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    plane = Plane(tmp_path)
    control = new_control(tmp_path)
    control.start()
    gate = Gate(AdminToken(TOKEN), Sessions(plane.clock), hosts=(), open_page=True, secure=False)
    parts = Parts(plane.state, plane.fleet, plane.deploy, control, plane.clock, 5.0)
    web = Web(tmp_path / "admin.sock", lambda stopping: make_app(parts, gate, stopping))
    web.start()
    plane.deploy.start()
    yield Api(plane, tmp_path / "admin.sock")
    web.stop()
    control.stop()
    plane.close()


def test_status_names_server_epoch_nodes_and_gateways(api: Api) -> None:
    told = api("GET", "/status")
    assert (told["server_id"], told["epoch"], told["started"]) == (api.plane.state.server_id, 1, 5.0)
    assert (told["nodes"], told["gateways"]) == ({}, [])


def test_a_nodes_words_arrive_letter_for_letter(api: Api) -> None:
    api.plane.join("n1")
    sick = engine(EngineState.FAILED, HOSTILE, next_try=7.0, progress=Progress(1, 2))
    api.plane.fleet.reported("n1", report(engines=(sick,)))
    told = api("GET", "/nodes")["nodes"][0]
    assert told == api("GET", "/nodes/n1")
    assert (told["presence"], told["words"], told["version"]) == ("connected", "connected", "0.1.0")
    assert told["engines"][0]["words"] == HOSTILE
    assert told["engines"][0]["progress"] == {"done_bytes": 1, "total_bytes": 2}
    api("PUT", "/profiles/qwen", {"model": "/m.gguf"})
    assert api("GET", "/engines")["engines"] == [{"node_id": "n1", "presence": "connected", **told["engines"][0]}]
    assert api("GET", "/engines")["wanted"][0]["version"] == "b1"
    explained = api("GET", "/explain/qwen")
    assert explained["lines"] == ["no node can run `qwen`: its only node refuses", f"n1: {HOSTILE}"]
    assert explained["refusal"]["nodes"] == [{"node_id": "n1", "code": "engine-failed", "words": HOSTILE}]
    assert api("GET", "/profiles")["profiles"][0]["refusal"] == explained["refusal"]


def test_a_profile_is_applied_seen_at_once_and_deleted(api: Api) -> None:
    body = {"model": "/m.gguf", "slots": 2, "aliases": ["q"], "memory": "2GiB"}
    first = api("PUT", "/profiles/org%2Fqwen", body)
    assert first["changed"] is True
    assert first["profile"]["name"] == "org/qwen"
    assert api("PUT", "/profiles/org%2Fqwen", body)["changed"] is False
    told = api("GET", "/profiles")["profiles"]
    assert [(item["profile"]["name"], item["state"]) for item in told] == [("org/qwen", "refused")]
    assert (told[0]["replicas_ready"], told[0]["replicas_wanted"]) == (0, 1)
    assert profile_from_json(told[0]["profile"]).memory_bytes == 2 << 30
    assert api("GET", "/explain/q")["profile"] == "org/qwen"
    pending = api("GET", "/replicas")["replicas"]
    assert [(item["replica_id"], item["state"], item["node_id"]) for item in pending] == [
        ("org/qwen#0", "pending", None)
    ]
    assert "no node has ever connected" in pending[0]["words"]
    assert api("DELETE", "/profiles/org%2Fqwen") == {"deleted": "org/qwen"}
    assert api("GET", "/profiles") == {"profiles": []}


def test_a_bad_profile_is_refused_with_every_problem(api: Api) -> None:
    error = api("PUT", "/profiles/qwen", {"slots": 0, "contxt": 5, "name": "other"}, status=400)["error"]
    assert error["code"] == "config-invalid"
    said = "\n".join(error["problems"])
    assert all(word in said for word in ("model", "slots", "contxt", "name"))
    assert api("GET", "/profiles") == {"profiles": []}


def test_replicas_are_listed_with_their_nodes_words_and_leftovers_too(api: Api) -> None:
    api.plane.join("n1")
    api.plane.fleet.reported("n1", report())
    api("PUT", "/profiles/qwen", {"model": "/m.gguf"})
    told = api("GET", "/replicas")["replicas"]
    assert [(item["node_id"], item["replica_id"], item["state"]) for item in told] == [("n1", "qwen#0", "pending")]
    replicas = (
        status("qwen#0", 1, ReplicaState.FAILED, HOSTILE, last_log=("last words",)),
        status("old#0", 9, ReplicaState.DRAINING, "draining: 2 answers"),
    )
    api.plane.fleet.reported("n1", report(replicas=replicas))
    api.plane.deploy.settle()
    told = api("GET", "/replicas")["replicas"]
    assert [(item["replica_id"], item["state"], item["words"]) for item in told] == [
        ("qwen#0", "failed", HOSTILE),
        ("old#0", "draining", "draining: 2 answers"),
    ]
    assert told[0]["last_log"] == ["last words"]
    assert api("GET", "/explain/qwen")["words"] == f"replica qwen#0 on node n1: {HOSTILE}"


def test_no_answer_holds_a_replicas_key(api: Api) -> None:
    api.plane.join("n1")
    api.plane.fleet.reported("n1", report())
    api("PUT", "/profiles/qwen", {"model": "/m.gguf"})
    secret = eventually(api.plane.state.assignments, "the assignment")[0].spec.api_key
    for target in ("/nodes", "/profiles", "/replicas", "/explain/qwen", "/status", "/engines"):
        assert secret not in json.dumps(api("GET", target))


def test_logs_come_from_the_node_that_has_the_replica(api: Api) -> None:
    agent = api.plane.join("n1", FakeAgent({"logs": {"lines": ["one", HOSTILE]}}))
    api.plane.fleet.reported("n1", report())
    api("PUT", "/profiles/qwen", {"model": "/m.gguf"})
    assert api("GET", "/replicas/qwen%230/logs?lines=2")["lines"] == ["one", HOSTILE]
    assert agent.asked == [("logs", {"replica_id": "qwen#0", "lines": "2"})]
    assert api("GET", "/replicas/qwen%231/logs", status=404)["error"]["code"] == "not-found"
    profile = api("GET", "/replicas/qwen/logs", status=404)["error"]
    assert (profile["message"], profile["hint"]) == (
        "`qwen` is a profile, a log is a replica's",
        "it has `qwen#0`",
    )
    assert api("GET", "/replicas/qwen%230/logs?lines=x", status=400)["error"]["code"] == "usage"
    api.plane.fleet.left("n1", "i1", "gone")
    error = api("GET", "/replicas/qwen%230/logs", status=503)["error"]
    assert (error["code"], error["cause"]) == ("node-away", "it is not connected")


def test_a_key_is_shown_once_and_kept_as_its_hash(api: Api) -> None:
    made = api("POST", "/keys", {"name": "ann", "models": ["qwen"]}, status=201)
    assert made["key"].startswith("sk-llmgw-")
    assert made["warning"].startswith("clients without any key are served too: `gateway.keys_required: true`")
    listed = api("GET", "/keys")["keys"]
    assert [(item["name"], item["models"]) for item in listed] == [("ann", ["qwen"])]
    assert made["key"] not in json.dumps(listed)
    assert [key.name for key in api.plane.tables[-1].keys] == ["ann"]
    assert made["key"].encode() not in Path(api.socket.parent / "state.db-wal").read_bytes()
    assert api("POST", "/keys", {"name": "ann"}, status=409)["error"]["code"] == "name-taken"
    problems = api("POST", "/keys", {"name": "a b", "models": "all", "x": 1}, status=400)["error"]["problems"]
    assert len(problems) == 3
    assert api("DELETE", "/keys/ann") == {"deleted": "ann"}
    assert api.plane.tables[-1].keys == ()
    api("DELETE", "/keys/ann", status=404)


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "code"),
    [
        ("GET", "/nope", None, 404, "not-found"),
        ("GET", "/nodes/nobody", None, 404, "not-found"),
        ("GET", "/explain/nothing", None, 404, "not-found"),
        ("DELETE", "/profiles/nothing", None, 404, "not-found"),
        ("PATCH", "/profiles/qwen", None, 405, "method-not-allowed"),
        ("PUT", "/profiles/a..b", {"model": "m"}, 400, "name-invalid"),
        ("PUT", "/profiles/qwen", b"{", 400, "usage"),
        ("PUT", "/profiles/qwen", b"[" * 100_000, 400, "usage"),
        ("PUT", "/profiles/qwen", b"\xff\xfe", 400, "usage"),
        ("PUT", "/profiles/qwen", [], 400, "config-invalid"),
    ],
)
def test_errors_have_one_shape(api: Api, method: str, target: str, body: object, status: int, code: str) -> None:
    error = api(method, target, body, status=status)["error"]
    assert error["code"] == code
    assert {"code", "message", "cause", "hint"} <= error.keys()


def test_a_body_over_the_limit_is_refused_whether_its_length_is_told_or_not(api: Api) -> None:
    big = b" " * (BODY_LIMIT + 1)
    assert api("PUT", "/profiles/qwen", big, status=413)["error"]["code"] == "body-too-large"
    chunked = request(
        api.socket,
        "PUT",
        "/api/v1/profiles/qwen",
        token=TOKEN,
        headers={"Transfer-Encoding": "chunked"},
        body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(big), big),
    )
    assert chunked.status == 413


def test_a_fault_inside_is_logged_and_not_told(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> object:
        raise RuntimeError("secret inner detail")

    monkeypatch.setattr(api.plane.fleet, "views", fail)
    answer = request(api.socket, "GET", "/api/v1/nodes", token=TOKEN)
    assert answer.status == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "secret inner detail" not in answer.text
    assert "secret inner detail" in caplog.text


def test_the_socket_is_for_its_owner_only(api: Api) -> None:
    assert api.socket.stat().st_mode & 0o777 == 0o600


def test_words_of_a_lost_node_say_that_they_are_old(api: Api) -> None:
    api.plane.join("n1")
    api.plane.fleet.reported("n1", report())
    api("PUT", "/profiles/qwen", {"model": "/m.gguf"})
    api.plane.fleet.reported("n1", report(replicas=(status("qwen#0", 1, ReplicaState.READY),)))
    for _ in range(10):  # in one step it would be the server that stood still
        api.plane.clock.pass_time(2)
        api.plane.deploy.settle()
    told = api("GET", "/replicas")["replicas"][0]
    assert (told["presence"], told["state"]) == ("lost", "ready")
    assert told["words"] == "lost: no report for 20 s (3 beats of 5 s); it said last: ready"


def test_a_node_is_drained_and_takes_replicas_again_and_says_how_far_it_is(api: Api) -> None:
    api.plane.join("n1")
    api.plane.fleet.reported("n1", report())
    api("PUT", "/profiles/qwen", {"model": "/m.gguf"})
    api.plane.fleet.reported("n1", report(replicas=(status("qwen#0", 1, ReplicaState.READY),)))
    words = (
        "draining: 1 replica to move: qwen#0; replica qwen#0 stays on draining node n1: no other node takes it "
        "(see `llmgw ctl explain qwen`)"
    )
    assert api("POST", "/nodes/n1/drain", {}) == {"node_id": "n1", "draining": True, "words": words}
    told = api("GET", "/nodes/n1")
    assert (told["draining"], told["drain_words"]) == (True, words)
    assert api("GET", "/nodes")["nodes"][0]["drain_words"] == words
    assert api("GET", "/profiles/qwen")["note"] == "replica qwen#0 stays on draining node n1: no other node takes it"
    for _ in range(2):
        assert api("POST", "/nodes/n1/undrain", {})["draining"] is False
    said = [item["words"] for item in api("GET", "/events")["events"] if item["subject"] == "n1"]
    assert said.count("takes replicas again") == 1
    assert api("GET", "/nodes/n1")["drain_words"] == ""
    assert api("POST", "/nodes/nobody/drain", {}, status=404)["error"]["code"] == "not-found"


def test_a_profile_is_scaled_by_number_only(api: Api) -> None:
    api("PUT", "/profiles/org/qwen", {"model": "/m.gguf"})
    told = api("POST", "/profiles/org/qwen/scale", {"replicas": 3})
    assert (told["replicas_wanted"], told["profile"]["replicas"]) == (3, 3)
    for wrong in ({}, {"replicas": "3"}, {"replicas": -1}, {"replicas": True}, [], {"replicas": 10**6}):
        assert api("POST", "/profiles/org/qwen/scale", wrong, status=400)["error"]["message"].startswith("`replicas`")
    assert api("POST", "/profiles/none/scale", {"replicas": 1}, status=404)["error"]["code"] == "not-found"
    assert api("GET", "/profiles/org/qwen")["replicas_wanted"] == 3


def test_events_are_listed_and_waited_for(api: Api) -> None:
    api.plane.join("n1")
    api("PUT", "/profiles/qwen", {"model": "/m.gguf"})
    found = api("GET", "/events")["events"]
    assert [(item["kind"], item["subject"]) for item in found][:2] == [("node", "n1"), ("profile", "qwen")]
    last = found[-1]["seq"]
    assert api("GET", f"/events?after={last}")["events"] == []
    assert len(api("GET", "/events?limit=1")["events"]) == 1
    api.plane.events.record("server", "", HOSTILE)
    waited = api("GET", f"/events?after={last}&wait=20")["events"]
    assert [item["words"] for item in waited] == [HOSTILE]
    for wrong in ("after=x", "after=-1", "wait=21", "limit=0", "after=" + "9" * 30):
        api("GET", f"/events?{wrong}", status=400)


def test_a_node_that_is_gone_for_good_is_forgotten_and_one_that_is_needed_is_not(api: Api) -> None:
    api.plane.join("n1")
    api.plane.fleet.reported("n1", report())
    api("PUT", "/profiles/qwen", {"model": "/m.gguf"})
    eventually(api.plane.state.assignments, "the assignment")
    error = api("DELETE", "/nodes/n1", status=400)["error"]
    assert (error["message"], error["cause"]) == ("node `n1` is not forgotten", "it is still to serve qwen#0")
    api("DELETE", "/profiles/qwen")
    eventually(lambda: not api.plane.state.assignments(), "the end of the assignment")
    api.plane.deploy.settle()
    error = api("DELETE", "/nodes/n1", status=400)["error"]
    assert (error["cause"], error["hint"]) == (
        "it is connected",
        "stop its agent first, as `llmgw ctl offboard n1` does",
    )
    api.plane.fleet.left("n1", "i1", "gone")
    assert api("DELETE", "/nodes/n1")["words"].startswith("is forgotten")
    assert api("GET", "/nodes")["nodes"] == []
    assert api.plane.state.nodes() == ()
    assert api("DELETE", "/nodes/n1", status=404)["error"]["code"] == "not-found"
    api.plane.join("n1")
    assert [item["node_id"] for item in api("GET", "/nodes")["nodes"]] == ["n1"]
    assert api.plane.state.nodes() == ("n1",)
