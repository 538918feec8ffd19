"""The agent is exchanged while the node answers: no token is lost, no engine is touched; a bad release goes back."""

from __future__ import annotations

import hashlib
import re
import threading
import time
import zipfile
from pathlib import Path

import pytest
from flows_cluster import wait

import llmgw

pytestmark = [pytest.mark.flow, pytest.mark.timeout(240)]

NEXT = "99.0.0"


def other_release(pyz: Path, directory: Path, version: str, *, breaks: bool = False) -> Path:
    """The executable under another version, as a build of a later commit would be; with `breaks` its agent ends."""
    made = directory / pyz.name.replace(llmgw.__version__, version)
    with zipfile.ZipFile(pyz) as source, made.open("wb") as out:
        with pyz.open("rb") as raw:
            out.write(raw.readline())
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as target:
            for info in source.infolist():
                data = source.read(info)
                if info.filename == "site-packages/llmgw/__init__.py":
                    data = re.sub(rb'__version__ = "[^"]+"', f'__version__ = "{version}"'.encode(), data)
                if breaks and info.filename == "site-packages/llmgw/agent/session.py":
                    data = b"raise RuntimeError('this release is broken')\n"
                target.writestr(info, data)
    made.chmod(0o755)
    with (directory / "SHA256SUMS").open("a") as sums:
        sums.write(f"{hashlib.sha256(made.read_bytes()).hexdigest()}  {made.name}\n")
    return made


@pytest.fixture
def serving(make_node, server, operator):
    node = make_node("bare-3")
    operator.onboard(node, server=server)
    server.apply(name="slow", model="slow.gguf", context=2048, slots=2)
    server.await_model("slow")
    return node


def test_an_upgrade_breaks_no_stream_and_a_bad_one_is_rolled_back(serving, server, operator, pyz):
    node, agent_pid = serving, serving.sh("systemctl show -p MainPID --value llmgw-agent")
    engine = server.replicas("slow")[0]["pid"]
    other_release(pyz, operator.release, NEXT)
    other_release(pyz, operator.release, "99.0.1", breaks=True)

    over, answers = threading.Event(), []

    def ask() -> None:
        while not over.is_set():
            began = time.time()
            with server.stream("slow", 600) as contents:
                answers.append((began, list(contents)[-1], time.time()))

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for each in askers:
        each.start()
    try:
        done = operator.ctl("upgrade", "--from", operator.release, "--version", NEXT, server=server)
    finally:
        over.set()
        for each in askers:
            each.join(60)
    started = float(node.sh('date +%s -d "$(systemctl show -p ExecMainStartTimestamp --value llmgw-agent)"'))
    assert {last for _, last, _ in answers} == {"[DONE]"}
    assert any(began < started - 1 and ended > started + 1 for began, _, ended in answers), "none was in the middle"
    assert server.node("bare-3")["version"] == NEXT
    assert server.replicas("slow")[0]["pid"] == engine
    assert "1 engines went on" in done.stderr
    assert node.sh("systemctl show -p MainPID --value llmgw-agent") != agent_pid
    assert node.sh("/usr/local/bin/llmgw --version").strip() == f"llmgw {NEXT}"

    # a release whose agent does not come up: the old one comes back by itself, the engine never noticed
    bad = operator.ctl("upgrade", "bare-3", "--from", operator.release, "--version", "99.0.1", server=server, code=1)
    assert "is not upgraded" in bad.stderr
    assert f"it is back on `llmgw-{NEXT}" in bad.stderr
    assert server.node("bare-3")["version"] == NEXT
    assert server.replicas("slow")[0]["pid"] == engine
    assert server.chat("slow")[0] == 200

    # what nobody runs any more is cleaned up: the first release's tree is gone, that of the running one is there
    node.sh("/usr/local/bin/llmgw agent tidy")
    trees = node.sh("ls /usr/local/lib/llmgw/unpacked").split()
    assert [tree.split("-linux")[0] for tree in trees] == [f"llmgw-{NEXT}"]
    assert [name for name in node.sh("ls /usr/local/lib/llmgw").split() if name.endswith(".pyz")] == [
        f"llmgw-{NEXT}-linux-{pyz.stem.rpartition('-linux-')[2]}.pyz"
    ]
    wait(lambda: server.node("bare-3")["presence"] == "connected", 20, "the node to stay")
