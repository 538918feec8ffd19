"""What makes a machine unfit, or a release suspect, is said in words, and nothing is changed on the machine."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from conftest_packaging import find_interpreter

pytestmark = pytest.mark.timeout(120)

FAKE_UNAME = '#!/bin/sh\n[ "$1" = -m ] && { echo riscv64; exit; }\nexec /usr/bin/uname "$@"\n'
FAKE_CAT = "#!/bin/sh\n/usr/bin/head -c 1000000\n"


@pytest.fixture
def refused(make_node, offline):
    """Prepare a node with a script, try to onboard it, and see that nothing has changed since."""

    def run(prepare="", *more, user="root", before=None):
        node = make_node("bare", "plain")
        node.sh(prepare or "true")
        if before is not None:
            before(node)
        was = node.changed()
        done = offline.onboard(node, *more, user=user, code=1)
        assert node.changed() == was
        assert "Traceback" not in done.stderr
        return done.stderr

    return run


def put(path: str, text: str) -> str:
    return f"printf %s {text!r} >/dev/null; cat >{path} <<'END'\n{text}END\nchmod 755 {path}"


def test_another_host_key(refused):
    def other(node):
        key = node.keys / "other"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        node.trust(key.with_suffix(".pub").read_text())

    said = refused(before=other)
    assert "is not trusted" in said
    assert "not the one that is known" in said


def test_an_unknown_host_key_is_not_taken(refused):
    said = refused(before=lambda node: node.known_hosts.write_text(""))
    assert "its host key is not known" in said
    assert "ssh-keygen -lf" in said


def test_a_tampered_file(refused, offline, pyz):
    file = offline.release / pyz.name
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    said = refused()
    assert "sha256" in said
    assert hashlib.sha256(data).hexdigest() in said


def test_a_file_whose_sum_is_another(refused, offline, pyz):
    (offline.release / "SHA256SUMS").write_text(f"{'0' * 64}  {pyz.name}\n")
    said = refused()
    assert "0" * 64 in said


def test_a_file_that_does_not_arrive_whole_on_the_node(refused):
    said = refused(put("/usr/local/bin/cat", FAKE_CAT).replace("cat >", "/usr/bin/cat >"))
    assert "install" in said
    assert "what arrived has sha256" in said


def test_an_architecture_without_a_release(refused):
    said = refused(put("/usr/local/bin/uname", FAKE_UNAME))
    assert "riscv64" in said
    assert "x86_64 and aarch64" in said


def test_a_user_who_may_not_become_root(refused):
    said = refused("useradd -m -s /bin/sh -p '*' plain", user="plain")
    assert "not root" in said
    assert "sudo" in said


def test_a_python_that_is_too_old(refused):
    old = find_interpreter("3.9") or ""
    link = f"; ln -s {old} /usr/local/bin/python3" if old and not old.startswith(sys.prefix) else ""
    said = refused(f"rm -f /usr/bin/python3* /usr/local/bin/python3*{link}; chmod 755 /root")
    assert "needs Python 3.11" in said
    assert ("found 3.9" if link else "found none") in said


def test_a_version_that_is_not_there(refused, offline):
    said = refused("", "--version", "9.9.9")
    assert "9.9.9" in said
    assert "not published" in said


def test_no_ca_is_said_before_the_machine_is_asked(refused, offline):
    for path in offline.pki.iterdir():
        path.unlink()
    assert "ca.pem" in refused() or "ca-key.pem" in refused()


@pytest.mark.parametrize("target", ["-oProxyCommand=touch /tmp/x", "root@-x", "a b", "root@host;id", "x@y@z", "$(id)"])
def test_a_target_that_could_be_taken_for_an_option(offline, target):
    argv = ["onboard", "--agents-at", "https://x:7443", "--pki", offline.pki, "--from", offline.release, "--", target]
    done = offline.ctl(*argv, code=2)
    assert "is not a machine to log in to" in done.stderr
