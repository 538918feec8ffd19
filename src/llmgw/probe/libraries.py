"""Where the dynamic loader finds a library, without starting anything that uses it."""

from __future__ import annotations

import re

from llmgw.errors import CommandError
from llmgw.probe.tree import Tree
from llmgw.system.commands import Runner

_LINE = re.compile(r"^\s*(\S+) \(([^)]*)\) => (/\S+)", re.MULTILINE)
_LABEL = {"x86_64": "x86-64", "aarch64": "AArch64"}
_LDCONFIG = ("/sbin/ldconfig", "/usr/sbin/ldconfig")
# beyond the distributions' own: WSL, NixOS, Talos, Jetson, containers
_DIRS = (
    "/lib/{multiarch}", "/usr/lib/{multiarch}", "/lib64", "/usr/lib64", "/usr/lib", "/lib", "/usr/local/lib",
    "/usr/lib/{multiarch}/nvidia", "/usr/lib/{multiarch}/tegra", "/usr/lib/wsl/lib", "/run/opengl-driver/lib",
    "/usr/local/glibc/lib", "/usr/local/nvidia/lib64",
)  # fmt: skip


def parse_ldconfig(text: str, arch: str) -> dict[str, str]:
    """`ldconfig -p` as soname -> path; the first entry of this architecture wins, as it does for the loader.

    Args:
        arch: machine name such as `x86_64`; an unknown one accepts every entry.
    """
    wanted = _LABEL.get(arch)
    found: dict[str, str] = {}
    for soname, labels, path in _LINE.findall(text):
        if wanted is None or wanted in labels:
            found.setdefault(soname, path)
    return found


class Libraries:
    """Looks libraries up in the loader's cache, then in the usual directories. The cache is read once."""

    def __init__(self, tree: Tree, runner: Runner, arch: str) -> None:
        self._tree = tree
        self._runner = runner
        self._arch = arch
        self._cache: dict[str, str] | None = None

    def find(self, soname: str) -> str | None:
        """Absolute path of `soname` as seen on the node, None when the loader would not find it."""
        if self._cache is None:
            self._cache = self._read_cache()
        cached = self._cache.get(soname)
        if cached is not None and self._tree.exists(cached):
            return cached
        for directory in _DIRS:
            candidate = f"{directory.format(multiarch=f'{self._arch}-linux-gnu')}/{soname}"
            if self._tree.exists(candidate):
                return candidate
        return None

    def _read_cache(self) -> dict[str, str]:
        for program in _LDCONFIG:
            if not self._tree.exists(program):
                continue
            try:
                done = self._runner.run([str(self._tree.path(program)), "-p"], timeout_s=10.0)
            except CommandError:
                continue
            if done.code == 0:
                return parse_ldconfig(done.stdout, self._arch)
        return {}
