"""Which llama.cpp build a node gets: pure tables over its facts and the names a release lists."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import frozen

from llmgw.domain.engines import Asset
from llmgw.domain.facts import NodeFacts, Truth
from llmgw.errors import NoBuild

_BUILD = re.compile(
    r"llama-(?P<tag>b\d+)-bin-ubuntu-(?:(?P<kind>cuda|vulkan|rocm|openvino|sycl)-(?:(?P<label>[a-z0-9.]+)-)?)?"
    r"(?P<arch>x64|arm64|s390x)\.(?:tar\.gz|zip)"
)
_RUNTIME = re.compile(r"cudart-llama-(?P<tag>b\d+)-bin-ubuntu-cuda-(?P<label>[0-9.]+)-(?P<arch>x64|arm64)\.tar\.gz")
_ARCHES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
# what upstream's build machines ship: x64 CPU and Vulkan come from an older distribution than all others
_OLD_FLOOR = ("2.34", "3.4.30")
_NEW_FLOOR = ("2.38", "3.4.32")
_NONE_RUNS = "allow another build or source in server.yaml, or name a binary of your own in agent.yaml"
# cards with machine code in the CUDA builds; all others get PTX, which needs a driver as new as the toolkit
_REAL_CODE = {"8.6", "8.9"}


@frozen
class Choice:
    """One build: `kind` is `cpu`, `cuda` or `vulkan`; `label` the CUDA version; `runtime` goes beside `asset`."""

    kind: str
    label: str
    tag: str
    asset: Asset
    runtime: Asset | None = None
    passed_over: str = ""

    @property
    def build(self) -> str:
        """Name of the build: `cpu`, `cuda-13.3`, `vulkan`."""
        return f"{self.kind}-{self.label}" if self.label else self.kind


@frozen
class _Listed:
    kind: str
    label: str
    tag: str
    asset: Asset


def choose(version: str, wanted: tuple[str, ...], facts: NodeFacts, assets: Sequence[Asset]) -> Choice:
    """The best build this node can run.

    Args:
        version: for the sentences.
        wanted: kinds allowed, in order; () means CUDA where an NVIDIA driver is loaded, else CPU.
        assets: what the release lists; other files than builds are ignored.

    Raises:
        NoBuild: none; says why for each kind.
    """
    arch = _ARCHES.get(facts.cpu.arch)
    if arch is None:
        raise NoBuild(f"llama.cpp {version} has no build for `{facts.cpu.arch}`")
    if facts.os.family == "alpine":
        raise NoBuild("llama.cpp builds need glibc, this node has musl", hint="name a binary in agent.yaml")
    listed = _listed(assets, arch, version)
    reasons: list[tuple[str, str]] = []
    for kind in wanted or ("cuda", "cpu"):
        if kind == "cuda":
            found: Choice | str = _cuda(version, arch, facts, listed, assets, asked_for=bool(wanted))
        elif kind in ("cpu", "vulkan"):
            found = _plain(kind, version, arch, facts, listed)
        else:
            found = f"llmgw knows no {kind} build of llama.cpp"
        if isinstance(found, str):
            if found:
                reasons.append((kind, found))
            continue
        over = "; ".join(why for _, why in reasons)
        return Choice(
            found.kind,
            found.label,
            found.tag,
            found.asset,
            found.runtime,
            f"{_shown(found.kind)} build: {over}" if over else "",
        )
    raise NoBuild("; ".join(why for _, why in reasons), hint=_NONE_RUNS)


def _shown(kind: str) -> str:
    return {"cpu": "CPU", "cuda": "CUDA", "vulkan": "Vulkan"}.get(kind, kind)


def _listed(assets: Sequence[Asset], arch: str, version: str) -> list[_Listed]:
    """Builds for the architecture. A directory may hold several versions; `vX.Y.Z` is resolved by its source."""
    found = []
    for asset in assets:
        match = _BUILD.fullmatch(asset.name)
        if match and match["arch"] == arch and (version.startswith("v") or match["tag"] == version):
            found.append(_Listed(match["kind"] or "cpu", match["label"] or "", match["tag"], asset))
    return found


def too_old(what: str, facts: NodeFacts, floor: tuple[str, str]) -> str:
    """Why the node's C or C++ library does not carry a build, "" when it does or is not known (then `ldd` decides)."""
    for family, need, have in (("GLIBC", floor[0], facts.os.glibc), ("GLIBCXX", floor[1], facts.os.libstdcxx)):
        if have is not None and numbers(have) < numbers(need):
            return f"{what} needs {family}_{need}, this node has {have}"
    return ""


