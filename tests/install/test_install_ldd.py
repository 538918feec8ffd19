"""`ldd` answers as recorded on Debian 12."""

from __future__ import annotations

import pytest

from llmgw.domain.facts import OsFacts
from llmgw.install.ldd import Linked, joined, parse_ldd, version_words

MISSING = """\tlinux-vdso.so.1 (0x00007f5a1021d000)
\tlibgomp.so.1 => not found
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f5a10025000)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f5a1021f000)
"""
VERSIONS = """./s: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by ./s)
./s: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by ./s)
./s: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.4' not found (required by ./s)
\tlinux-vdso.so.1 (0x00007f45e3771000)
"""


@pytest.mark.parametrize(
    ("stdout", "stderr", "code", "expected"),
    [
        (MISSING, "", 0, Linked(("libgomp.so.1",))),
        (VERSIONS, "", 0, Linked((), ("GLIBCXX_3.4.32", "GLIBC_2.38", "GLIBC_2.4"))),
        (MISSING.replace("=> not found", "=> /lib/libgomp.so.1 (0x0)"), "", 0, Linked()),
        ("", "\tnot a dynamic executable\n", 1, Linked(problem="it is not a dynamic executable of this machine's kind"
         " (another architecture, or damaged)")),
        ("", "./m: error while loading shared libraries: /lib/libc.so: invalid ELF header\n", 1,
         Linked(problem="./m: error while loading shared libraries: /lib/libc.so: invalid ELF header")),
        ("", "ldd: ./nope: No such file or directory\n", 1, Linked(problem="ldd: ./nope: No such file or directory")),
        ("", "", None, Linked(problem="`ldd` gave no answer")),
    ],
)  # fmt: skip
def test_each_recorded_answer_is_understood(stdout: str, stderr: str, code: int | None, expected: Linked) -> None:
    assert parse_ldd(stdout, stderr, code) == expected


def test_answers_are_joined_without_repeats() -> None:
    one, two = Linked(("a", "b")), Linked(("b", "c"), ("GLIBC_2.38",), "broken")
    assert joined([one, two]) == Linked(("a", "b", "c"), ("GLIBC_2.38",), "broken")


def test_the_highest_version_of_each_family_is_told() -> None:
    system = OsFacts("debian", glibc="2.36", libstdcxx="3.4.30")
    words = version_words(("GLIBC_2.4", "GLIBC_2.38", "GLIBC_2.9", "GLIBCXX_3.4.32"), system)
    assert words == (
        "this build needs GLIBC_2.38, this node has 2.36; this build needs GLIBCXX_3.4.32, this node has 3.4.30"
    )


def test_an_unknown_version_of_the_node_is_not_made_up() -> None:
    assert version_words(("GLIBC_2.38",), OsFacts("x")) == "this build needs GLIBC_2.38, this node has an older one"
