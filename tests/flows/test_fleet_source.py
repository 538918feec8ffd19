"""The server as the fleet's source: one question and one download upstream, whatever the number of nodes."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from flows_cluster import Cluster, wait

from llmgw.agent.session import Session
from llmgw.domain.report import Desired, NodeReport
from llmgw.install.pipeline import Pipeline
from llmgw.install.prove import Linked
from llmgw.install.store import Store
from llmgw.pki import authority as pki
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.sources import fetch_asset, make_source
from llmgw.sources.server import Releases
from llmgw.system.clock import RealClock
from llmgw.system.http import Http
from llmgw.wire.tls import TlsFiles

sys.path.append(str(Path(__file__).resolve().parent.parent / "install"))

import install_archives as archives
from github_server import GithubServer
from install_fakes import DEBIAN, facts

pytestmark = [pytest.mark.flow, pytest.mark.timeout(180)]

REPO = "ggml-org/llama.cpp"
NAME = "llama-b1-bin-ubuntu-x64.tar.gz"


class Believing:
    """A prover that runs nothing: these nodes are about bytes; one real agent among them proves."""

    def libraries(self, directory: Path, recipe: Any) -> Linked:
        return Linked()

    def check_versions(self, *_: Any) -> None:
        pass

    check_files = check_versions

    def prove(self, *_: Any, **__: Any) -> tuple[()]:
        return ()


class LightNode:
    """An agent without its process: the real session, release board, pipeline, fetch and unpack."""

    def __init__(self, cluster: Cluster, name: str, arch: str) -> None:
        self.name, self.words, self.error = name, [], ""
        self.node = facts(arch, evolve(DEBIAN, glibc="2.39", libstdcxx="3.4.33"))
        self.installed, self.started = threading.Event(), False
        self.home = cluster.root / name
        self.releases, self.http, clock = Releases(), Http(use_proxies=False), RealClock()
        self.pipeline = Pipeline(
            Store(self.home / "engines", clock),
            lambda text: make_source(text, self.http, releases=self.releases),
            lambda asset, dest, *, progress, stop: fetch_asset(asset, dest, self.http, progress=progress, stop=stop),
            None,  # type: ignore[arg-type]  (nothing is missing)
            Believing(),  # type: ignore[arg-type]
            clock,
        )
        pki.issue_node(cluster.pki, name, now=time.time())
        self.session = Session(
            servers=[f"https://127.0.0.1:{cluster.agents_port}"],
            node_id=name,
            tls=TlsFiles(*(str(cluster.pki / each) for each in ("ca.pem", f"{name}.pem", f"{name}-key.pem"))),
            version="0",
            boot_id="boot",
            instance_id=name,
            heartbeat_interval_s=1.0,
            reconnect_base_s=0.1,
            reconnect_max_s=0.5,
            source=self,
            on_desired=self._obey,
            answers={},
            clock=clock,
        )

    def facts(self) -> Any:
        return self.node

    def report(self, seq: int, generation: int | None, epoch: int | None, facts: Any) -> NodeReport:
        return NodeReport(seq, generation, epoch, None, facts, None)

    def _obey(self, desired: Desired) -> None:
        self.releases.take(desired.releases, desired.assets_at, self.session.status().server or "")
        if desired.engines and not self.started:
            self.started = True
            threading.Thread(target=self._install, args=(desired.engines[0],), name=self.name).start()

    def _install(self, spec: Any) -> None:
        told = lambda words, _: self.words.append(words)  # noqa: E731
        try:
            self.pipeline.install(spec, LlamaCpp(), self.node, told, threading.Event())
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.installed.set()

    def close(self) -> None:
        self.releases.close()
        self.session.stop()
        if self.started:
            self.installed.wait(10)
        self.http.close()


def archive(size: int = 4_000_000) -> bytes:
    """Like a release's CPU build in shape, with random bytes in place of the programs."""
    names = ("llama-server", "llama-bench", "libllama.so")
    return archives.tar_gz([archives.entry(f"llama-b1/{name}", os.urandom(size // 3), 0o755) for name in names])


@pytest.fixture
def github() -> Iterator[GithubServer]:
    with GithubServer() as running:
        yield running


def questions(github: GithubServer) -> list[str]:
    return [asked.path for asked in github.api_server.requests if asked.path.startswith("/repos/")]


def downloads(github: GithubServer) -> list[str]:
    return [asked.path.partition("?")[0] for asked in github.files.requests]


def test_twenty_agents_ask_upstream_once_and_each_archive_leaves_it_once(make_cluster, github) -> None:
    data = {NAME: archive(), "llama-b1-bin-ubuntu-arm64.tar.gz": archive()}
    github.release(REPO, "b1", data)
    cluster = make_cluster()
    cluster.env["LLMGW_GITHUB_API"] = github.api
    nodes: list[LightNode] = []
    try:
        cluster.start_server(engines={"llama.cpp": "b1"}, sources=["server", "github"])
        nodes += [LightNode(cluster, f"n{number}", "aarch64" if number % 4 == 0 else "x86_64") for number in range(20)]
        for node in nodes:
            node.session.start()
        for node in nodes:
            assert node.installed.wait(60), f"{node.words} {node.session.status()} {cluster.logs()}"
        assert [node.error for node in nodes] == [""] * 20
    finally:
        for node in nodes:
            node.close()
    assert questions(github) == [f"/repos/{REPO}/releases/tags/b1"]
    assert sorted(downloads(github)) == sorted(f"/blob/{REPO}/releases/download/b1/{name}" for name in data)
    # each node verified its archive: what is unpacked there is what upstream published
    trees = [node.home / "engines" / "llama.cpp" / "b1-cpu" / "llama-server" for node in nodes]
    assert len({hashlib.sha256(path.read_bytes()).hexdigest() for path in trees}) == len(data)
    print(f"20 agents, 2 archives: {len(questions(github))} question, {len(downloads(github))} downloads upstream")


def test_a_closed_network_gets_its_engines_from_a_bundle(make_cluster, github, release_dir) -> None:
    github.release(REPO, "b1", {NAME: (release_dir / NAME).read_bytes()})
    outside = make_cluster()
    outside.env["LLMGW_GITHUB_API"] = github.api
    outside.start_server(engines={"llama.cpp": "b1"}, sources=["server"])
    wait(lambda: outside.api("GET", "/releases")["releases"][0]["assets"], 30, "the release", outside.logs)
    bundle = outside.root / "engines.zip"
    outside.ctl("engines", "export", str(bundle), "--asset", "*x64*")
    assert zipfile.ZipFile(bundle).namelist() == ["SHA256SUMS", f"llama.cpp/b1/{NAME}"]

    closed = make_cluster()
    closed.env["LLMGW_GITHUB_API"] = "http://127.0.0.1:9"
    closed.start_server(engines={"llama.cpp": "b1"}, sources=["server"])
    closed.start_agent()
    words = closed.await_engine("failed")["words"]
    assert words.startswith("failed: the server cannot get llama.cpp `b1`: cannot ask GitHub: ")
    done = closed.ctl("engines", "import", str(bundle))
    assert done.stdout == "llama.cpp b1: 1 files, imported\n"
    closed.await_engine("ready")
    assert closed.ctl("engines", "import", str(bundle)).stdout == "llama.cpp b1: 1 files, was there already\n"
    assert "llama.cpp" in closed.ctl("engines").stdout
