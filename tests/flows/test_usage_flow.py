"""Keys, usage and live requests of a whole cluster, as an operator uses them."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flows_cluster import MODULE, Cluster, sweep, wait

pytestmark = [pytest.mark.flow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, release_dir: Path, tiny_gguf: Path) -> Iterator[Cluster]:
    """Two models, `tiny` (also called `small`) and `slow` with one slot; clients need keys."""
    made = Cluster(tmp_path_factory.mktemp("usage") / "cluster", MODULE)
    try:
        engines = {"llama.cpp": "b1"}
        made.start_server(engines=engines, sources=[f"file://{release_dir}"], gateway={"keys_required": True})
        made.start_agent(model_dirs=[str(tiny_gguf.parent)])
        made.apply(name="tiny", model="tiny.gguf", context=512, slots=2, aliases=["small"])
        made.apply(name="slow", model="slow.gguf", context=8192, slots=1)
        for name in ("tiny", "slow"):
            ready = lambda name=name: any(r["state"] == "ready" for r in made.replicas(name))  # noqa: E731
            wait(ready, 60, f"{name} to be ready", made.logs)
        yield made
    finally:
        made.close()
        sweep(made.root)


def create(cluster: Cluster, name: str, *options: str) -> str:
    """A key that the gateway knows already."""
    key = cluster.ctl("keys", "create", name, *options).stdout
    assert key.startswith("sk-llmgw-")
    assert key.count("\n") == 1
    key = key.strip()
    wait(lambda: get(cluster, key, "/v1/models")[0] == 200, 10, f"the key of {name} to be known", cluster.logs)
    return key


def get(cluster: Cluster, key: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection("127.0.0.1", cluster.http_port, timeout=60)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, json.loads(answer.read())


def chat(cluster: Cluster, key: str, model: str = "tiny", tokens: int = 5) -> tuple[int, dict[str, str], Any]:
    body = {"model": model, "max_tokens": tokens, "messages": [{"role": "user", "content": "hello"}]}
    return get(cluster, key, "/v1/chat/completions", body)


@contextlib.contextmanager
def stream(cluster: Cluster, key: str, model: str, tokens: int) -> Iterator[http.client.HTTPConnection]:
    """A streamed answer under way; the client goes at the end of the block."""
    connection = http.client.HTTPConnection("127.0.0.1", cluster.http_port, timeout=60)
    body = {"model": model, "max_tokens": tokens, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        yield connection


def rows(table: str) -> dict[str, list[str]]:
    """Cells of a table by the first of each row; cells are two spaces apart."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines}


def test_keys_are_made_listed_limited_and_deleted(cluster: Cluster) -> None:
    said = cluster.ctl("keys", "create", "none", "--models", "small,nosuch").stderr
    assert "`small` is an alias of `tiny`" in said
    assert "there is no profile `nosuch`" in said
    ann = create(cluster, "ann", "--models", "tiny", "--rpm", "3", "--tpm", "1000", "--expires", "2h")
    short = create(cluster, "short", "--expires", "6s")
    assert chat(cluster, short)[0] == 200

    listed = cluster.ctl("keys", "list").stdout
    table = rows(listed)
    assert table["KEY"] == ["AGE", "MODELS", "RPM", "TPM", "EXPIRES"]
    assert table["ann"][1:4] == ["tiny", "3", "1000"]
    assert table["ann"][4].startswith("in 1h59m")
    assert table["short"][1:4] == ["all", "none", "none"]
    data = cluster.ctl("keys", "list", "-o", "json").stdout
    as_json = {key["name"]: key for key in json.loads(data)["keys"]}
    assert (as_json["ann"]["models"], as_json["ann"]["rpm"], as_json["ann"]["tpm"]) == (["tiny"], 3, 1000)
    assert as_json["short"]["expires"] > as_json["short"]["created"]
    assert ann not in listed + data

    assert (get(cluster, "", "/v1/models")[0], chat(cluster, ann + "x")[0]) == (401, 401)
    assert [model["id"] for model in get(cluster, ann, "/v1/models")[2]["data"]] == ["tiny"]
    assert [chat(cluster, ann, "small")[0] for _ in range(3)] == [200, 200, 200]
    status, headers, answer = chat(cluster, ann)
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "limited to 3 requests a minute" in answer["error"]["message"]
    assert 0 < int(headers["retry-after"]) <= 20
    status, _, answer = chat(cluster, ann, "slow")
    assert (status, answer["error"]["code"]) == (403, "model_not_allowed")

    wait(lambda: chat(cluster, short)[0] == 401, 20, "the key `short` to be over")
    assert "the API key `short` has expired" in chat(cluster, short)[2]["error"]["message"]
    assert rows(cluster.ctl("keys", "list").stdout)["short"][4].startswith("expired ")

    assert cluster.ctl("keys", "delete", "ann", "short").stdout == "ann: deleted\nshort: deleted\n"
    wait(lambda: chat(cluster, ann)[2]["error"]["code"] == "invalid_api_key", 10, "the key `ann` to be refused")
    assert {"ann", "short"}.isdisjoint(rows(cluster.ctl("keys", "list").stdout))
    again = cluster.ctl("keys", "delete", "ann", code=1).stderr
    assert "there is no key `ann`" in again


