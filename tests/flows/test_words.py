"""Nothing fails invisibly: the words of a failure are the same, letter for letter, everywhere they are shown."""

from __future__ import annotations

import html
import json
import shutil

import pytest

pytestmark = [pytest.mark.flow, pytest.mark.timeout(180)]


def everywhere(cluster, words: str, model: str) -> dict[str, bool]:
    page = html.unescape(cluster.request("GET", "/", token=True)[1].decode())
    status, chat = cluster.chat(model)
    assert status == 503, chat
    return {
        "ctl nodes": words in cluster.ctl("nodes").stdout,
        "ctl nodes NODE": words in cluster.ctl("nodes", "node-1").stdout,
        "ctl engines": words in cluster.ctl("engines").stdout,
        "page": words in page,
        "API": any(e["words"] == words for e in cluster.api("GET", "/engines")["engines"]),
        "ctl explain": words in cluster.ctl("explain", model).stdout,
        "ctl explain json": words
        in json.dumps(json.loads(cluster.ctl("explain", model, "-o", "json").stdout), ensure_ascii=False),
        "503": words in chat["error"]["message"],
    }


def stable(cluster) -> str:
    """The failing engine's words while its next try is far enough away that all places are asked about one state."""
    from flows_cluster import wait

    wait(lambda: cluster.engine().get("state") == "failed", 60, "the engine to fail", cluster.logs)
    return cluster.engine()["words"]


def corrupted(release_dir, tmp_path):
    """A release whose archive has one byte that its digest does not know of."""
    folder = tmp_path / "corrupted"
    shutil.copytree(release_dir, folder)
    archive = next(folder.glob("*.tar.gz"))
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    return folder


def without_asset(release_dir, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "SHA256SUMS").write_text("0" * 64 + "  llama-b1-bin-macos-arm64.tar.gz\n")
    return folder


@pytest.mark.parametrize(("broken", "telling"), [(corrupted, "sha256"), (without_asset, "b1")])
def test_the_words_of_a_failing_install_are_the_same_everywhere(
    broken, telling, make_cluster, release_dir, tiny_gguf, tmp_path
):
    cluster = make_cluster()
    source = broken(release_dir, tmp_path)
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{source}"])
    cluster.start_agent(model_dirs=[str(tiny_gguf.parent)])
    cluster.apply(name="tiny", model="tiny.gguf")
    for attempt in range(3):  # the words name the next try: they change with each, so one moment must see them all
        words = stable(cluster)
        seen = everywhere(cluster, words, "tiny")
        if all(seen.values()) or attempt == 2:
            break
    assert telling in words
    assert seen == dict.fromkeys(seen, True), words
    engines = cluster.root / "node-1" / "engines"
    assert not list(engines.rglob("llama-server")), "nothing half-installed"


def test_a_missing_or_cut_model_fails_with_the_engines_own_last_line(make_cluster, release_dir, tiny_gguf, tmp_path):
    from flows_cluster import wait

    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:300_000])
    cluster = make_cluster()
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{release_dir}"])
    cluster.start_agent(model_dirs=[str(tiny_gguf.parent)])
    cluster.await_engine("ready")
    cluster.apply(name="absent", model=str(tmp_path / "absent.gguf"))
    cluster.apply(name="cut", model=str(cut))

    def failed(name):
        found = cluster.replicas(name)
        return found and found[0]["state"] == "failed" and found[0]

    wait(
        lambda: failed("absent") and failed("cut"),
        60,
        "both to fail",
        lambda: (cluster.replicas("cut"), cluster.logs()),
    )
    assert "absent.gguf" in failed("absent")["words"]
    words = failed("cut")["words"]
    assert "not within the file bounds" in words or "corrupted or incomplete" in words
    status, chat = cluster.chat("cut")
    assert status == 503
    assert (
        "corrupted or incomplete" in chat["error"]["message"]
        or "not within the file bounds" in chat["error"]["message"]
    )


def test_a_stray_llama_server_on_path_is_never_reported(make_cluster, real_engine_dir, tmp_path):
    stray = tmp_path / "bin"
    stray.mkdir()
    (stray / "llama-server").symlink_to(real_engine_dir / "llama-server")
    cluster = make_cluster()
    empty = tmp_path / "none"
    empty.mkdir()
    (empty / "SHA256SUMS").write_text("")
    cluster.start_server(engines={"llama.cpp": "b1"}, sources=[f"file://{empty}"])
    cluster.start_agent(env={"PATH": f"{stray}:{cluster.env['PATH']}"})
    engine = cluster.await_engine("failed")
    assert engine["usable"] is False
    assert str(stray) not in json.dumps(cluster.node())
