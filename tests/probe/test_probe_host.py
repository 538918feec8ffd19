from __future__ import annotations

import os
import platform

import pytest
from probe_fakes import RecordedSmi, make_tree

from llmgw.probe import host
from llmgw.probe.libraries import Libraries, parse_ldconfig
from llmgw.probe.tree import Tree
from llmgw.system.commands import Completed, RealRunner

UBUNTU = 'PRETTY_NAME="Ubuntu 24.04.2 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n'
ROCKY = (
    'NAME="Rocky Linux"\nVERSION_ID="9.5"\nID="rocky"\nID_LIKE="rhel centos fedora"\nPRETTY_NAME="Rocky Linux 9.5"\n'
)
LDCONFIG = (
    "3 libs found in cache `/etc/ld.so.cache'\n"
    "\tlibstdc++.so.6 (libc6) => /usr/lib/i386-linux-gnu/libstdc++.so.6\n"
    "\tlibstdc++.so.6 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libstdc++.so.6\n"
    "\tlibc.so.6 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/x86_64-linux-gnu/libc.so.6\n"
)


@pytest.mark.parametrize(
    ("os_id", "like", "family"),
    [
        ("debian", [], "debian"),
        ("ubuntu", ["debian"], "debian"),
        ("pop", ["ubuntu", "debian"], "debian"),
        ("fedora", [], "rhel"),
        ("rocky", ["rhel", "centos", "fedora"], "rhel"),
        ("amzn", ["fedora"], "rhel"),
        ("ol", [], "rhel"),
        ("opensuse-leap", ["suse", "opensuse"], "suse"),
        ("opensuse-tumbleweed", [], "suse"),
        ("sles", [], "suse"),
        ("endeavouros", ["arch"], "arch"),
        ("alpine", [], "alpine"),
        ("void", [], None),
    ],
)
def test_the_package_family_follows_id_then_like(os_id, like, family):
    assert host.family_of(os_id, like) == family


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("ldd (Debian GLIBC 2.36-9+deb12u9) 2.36\nCopyright (C) 2022", "2.36"),
        ("ldd (Ubuntu GLIBC 2.39-0ubuntu8.4) 2.39\n", "2.39"),
        ("ldd (GNU libc) 2.34\n", "2.34"),
        ("musl libc (x86_64)\nVersion 1.2.4\n", None),
        ("", None),
    ],
)
def test_glibc_is_read_from_ldd_and_musl_has_none(text, version):
    assert host.parse_ldd_version(text) == version


def test_the_highest_glibcxx_is_by_number_not_by_spelling():
    data = b"\0GLIBCXX_3.4.9\0GLIBCXX_3.4.32\0GLIBCXX_3.4.4\0GLIBCXX_DEBUG_MESSAGE_LENGTH\0CXXABI_1.3.15\0"
    assert host.highest_glibcxx(data) == "3.4.32"
    assert host.highest_glibcxx(b"nothing") is None


def test_ldconfig_entries_of_another_architecture_are_left_out():
    assert parse_ldconfig(LDCONFIG, "x86_64") == {
        "libstdc++.so.6": "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
        "libc.so.6": "/lib/x86_64-linux-gnu/libc.so.6",
    }
    assert parse_ldconfig(LDCONFIG, "aarch64") == {}


def test_a_made_ubuntu_is_described_from_its_tree_alone(tmp_path):
    root = make_tree(
        tmp_path,
        {
            "/etc/os-release": UBUNTU,
            "/proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
            "/usr/bin/ldd": "",
            "/sbin/ldconfig": "",
            "/usr/lib/x86_64-linux-gnu/libstdc++.so.6": "GLIBCXX_3.4\0GLIBCXX_3.4.33\0",
        },
    )

    def others(argv):
        return Completed(tuple(argv), 0, "ldd (GNU libc) 2.39\n" if argv[0].endswith("ldd") else LDCONFIG, "")

    tree, runner = Tree(root), RecordedSmi(others=others)
    facts = host.os_facts(tree, runner, Libraries(tree, runner, "x86_64"))
    assert (facts.id, facts.version, facts.name) == ("ubuntu", "24.04", "Ubuntu 24.04.2 LTS")
    assert (facts.family, facts.kernel, facts.immutable) == ("debian", "6.8.0-60-generic", False)
    assert (facts.glibc, facts.libstdcxx) == ("2.39", "3.4.33")


@pytest.mark.parametrize(
    "files",
    [
        {"/etc/os-release": "ID=nixos\n"},
        {"/etc/os-release": 'ID="talos"\n'},
        {"/etc/os-release": 'ID="opensuse-microos"\nID_LIKE="suse opensuse"\n'},
        {"/etc/os-release": ROCKY, "/run/ostree-booted": ""},
    ],
)
def test_an_immutable_system_takes_no_packages(tmp_path, files):
    tree = Tree(make_tree(tmp_path, files))
    facts = host.os_facts(tree, RecordedSmi(), Libraries(tree, RecordedSmi(), "x86_64"))
    assert facts.immutable
    assert facts.family is None


def test_unknown_stays_none_in_an_empty_tree(tmp_path):
    tree = Tree(str(tmp_path))
    facts = host.os_facts(tree, RecordedSmi(), Libraries(tree, RecordedSmi(), "x86_64"))
    assert facts.id == "unknown"
    assert (facts.version, facts.glibc, facts.libstdcxx, facts.kernel, facts.family) == (None,) * 5
    assert host.boot_id(tree) == "unknown"


def test_without_a_boot_id_the_boot_time_stands_in(tmp_path):
    first = host.boot_id(Tree(make_tree(tmp_path, {"/proc/stat": "cpu 1 2\nbtime 1700000000\n"})))
    second = host.boot_id(Tree(make_tree(tmp_path, {"/proc/stat": "cpu 1 2\nbtime 1700000001\n"})))
    assert first.startswith("btime-")
    assert first != second


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_this_machines_glibc_agrees_with_its_own_ldd():
    said = RealRunner().run(["ldd", "--version"], timeout_s=10).stdout
    assert host.glibc_version(Tree(), RealRunner()) == host.parse_ldd_version(said)
    assert host.hostname(Tree()) == os.uname().nodename