def test_usage_is_summed_by_key_model_and_day_and_outlives_the_server(cluster: Cluster) -> None:
    began = time.strftime("%Y-%m-%d", time.gmtime())
    carl, dora = create(cluster, "carl"), create(cluster, "dora")
    said = []
    for key, model, tokens in ((carl, "tiny", 5), (carl, "tiny", 9), (carl, "slow", 3), (dora, "tiny", 4)):
        status, _, answer = chat(cluster, key, model, tokens)
        assert status == 200
        said.append(answer["usage"])
    with stream(cluster, dora, "slow", 4000) as connection:
        connection.getresponse().read(2000)
    table: dict[str, list[str]] = {}

    def complete() -> bool:
        table.update(rows(cluster.ctl("usage", "--by", "key").stdout))
        return table.get("dora", ["0"])[0] == "2" and table.get("carl", ["0"])[0] == "3"

    wait(complete, 15, "usage of five requests", lambda: table)
    assert table["KEY"] == ["REQUESTS", "PROMPT", "COMPLETION", "BROKEN OFF", "PARTIAL", "UNKNOWN"]
    prompts = [usage["prompt_tokens"] for usage in said]
    assert table["carl"] == ["3", str(sum(prompts[:3])), str(5 + 9 + 3), "0", "0", "0"]
    assert table["dora"][:4] == ["2", str(prompts[3]), "4", "1"]
    assert 1 <= int(table["dora"][4]) < 4000

    days = {began, time.strftime("%Y-%m-%d", time.gmtime())}
    data = json.loads(cluster.ctl("usage", "--by", "model", "--by", "day", "--by", "key", "-o", "json").stdout)
    assert data["by"] == ["model", "day", "key"]
    mine = [row for row in data["usage"] if row["key"] == "carl"]
    assert {row["day"] for row in mine} <= days
    sums = {model: sum(row["completion"] for row in mine if row["model"] == model) for model in ("tiny", "slow")}
    assert sums == {"tiny": 14, "slow": 3}
    by_model = rows(cluster.ctl("usage", "--by", "model").stdout)
    assert int(by_model["tiny"][2]) >= 5 + 9 + 4
    assert rows(cluster.ctl("usage", "--by", "day").stdout).keys() == {"DAY", *days}
    assert "no usage from 2020-01-01" in cluster.ctl("usage", "--since", "2020-01-01", "--until", "2020-01-02").stdout
    assert "must be a day" in cluster.ctl("usage", "--since", "yesterday", code=2).stderr

    cluster.kill("server")
    assert chat(cluster, carl, "tiny", 6)[0] == 200, "gateways go on without the control process"
    cluster.start("server", "server", "-c", str(cluster.root / "server.yaml"))
    wait(lambda: cluster.api("GET", "/status", quiet=True), 60, "the server to answer", cluster.logs)

    def caught_up() -> bool:
        table.update(rows(cluster.ctl("usage", "--by", "key").stdout))
        return table["carl"] == ["4", str(sum(prompts[:3]) + prompts[0]), str(17 + 6), "0", "0", "0"]

    wait(caught_up, 20, "what was used while the server was away", lambda: table)


