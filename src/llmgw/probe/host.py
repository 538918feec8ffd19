"""The operating system: distribution, package family, libraries' versions, boot."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterable

import distro

from llmgw.domain.facts import OsFacts
from llmgw.errors import CommandError
from llmgw.probe.libraries import Libraries
from llmgw.probe.tree import Tree
from llmgw.system.commands import Runner

_FAMILIES = {
    "debian": "debian", "ubuntu": "debian", "raspbian": "debian", "linuxmint": "debian",
    "rhel": "rhel", "fedora": "rhel", "centos": "rhel", "rocky": "rhel", "almalinux": "rhel", "ol": "rhel",
    "oracle": "rhel", "amzn": "rhel", "amazon": "rhel", "cloudlinux": "rhel",
    "suse": "suse", "opensuse": "suse", "sles": "suse", "sled": "suse", "sle-micro": "suse",
    "arch": "arch", "archarm": "arch", "manjaro": "arch",
    "alpine": "alpine",
}  # fmt: skip
_IMMUTABLE = {
    "talos", "flatcar", "nixos", "bottlerocket", "coreos", "steamos", "sle-micro", "opensuse-microos",
    "opensuse-aeon", "opensuse-kalpa", "opensuse-leap-micro",
}  # fmt: skip
_GLIBCXX = re.compile(rb"GLIBCXX_(\d+(?:\.\d+)+)")
_LIBRARY_CAP = 32 << 20


def family_of(os_id: str, like: Iterable[str]) -> str | None:
    """How packages are installed: `debian`, `rhel`, `suse`, `arch`, `alpine`; None when no family is known.

    Args:
        os_id: os-release ID.
        like: os-release ID_LIKE, closest first.
    """
    for name in (os_id, *like):
        if name in _FAMILIES:
            return _FAMILIES[name]
        if name.startswith("opensuse"):
            return "suse"
    return None


def parse_ldd_version(text: str) -> str | None:
    """The glibc version in the output of `ldd --version`; None for musl and anything else.

    The first line is `ldd (Debian GLIBC 2.36-9+deb12u9) 2.36` or `ldd (GNU libc) 2.34`.
    """
    line = text.strip().split("\n", 1)[0]
    match = re.fullmatch(r"ldd \(.*\) (\d+\.\d+)", line.strip())
    return match[1] if match else None


def highest_glibcxx(data: bytes) -> str | None:
    """The highest `GLIBCXX_x.y.z` among the version strings of a libstdc++, without the prefix."""
    versions = {match.decode() for match in _GLIBCXX.findall(data)}
    return max(versions, key=lambda version: tuple(int(part) for part in version.split(".")), default=None)


def os_facts(tree: Tree, runner: Runner, libraries: Libraries) -> OsFacts:
    """Look at the distribution, the kernel and the C and C++ libraries."""
    release = distro.LinuxDistribution(
        include_lsb=False,
        include_uname=False,
        include_oslevel=False,
        root_dir=None if tree.real else tree.root,
    )
    os_id = release.id() or "unknown"
    immutable = os_id in _IMMUTABLE or tree.exists("/run/ostree-booted")
    family = None if immutable else family_of(os_id, release.like().split())
    return OsFacts(
        id=os_id,
        version=release.version() or None,
        name=release.name(pretty=True).strip() or None,
        family=family,
        kernel=tree.text("/proc/sys/kernel/osrelease") or None,
        glibc=glibc_version(tree, runner),
        libstdcxx=libstdcxx_version(tree, libraries),
        immutable=immutable,
    )


def glibc_version(tree: Tree, runner: Runner) -> str | None:
    """Version of the node's glibc such as `2.36`, None on musl or when nothing tells."""
    if tree.real:
        try:
            name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        except (ValueError, OSError):  # musl does not know the name
            name = version = ""
        if name == "glibc" and version:
            return version
    for program in ("/usr/bin/ldd", "/bin/ldd"):
        if not tree.exists(program):
            continue
        try:
            return parse_ldd_version(runner.run([str(tree.path(program)), "--version"], timeout_s=10.0).stdout)
        except CommandError:
            continue
    return None


def libstdcxx_version(tree: Tree, libraries: Libraries) -> str | None:
    """Highest GLIBCXX version of the node's libstdc++, None when there is none."""
    found = libraries.find("libstdc++.so.6")
    if found is None:
        return None
    try:
        with tree.path(found).open("rb") as handle:
            return highest_glibcxx(handle.read(_LIBRARY_CAP))
    except OSError:
        return None


def boot_id(tree: Tree) -> str:
    """What changes at each boot: the kernel's boot id, else one made of the boot time, else `unknown`."""
    own = tree.text("/proc/sys/kernel/random/boot_id")
    if own:
        return own
    match = re.search(r"^btime (\d+)$", tree.text("/proc/stat") or "", re.MULTILINE)
    return f"btime-{hashlib.sha256(match[1].encode()).hexdigest()[:16]}" if match else "unknown"


def hostname(tree: Tree) -> str:
    """The kernel's host name."""
    return tree.text("/proc/sys/kernel/hostname") or socket.gethostname()
