"""Which llama.cpp build a node gets, and what is said of the ones passed over."""

from __future__ import annotations

import pytest

from llmgw.domain.engines import Asset
from llmgw.domain.facts import (
    CpuFacts,
    Finding,
    GpuFacts,
    MemoryFacts,
    NodeFacts,
    NvidiaFacts,
    OsFacts,
    Truth,
)
from llmgw.errors import NoBuild
from llmgw.providers.choose import Choice, choose

NAMES = (
    "llama-b10991-bin-ubuntu-x64.tar.gz",
    "llama-b10991-bin-ubuntu-arm64.tar.gz",
    "llama-b10991-bin-ubuntu-s390x.tar.gz",
    "llama-b10991-bin-ubuntu-vulkan-x64.tar.gz",
    "llama-b10991-bin-ubuntu-vulkan-arm64.tar.gz",
    "llama-b10991-bin-ubuntu-cuda-12.8-x64.tar.gz",
    "llama-b10991-bin-ubuntu-cuda-13.3-x64.tar.gz",
    "llama-b10991-bin-ubuntu-cuda-13.3-arm64.tar.gz",
    "cudart-llama-b10991-bin-ubuntu-cuda-12.8-x64.tar.gz",
    "cudart-llama-b10991-bin-ubuntu-cuda-13.3-x64.tar.gz",
    "cudart-llama-b10991-bin-ubuntu-cuda-13.3-arm64.tar.gz",
    "llama-b10991-bin-ubuntu-rocm-10.0-x64.tar.gz",
    "llama-b10991-bin-ubuntu-openvino-2026.3.1-x64.tar.gz",
    "llama-b10991-bin-ubuntu-sycl-fp32-x64.tar.gz",
    "llama-b10991-bin-win-cuda-13.3-x64.zip",
    "llama-b10991-bin-macos-arm64.tar.gz",
    "llama-b10991-ui.tar.gz",
    "llama-b10991-xcframework.zip",
)
NO_DRIVER = Finding(Truth.NO, "no NVIDIA driver is loaded")
LOADED = Finding(Truth.YES, "an NVIDIA driver is loaded")


def assets(*names: str) -> tuple[Asset, ...]:
    return tuple(Asset(name, f"https://example.org/{name}", 1, "0" * 64) for name in names or NAMES)


def node(
    arch: str = "x86_64",
    glibc: str | None = "2.39",
    stdcxx: str | None = "3.4.33",
    driver: Finding = NO_DRIVER,
    version: str | None = None,
    cuda: str | None = None,
    caps: tuple[str, ...] = (),
    family: str = "debian",
) -> NodeFacts:
    return NodeFacts(
        hostname="n",
        boot_id="b",
        os=OsFacts("debian", family=family, glibc=glibc, libstdcxx=stdcxx),
        cpu=CpuFacts(arch),
        memory=MemoryFacts(),
        nvidia=NvidiaFacts(driver, version, cuda),
        gpus=tuple(GpuFacts(f"GPU-{number}", compute_cap=cap) for number, cap in enumerate(caps)),
    )


def gpu(cuda: str, *caps: str, version: str = "590.48.01", **more: str) -> NodeFacts:
    return node(driver=LOADED, version=version, cuda=cuda, caps=caps, **more)  # type: ignore[arg-type]


def pick(facts: NodeFacts, *names: str, wanted: tuple[str, ...] = ()) -> Choice:
    return choose("b10991", wanted, facts, assets(*names))


