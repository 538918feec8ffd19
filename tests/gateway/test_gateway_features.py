"""Usage, limits, fairness, affinity, caps, the access log, CORS."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import attrs
from gateway_fakes import Gateway, ask, model, post, read_all, read_until, replica, wait_for

from llmgw.domain.routing import Caps, RouteKey

SLOW = ("--token-interval", "0.03", "--tokens", "1000")


def key(name: str, **more: object) -> RouteKey:
    return RouteKey(name, hashlib.sha256(name.encode()).hexdigest(), **more)  # type: ignore[arg-type]


def as_key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}", "Content-Type": "application/json"}


def test_usage_is_told_per_key_and_model_and_an_aborted_answer_is_partial(start: Callable[..., Gateway]) -> None:
    made = start()
    engine = made.engine("--token-interval", "0.01")
    made.routes(model(replica(engine)), keys=(key("ann"), key("bob")), required=True)
    for stream in (False, True):
        assert made.fetch("POST", "/v1/chat/completions", ask(stream=stream, max_tokens=5), as_key("ann"))[0] == 200
    with made.connect() as sock:
        sock.sendall(post("/v1/chat/completions", ask(stream=True, max_tokens=1000), "Authorization: Bearer bob"))
        read_until(sock, b"t3")
    wait_for(lambda: made.control.usage("requests") == 3, "three requests in the usage")
    assert made.control.usage("completion", key="ann", model="m") == 10
    assert made.control.usage("prompt", key="ann") == 2
    assert made.control.usage("completion", key="bob") == 0
    assert made.control.usage("partial_requests", key="bob") == 1
    assert 3 <= made.control.usage("partial_completion", key="bob") < 1000


def test_a_client_that_did_not_ask_gets_no_usage_event_and_one_that_did_gets_it(plane: Gateway) -> None:
    plane.routes(model(replica(plane.engine())))
    assert b'"usage"' not in plane.chat(stream=True)[2]
    assert plane.chat(stream=True)[2].endswith(b"data: [DONE]\n\n")
    assert b'"usage"' in plane.chat(stream=True, stream_options={"include_usage": True})[2]


def test_requests_and_tokens_a_minute_are_limited_per_key(plane: Gateway) -> None:
    keys = (key("few", rpm=2), key("short", tpm=10), key("free"))
    plane.routes(model(replica(plane.engine())), keys=keys, required=True)

    def ask_as(name: str) -> tuple[int, dict[str, str], bytes]:
        return plane.fetch("POST", "/v1/chat/completions", ask(max_tokens=20), as_key(name))

    assert [ask_as("few")[0] for _ in range(3)] == [200, 200, 429]
    _, headers, body = ask_as("few")
    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert [ask_as("short")[0] for _ in range(2)] == [200, 429]
    assert [ask_as("free")[0] for _ in range(4)] == [200] * 4


def test_a_key_whose_time_is_over_is_refused(plane: Gateway) -> None:
    plane.routes(model(replica(plane.engine())), keys=(key("old", expires=1.0),), required=True)
    status, _, body = plane.fetch("POST", "/v1/chat/completions", ask(), as_key("old"))
    assert (status, json.loads(body)["error"]["code"]) == (401, "expired_api_key")


def test_a_key_that_floods_does_not_keep_another_waiting(start: Callable[..., Gateway]) -> None:
    made = start("--queue", "10")
    made.routes(
        model(replica(made.engine("--token-interval", "0.02", slots=1))),
        keys=(key("flood"), key("calm")),
        required=True,
    )
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(10):
            sock = stack.enter_context(made.connect())
            sock.sendall(
                post("/v1/chat/completions", ask(max_tokens=5), "Authorization: Bearer flood", "Connection: close")
            )
            socks.append(sock)
        wait_for(lambda: made.metric('llmgw_queued{model="m"}') == 9, "the flood to wait")
        # nine wait; the calm one is next but one, whatever the flood has waiting
        assert made.fetch("POST", "/v1/chat/completions", ask(max_tokens=5), as_key("calm"))[0] == 200
        assert made.metric('llmgw_queued{model="m"}') >= 6
        for sock in socks:
            read_all(sock)


def test_a_full_queue_makes_room_for_the_key_that_has_least(start: Callable[..., Gateway]) -> None:
    made = start("--queue", "3")
    made.routes(model(replica(made.engine(*SLOW, slots=1))), keys=(key("flood"), key("calm")), required=True)
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(4):
            sock = stack.enter_context(made.connect())
            sock.sendall(post("/v1/chat/completions", ask(), "Authorization: Bearer flood", "Connection: close"))
            socks.append(sock)
        wait_for(lambda: made.metric('llmgw_queued{model="m"}') == 3, "the flood to wait")
        calm = stack.enter_context(made.connect())
        calm.sendall(post("/v1/chat/completions", ask(), "Authorization: Bearer calm"))
        wait_for(lambda: made.metric('llmgw_requests_total{model="m",code="429"}') == 1, "one of the flood to go")


def test_a_conversation_stays_with_its_replica(plane: Gateway) -> None:
    engines = [plane.engine() for _ in range(3)]
    plane.routes(model(*(replica(engine, f"m#{i}") for i, engine in enumerate(engines))))
    seen = set()
    for topic in ("tea", "rain", "clocks", "boats", "moss", "salt", "wool", "ink"):
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": topic}]
        homes = set()
        for _ in range(3):
            _, headers, _ = plane.chat(messages=messages)
            assert headers["x-llmgw-why"] == "affinity"
            homes.add(headers["x-llmgw-replica"])
            messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
        assert len(homes) == 1
        seen |= homes
    assert len(seen) > 1


def test_a_profiles_caps_and_defaults_reach_the_engine(plane: Gateway) -> None:
    engine = plane.engine()
    plane.routes(attrs.evolve(model(replica(engine)), caps=Caps(10, 4, 0.5, 0.1, 1.0)))

    def sent(**more: object) -> tuple[object, object]:
        assert plane.chat(**more)[0] == 200
        body = engine.stats()["last"]["body"]
        return body.get("max_tokens"), body.get("temperature")

    assert sent() == (4, 0.5)
    assert sent(max_tokens=7, temperature=0.2) == (7, 0.2)
    assert sent(max_tokens=99, temperature=5) == (10, 1.0)
    assert sent(max_tokens=-1, temperature=0) == (10, 0.1)


def test_the_access_log_has_a_line_per_request_and_no_words_of_it(
    start: Callable[..., Gateway], tmp_path: Path
) -> None:
    log = tmp_path / "access.log"
    made = start("--access-log", str(log))
    made.routes(model(replica(made.engine())), keys=(key("ann"),), required=True)
    _, headers, _ = made.fetch(
        "POST", "/v1/chat/completions", ask(max_tokens=3, stream=True), {**as_key("ann"), "X-Request-Id": "mine-1"}
    )
    assert headers["x-request-id"] == "mine-1"
    line = json.loads(wait_for(lambda: log.exists() and log.read_text(), "a line"))
    assert (line["id"], line["key"], line["model"], line["status"]) == ("mine-1", "ann", "m", 200)
    assert (line["replica"], line["node"], line["why"], line["retries"]) == ("m#0", "node-a", "only", 0)
    assert (line["prompt"], line["completion"], line["partial"]) == (1, 3, False)
    assert "hello" not in log.read_text()
    assert "t0" not in log.read_text()


def test_the_access_log_and_who_looks_see_what_was_refused_and_why(
    start: Callable[..., Gateway], tmp_path: Path
) -> None:
    log = tmp_path / "access.log"
    made = start("--access-log", str(log), "--access-log-sample", "0", "--max-body", "1000")
    made.routes(model(replica(made.engine())), keys=(key("ann", models=("x",)), key("bob")), required=True)
    made.control.send({"type": "watch", "on": True})
    asked: list[tuple[str, str, object, str, str | None]] = [
        ("/v1/chat/completions", "nobody", ask(), "invalid_api_key", None),
        ("/v1/chat/completions", "bob", ask("none"), "model_not_found", "bob"),
        ("/v1/chat/completions", "ann", ask(), "model_not_allowed", "ann"),
        ("/v1/chat/completions", "bob", "{", "invalid_json", "bob"),
        ("/v1/chat/completions", "bob", "x" * 1001, "request_too_large", None),
        ("/v1/nothing", "bob", "{}", "unknown_path", None),
        ("/chat/completions", "bob", "{}", "unknown_path", None),
    ]
    for number, (path, name, body, _, _) in enumerate(asked):
        assert made.fetch("POST", path, body, {**as_key(name), "X-Request-Id": f"r{number}"})[0] >= 400
    with made.connect() as sock:
        sock.sendall(
            post("/v1/chat/completions", b"{", "Authorization: Bearer bob")
            + post("/v1/chat/completions", ask(), "Authorization: Bearer nobody", "Connection: close")
        )
        read_all(sock)
    expected = [("bob", "invalid_json"), (None, "invalid_api_key")]
    lines = wait_for(lambda: log.exists() and (x := log.read_text().splitlines())[len(asked) + 1 :] and x, "the lines")
    said = [json.loads(line) for line in lines]
    assert [(x["id"], x["path"], x["key"], x["code"]) for x in said[: len(asked)]] == [
        (f"r{number}", path, name, code) for number, (path, _, _, code, name) in enumerate(asked)
    ]
    assert [(x["key"], x["code"]) for x in said[len(asked) :]] == expected
    assert {x["peer"] for x in said} == {"127.0.0.1"}
    ended = wait_for(lambda: [x for m in made.control.watched for x in m["ended"]][len(asked) + 1 :], "the live lines")
    assert ended[-1]["code"] == "invalid_api_key"


def test_who_looks_sees_open_and_ended_requests(plane: Gateway) -> None:
    plane.routes(model(replica(plane.engine(*SLOW))))
    plane.control.send({"type": "watch", "on": True})
    with plane.open_chat(stream=True) as sock:
        read_until(sock, b"t0")
        seen = wait_for(lambda: [x for said in plane.control.watched for x in said["open"]], "an open request")
    assert (seen[0]["model"], seen[0]["replica"]) == ("m", "m#0")
    ended = wait_for(lambda: [x for said in plane.control.watched for x in said["ended"]], "an ended request")
    assert ended[0]["partial"] is True
    plane.control.send({"type": "watch", "on": False})


def test_pages_of_the_configured_origin_may_ask(start: Callable[..., Gateway]) -> None:
    made = start("--cors-origins", "https://chat.example.org")
    made.routes(model(replica(made.engine())), keys=(key("ann"),), required=True)
    status, headers, _ = made.fetch("OPTIONS", "/v1/chat/completions", headers={"Origin": "https://chat.example.org"})
    assert status == 204
    assert "authorization" in headers["access-control-allow-headers"]
    assert headers["access-control-allow-origin"] == "https://chat.example.org"
    status, headers, _ = made.fetch("POST", "/v1/chat/completions", ask(), as_key("ann"))
    assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example.org")
    assert headers["access-control-expose-headers"] == "*"


def test_a_page_may_send_the_headers_of_its_client_library(start: Callable[..., Gateway]) -> None:
    made = start("--cors-origins", "*")

    def allowed(asked: str) -> str:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Headers": asked}
        return made.fetch("OPTIONS", "/v1/messages", headers=headers)[1]["access-control-allow-headers"]

    asked = "authorization,content-type,x-stainless-lang,anthropic-dangerous-direct-browser-access"
    assert allowed(asked) == asked
    for strange in ("a b", "x\xff", ",", ",".join(["x"] * 100)):
        assert allowed(strange) == allowed("")