def _plain(kind: str, version: str, arch: str, facts: NodeFacts, listed: list[_Listed]) -> Choice | str:
    builds = [each for each in listed if each.kind == kind]
    if not builds:
        return f"llama.cpp {version} has no {_shown(kind)} build for {arch} there"
    floor = _OLD_FLOOR if arch == "x64" else _NEW_FLOOR
    what = "this build" if kind == "cpu" else f"the {_shown(kind)} build"
    return too_old(what, facts, floor) or Choice(kind, "", builds[0].tag, builds[0].asset)


def _cuda(
    version: str,
    arch: str,
    facts: NodeFacts,
    listed: list[_Listed],
    assets: Sequence[Asset],
    *,
    asked_for: bool,
) -> Choice | str:
    driver = facts.nvidia.driver
    if driver.value is Truth.NO:
        return f"the CUDA build needs an NVIDIA driver, {driver.words}" if asked_for or facts.gpus != () else ""
    if driver.value is Truth.UNKNOWN:
        return f"whether the CUDA build would run is not known, {driver.words}"
    builds = [each for each in listed if each.kind == "cuda" and numbers(each.label)]
    if not builds:
        return f"llama.cpp {version} has no CUDA build for {arch} there"
    old = too_old("the CUDA build", facts, _NEW_FLOOR)
    if old:
        return old
    fitting = _driver_fits(facts, builds)
    if isinstance(fitting, str):
        return fitting
    runtime = next(
        (
            asset
            for asset in assets
            if (match := _RUNTIME.fullmatch(asset.name))
            and (match["tag"], match["label"], match["arch"]) == (fitting.tag, fitting.label, arch)
        ),
        None,
    )
    if runtime is None:
        return f"the CUDA {fitting.label} build has no runtime archive (`cudart-…`) there"
    return Choice("cuda", fitting.label, fitting.tag, fitting.asset, runtime)


def _driver_fits(facts: NodeFacts, builds: list[_Listed]) -> _Listed | str:
    """The build with the highest CUDA label the driver and every card can run, else why there is none."""
    caps = {gpu.compute_cap for gpu in facts.gpus or () if gpu.compute_cap and not gpu.faulty}
    by_label = sorted(builds, key=lambda each: numbers(each.label), reverse=True)
    labels = ", ".join(each.label for each in by_label)
    has = facts.nvidia.cuda
    if has is None:
        return f"the CUDA build ({labels}) was not chosen, which CUDA version the driver supports is not known"
    old_cards = sorted(cap for cap in caps if numbers(cap) < (7, 5))
    able = [each for each in by_label if numbers(each.label) <= numbers(has)]
    suited = [each for each in able if numbers(each.label)[0] < 13 or not old_cards]
    if suited:
        return suited[0]
    if able:
        return f"the CUDA builds ({labels}) do not carry a GPU of compute capability {old_cards[0]}"
    lowest = by_label[-1]
    # minor-version compatibility: machine code runs on any driver of the same major, which ours must unpack (550)
    driver = numbers(facts.nvidia.version or "")
    if caps and caps <= _REAL_CODE and driver >= (550,) and numbers(lowest.label)[0] == numbers(has)[0]:
        return lowest
    return f"the CUDA builds need a driver for CUDA {lowest.label}, this node's supports {has}"


def numbers(text: str) -> tuple[int, ...]:
    """`13.3` as (13, 3), to compare by; () when it is not a version."""
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
