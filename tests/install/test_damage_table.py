"""Every way a build was ever found damaged: never ready, always in the words of its fix, repaired where it can be.

The build is the real one of the package index, as a release archive. `libgomp1` absent is in tests/cluster: there a
node really lacks it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from install_fakes import DEBIAN, Shelf, facts
from install_small import NoPackages, pipeline

from llmgw.agent.converge import Converge
from llmgw.domain.engines import EngineSpec, EngineState, EngineStatus
from llmgw.domain.facts import NodeFacts
from llmgw.install.prove import Prover
from llmgw.providers.llamacpp import LlamaCpp
from llmgw.providers.registry import Registry
from llmgw.system.clock import RealClock
from llmgw.system.commands import RealRunner
from llmgw.system.http import Http

Until = Callable[..., object]
Damage = Callable[[Path], None]


class Node:
    """A converge that keeps every sentence it published."""

    def __init__(self, root: Path, shelf: Shelf, http: Http, system: NodeFacts) -> None:
        self.told: list[EngineStatus] = []
        clock = RealClock()
        self.converge = Converge(
            (),
            Registry({"llama.cpp": LlamaCpp()}),  # type: ignore[dict-item]
            pipeline(root, shelf, Prover(RealRunner(), http, clock), NoPackages(), clock),
            lambda probe, *, quick: pytest.fail("nothing is named"),  # type: ignore[arg-type]
            lambda: system,
            frozenset,
            clock,
            self._changed,
            jitter=lambda: 1.0,
        )
        self.converge.start()

    def _changed(self) -> None:
        self.told.extend(self.converge.statuses())

    def seen(self, state: EngineState, since: int = 0) -> EngineStatus | None:
        return next((each for each in self.told[since:] if each.state is state), None)


@pytest.fixture(scope="module")
def http() -> Iterator[Http]:
    with Http() as made:
        yield made


def copied(tree: Path, target: Path) -> Path:
    """The build with its big files shared and its links kept: a damage replaces what it changes."""
    shutil.copytree(tree, target, symlinks=True, copy_function=os.link)
    return target


def own(path: Path) -> Path:
    """A file of this copy alone."""
    data, mode = path.read_bytes(), path.stat().st_mode
    path.unlink()
    path.write_bytes(data)
    path.chmod(mode)
    return path


def packed(tree: Path, directory: Path, tag: str) -> Shelf:
    directory.mkdir()
    with tarfile.open(directory / f"llama-{tag}-bin-ubuntu-x64.tar.gz", "w:gz", compresslevel=0) as out:
        out.add(tree, f"llama-{tag}")
    return Shelf(directory)


def no_cpu_backend(tree: Path) -> None:
    for path in tree.glob("libggml-cpu*.so*"):
        path.unlink()


def cut_library(tree: Path) -> None:
    path = own(tree / "libllama.so.0.1.0")
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size // 2)


def empty_library(tree: Path) -> None:
    own(tree / "libggml-base.so.0.20.0").write_bytes(b"")


def no_execute_bit(tree: Path) -> None:
    own(tree / "llama-server").chmod(0o640)


def corrupt_links(tree: Path) -> None:
    (tree / "libggml.so.0").unlink()
    (tree / "libggml.so.0").symlink_to("llama-b9165ibggml.so.0.20.0")


def crossed_links(tree: Path) -> None:
    """A link that leads to a file of the build, but to the wrong one."""
    (tree / "libllama.so.0").unlink()
    (tree / "libllama.so.0").symlink_to("libmtmd.so.0.1.0")


def newer_glibc(tree: Path) -> None:
    path = own(tree / "libllama-common.so.0.1.0")
    data = path.read_bytes()
    assert b"GLIBC_2.34\0" in data
    path.write_bytes(data.replace(b"GLIBC_2.34\0", b"GLIBC_2.99\0"))


def other_machine(tree: Path) -> None:
    path = own(tree / "llama-server")
    data = bytearray(path.read_bytes())
    data[18:20] = b"\xb7\x00"
    path.write_bytes(data)


def nothing(tree: Path) -> None:
    pass


SOURCE = "the archive is wrong at its source: tell whoever publishes it, or name another source in server.yaml"
OLD = facts(system=attrs.evolve(DEBIAN, glibc="2.31", libstdcxx="3.4.28"))
AT_INSTALL: dict[str, tuple[Damage, str, NodeFacts, str, str]] = {
    "all CPU backends removed": (
        no_cpu_backend, "b1", facts(), r"no file matches `libggml-cpu\*\.so\*`, which this build must have", SOURCE,
    ),
    "one library cut short": (
        cut_library, "b1", facts(), r"`libllama\.so\.0\.1\.0` is cut short: it has \d+ of \d+ bytes", SOURCE,
    ),
    "one library empty": (
        empty_library, "b1", facts(), r"`libggml-base\.so\.0\.20\.0` is not an ELF file", SOURCE,
    ),
    "execute bit lost": (
        no_execute_bit, "b1", facts(), r"`llama-server` has no execute bit in its archive \(mode 0644\)", SOURCE,
    ),
    "links with corrupt targets": (
        corrupt_links, "b1", facts(),
        r"the archive is refused because of its member `llama-b1/libggml\.so\S*`: it is a link that does not lead to a",
        "tell whoever publishes it, or name another source in server.yaml",
    ),
    "a link to another library": (
        crossed_links, "b1", facts(), r"--version exited 127 \(a library or the program itself is missing\): \S*llama-",
        "run `ldd` on the program",
    ),
    "built for a newer glibc": (
        newer_glibc, "b1", facts(), r"this build needs GLIBC_2\.99, this node has 2\.36",
        "use a build made for an older distribution",
    ),
    "the node's glibc too old": (
        nothing, "b1", OLD, r"this build needs GLIBC_2\.34, this node has 2\.31",
        "allow another build or source in server.yaml, or name a binary of your own in agent.yaml",
    ),
    "for another machine": (
        other_machine, "b1", facts(), r"`llama-server` is built for aarch64, this node is x86_64", SOURCE,
    ),
    "another build number": (
        nothing, "b2", facts(), r"--version did not answer as this build must: it said 'version: .*build 1,.*b?2",
        "the archive holds another build than its name says: name another version or source in server.yaml",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AT_INSTALL)
def test_a_damaged_build_is_failed_in_the_words_of_its_fix(
    case: str, real_engine_dir: Path, tmp_path: Path, http: Http, until: Until
) -> None:
    damage, tag, system, words, fix = AT_INSTALL[case]
    tree = copied(real_engine_dir, tmp_path / "tree")
    if not words.startswith("--version"):
        # 52 MB that only a build that comes as far as running would miss
        for path in (*tree.glob("libggml-vulkan.so*"), *tree.glob("libvulkan.so*")):
            path.unlink()
    damage(tree)
    node = Node(tmp_path / "engines", packed(tree, tmp_path / "release", tag), http, system)
    try:
        node.converge.set_desired((EngineSpec("llama.cpp", tag, sources=("shelf",)),))
        found = until(lambda: node.seen(EngineState.FAILED), 60, "failed")
    finally:
        node.converge.stop()
    assert isinstance(found, EngineStatus)
    assert re.search(f"^failed: {words}", found.words), found.words
    assert fix
    assert f"({fix}" in found.words
    assert "; next try at " in found.words
    assert node.seen(EngineState.READY) is None
    assert not found.usable
    assert node.converge.engine("llama.cpp", tag) is None
    if case.endswith(("glibc", "machine", "short", "removed")):
        assert not any("proving" in each.words for each in node.told), "said before anything is run"
    assert sorted(path.name for path in (tmp_path / "engines").iterdir() if path.name != ".downloads") == [
        ".lock",
        ".records",
    ]


LATER: dict[str, tuple[Damage, str]] = {
    "all CPU backends removed": (no_cpu_backend, r"`libggml-cpu\S*` is gone from `"),
    "one library cut short": (
        cut_library,
        r"`libllama\.so\.0\.1\.0` in `\S+` has changed .*: it has \d+ bytes, not \d+",
    ),
    "execute bit lost": (
        no_execute_bit,
        r"`llama-server` in `\S+` has changed .*: its mode is 0640, not 0755 \(its execute bit is lost\)",
    ),
    "links with corrupt targets": (
        corrupt_links,
        r"`libggml\.so\.0` in `\S+` has changed since it was proven: it leads to 'llama-b9165ibggml",
    ),
}


def test_damage_of_an_installed_build_is_broken_in_words_and_repaired(
    release_dir: Path, tmp_path: Path, http: Http, until: Until
) -> None:
    node = Node(tmp_path / "engines", Shelf(release_dir), http, facts())
    try:
        node.converge.set_desired((EngineSpec("llama.cpp", "b1", sources=("shelf",)),))
        until(lambda: node.seen(EngineState.READY), 60, "ready")
        tree = tmp_path / "engines/llama.cpp/b1-cpu"
        whole = digest(tree)
        for case, (damage, words) in LATER.items():
            since = len(node.told)
            damage(tree)
            node.converge.recheck_now()
            broken = until(lambda: node.seen(EngineState.BROKEN, since), 60, f"{case}: broken")  # noqa: B023
            assert isinstance(broken, EngineStatus)
            assert re.search(f"^broken: {words}", broken.words), (case, broken.words)
            assert not broken.usable
            until(lambda: node.seen(EngineState.READY, since), 60, f"{case}: repaired")  # noqa: B023
            assert digest(tree) == whole, case
    finally:
        node.converge.stop()


def digest(tree: Path) -> str:
    made = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        made.update(f"{path.name} {path.lstat().st_mode:o} {path.readlink() if path.is_symlink() else ''}\n".encode())
        if not path.is_symlink() and path.stat().st_size < 5_000_000:
            made.update(path.read_bytes())
    return made.hexdigest()