class Follower:
    """`llmgw ctl requests -f` in a terminal of its own."""

    def __init__(self, cluster: Cluster, *options: str) -> None:
        where = ["--server", cluster.url, "--token-file", str(cluster.token_file)]
        argv = [sys.executable, "-m", "llmgw", "ctl", *where, "requests", "-f", *options]
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=cluster.env
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def await_line(self, what: str, fits: Callable[[str], bool]) -> str:
        wait(lambda: any(map(fits, list(self.lines))), 20, what, lambda: self.lines)
        return next(line for line in self.lines if fits(line))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self._thread.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_request_is_seen_while_it_runs_or_waits_and_at_its_end(cluster: Cluster) -> None:
    eve, finn = create(cluster, "eve"), create(cluster, "finn")
    with contextlib.closing(Follower(cluster)) as follower, stream(cluster, eve, "slow", 6000) as first:
        first.getresponse().read(500)
        running = follower.await_line("the stream of `eve`", lambda x: x.startswith("open") and "  eve  " in x)
        assert "  slow  slow#0 on node-1  " in running
        with stream(cluster, finn, "slow", 3) as second:
            waiting = follower.await_line("the request of `finn`", lambda x: x.startswith("open") and "  finn  " in x)
            assert "  slow  queued  " in waiting
            table = rows(cluster.ctl("requests").stdout)
            assert table["REQUEST"] == ["KEY", "MODEL", "WHERE", "FOR", "EVENTS"]
            names = {line[0]: line for line in table.values()}
            assert names["eve"][1:3] == ["slow", "slow#0 on node-1"]
            assert int(names["eve"][4]) > 0
            assert names["finn"][2] == "queued"
            data = json.loads(cluster.ctl("requests", "-o", "json").stdout)
            assert {item["key"]: item["replica"] for item in data["open"]} == {"eve": "slow#0", "finn": None}
            first.close()
            assert second.getresponse().read().endswith(b"data: [DONE]\n\n")
        broken = follower.await_line("the end of `eve`", lambda x: x.startswith("200") and "  eve  " in x)
        assert "  ?+" in broken, "the engine tells the prompt's tokens at the end only"
        assert broken.endswith(" tokens (broken off)")
        ended = follower.await_line("the end of `finn`", lambda x: x.startswith("200") and "  finn  " in x)
        assert ended.endswith("+3 tokens")
        assert running.split("  ")[1] == broken.split()[1], "the same id while it runs and at its end"
        assert chat(cluster, finn, "none")[0] == 404
        refused = follower.await_line("the refusal", lambda x: x.startswith("404"))
        assert refused.endswith("  finn  /v1/chat/completions  refused: model_not_found")
    wait(lambda: cluster.ctl("requests").stdout == "no request is under way\n", 20, "no request to be under way")


def test_requests_are_followed_as_json_and_over_a_server_that_goes_away(cluster: Cluster) -> None:
    gina = create(cluster, "gina")
    with contextlib.closing(Follower(cluster, "-o", "json")) as follower:
        wait(lambda: chat(cluster, gina)[0] == 200 and follower.lines, 20, "an ended request", lambda: follower.lines)
        cluster.kill("server")
        follower.await_line("words about the server", lambda x: x.startswith("error: "))
        told = len(follower.lines)
        cluster.start("server", "server", "-c", str(cluster.root / "server.yaml"))
        wait(lambda: cluster.api("GET", "/status", quiet=True), 60, "the server to answer", cluster.logs)
        wait(
            lambda: chat(cluster, gina)[0] == 200 and follower.lines[-1] == "}" and len(follower.lines) > told,
            30,
            "more",
        )
    text = "\n".join(line for line in follower.lines if not line.startswith("error: "))
    found, at = [], 0
    while at < len(text):
        item, at = json.JSONDecoder().raw_decode(text, at)
        at += 1
        found.append(item)
    ended = [item for item in found if item["kind"] == "ended"]
    assert {(item["key"], item["model"], item["status"]) for item in ended} == {("gina", "tiny", 200)}
    assert all(item["completion"] == 5 for item in ended)