@pytest.mark.parametrize(
    ("facts", "build", "asset"),
    [
        (node(), "cpu", NAMES[0]),
        (node("aarch64"), "cpu", NAMES[1]),
        (node(glibc="2.34", stdcxx="3.4.30"), "cpu", NAMES[0]),
        (node(glibc=None, stdcxx=None), "cpu", NAMES[0]),
        (gpu("13.3", "9.0"), "cuda-13.3", NAMES[6]),
        (gpu("13.5", "12.0"), "cuda-13.3", NAMES[6]),
        (gpu("13.1", "9.0"), "cuda-12.8", NAMES[5]),
        (gpu("12.8", "8.0"), "cuda-12.8", NAMES[5]),
        (gpu("13.3", "7.0"), "cuda-12.8", NAMES[5]),
        (gpu("13.3", "8.9", "6.1"), "cuda-12.8", NAMES[5]),
        (gpu("12.4", "8.6", "8.9", version="550.54.14"), "cuda-12.8", NAMES[5]),
        (gpu("13.3", "9.0", arch="aarch64"), "cuda-13.3", NAMES[7]),
    ],
)
def test_the_best_build_that_runs_is_chosen(facts: NodeFacts, build: str, asset: str) -> None:
    choice = pick(facts)
    assert (choice.build, choice.asset.name, choice.passed_over) == (build, asset, "")
    if build.startswith("cuda"):
        assert choice.runtime is not None
        assert choice.runtime.name == f"cudart-{asset}"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (gpu("13.3", "9.0", glibc="2.36"), "the CUDA build needs GLIBC_2.38, this node has 2.36"),
        (gpu("13.3", "9.0", stdcxx="3.4.30"), "the CUDA build needs GLIBCXX_3.4.32, this node has 3.4.30"),
        (gpu("12.4", "9.0"), "the CUDA builds need a driver for CUDA 12.8, this node's supports 12.4"),
        (
            gpu("12.4", "8.6", version="535.1"),
            "the CUDA builds need a driver for CUDA 12.8, this node's supports 12.4",
        ),
        (
            node(driver=LOADED, caps=("9.0",)),
            "the CUDA build (13.3, 12.8) was not chosen, which CUDA version the driver supports is not known",
        ),
        (
            node(driver=Finding(Truth.UNKNOWN, "nvidia-smi gave no answer in time")),
            "whether the CUDA build would run is not known, nvidia-smi gave no answer in time",
        ),
        (node(caps=("9.0",)), "the CUDA build needs an NVIDIA driver, no NVIDIA driver is loaded"),
    ],
)
def test_a_gpu_node_that_gets_the_cpu_build_is_told_why(facts: NodeFacts, why: str) -> None:
    choice = pick(facts)
    assert choice.build == "cpu"
    assert choice.passed_over == f"CPU build: {why}"


def test_a_release_without_cuda_is_told() -> None:
    choice = pick(gpu("13.3", "9.0"), NAMES[0])
    assert choice.passed_over == "CPU build: llama.cpp b10991 has no CUDA build for x64 there"


def test_cards_that_cuda_13_dropped_are_told_when_there_is_no_older_build() -> None:
    choice = pick(gpu("13.3", "6.1"), NAMES[0], NAMES[6], NAMES[9])
    assert choice.passed_over == "CPU build: the CUDA builds (13.3) do not carry a GPU of compute capability 6.1"


def test_a_cuda_build_without_its_runtime_is_passed_over() -> None:
    choice = pick(gpu("13.3", "9.0"), NAMES[0], NAMES[6])
    assert choice.passed_over == "CPU build: the CUDA 13.3 build has no runtime archive (`cudart-…`) there"


def test_labels_that_moved_are_found_by_pattern() -> None:
    moved = [name.replace("13.3", "13.4").replace("b10991", "b11434") for name in NAMES]
    choice = choose("b11434", (), gpu("13.4", "9.0"), assets(*moved))
    assert (choice.build, choice.tag) == ("cuda-13.4", "b11434")


def test_other_versions_in_the_same_directory_are_not_taken() -> None:
    older = [name.replace("b10991", "b9999") for name in NAMES]
    assert choose("b10991", (), node(), assets(*older, *NAMES)).tag == "b10991"
    with pytest.raises(NoBuild, match=r"llama\.cpp b10991 has no CPU build for x64 there"):
        choose("b10991", (), node(), assets(*older))


def test_vulkan_only_where_asked_for() -> None:
    assert pick(gpu("13.3", "9.0"), wanted=("vulkan",)).asset.name == NAMES[3]
    assert pick(node("aarch64"), wanted=("vulkan", "cpu")).asset.name == NAMES[4]


def test_an_order_of_builds_falls_through_with_words() -> None:
    choice = pick(node(), wanted=("cuda", "vulkan", "cpu"))
    assert choice.build == "vulkan"
    assert choice.passed_over == "Vulkan build: the CUDA build needs an NVIDIA driver, no NVIDIA driver is loaded"


@pytest.mark.parametrize(
    ("facts", "wanted", "why"),
    [
        (node(glibc="2.31"), (), "this build needs GLIBC_2.34, this node has 2.31"),
        (node(stdcxx="3.4.29"), (), "this build needs GLIBCXX_3.4.30, this node has 3.4.29"),
        (node("aarch64", glibc="2.36"), (), "this build needs GLIBC_2.38, this node has 2.36"),
        (node("riscv64"), (), "llama.cpp b10991 has no build for `riscv64`"),
        (node(family="alpine", glibc=None), (), "llama.cpp builds need glibc, this node has musl"),
        (node(), ("rocm",), "llmgw knows no rocm build of llama.cpp"),
        (node(), ("cuda",), "the CUDA build needs an NVIDIA driver, no NVIDIA driver is loaded"),
    ],
)
def test_no_build_at_all_is_told(facts: NodeFacts, wanted: tuple[str, ...], why: str) -> None:
    with pytest.raises(NoBuild) as caught:
        pick(facts, wanted=wanted)
    assert caught.value.words() == why


def test_an_empty_release_has_no_build() -> None:
    with pytest.raises(NoBuild, match=r"llama\.cpp b10991 has no CPU build for x64 there"):
        choose("b10991", (), node(), ())
