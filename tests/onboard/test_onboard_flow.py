"""A bare machine becomes a node that serves, is upgraded while it answers, and becomes a bare machine again."""

from __future__ import annotations

import json

import pytest
from onboard_operator import times

import llmgw

pytestmark = [pytest.mark.flow, pytest.mark.timeout(240)]


def test_a_bare_machine_with_systemd_serves_after_one_command(make_node, server, operator, capfd):
    node = make_node("bare-1")
    done = operator.onboard(node, "--label", "rack=r1", server=server)

    took = times(done)
    assert list(took) == ["look", "install", "certificate", "configure", "service", "wait"]
    with capfd.disabled():
        print(f"\nonboarding: {' '.join(f'{stage} {seconds:.1f} s' for stage, seconds in took.items())}")
    listed = json.loads(server.ctl("nodes", "-o", "json").stdout)["nodes"][0]
    assert listed["node_id"] == "bare-1"
    assert listed["presence"] == "connected"
    assert listed["version"] == llmgw.__version__
    assert listed["facts"]["labels"] == {"rack": "r1"}
    assert [e["state"] for e in listed["engines"]] == ["ready"]
    assert listed["engines"][0]["words"] in done.stderr, "the node's own words are shown while it is waited for"
    assert node.sh("systemctl is-active llmgw-agent; systemctl is-enabled llmgw-agent").split() == ["active", "enabled"]
    assert "key" not in " ".join(p.name for p in operator.pki.glob("bare-1*")), "the node's key never leaves it"
    assert node.sh("stat -c %a /etc/llmgw/agent-key.pem").strip() == "600"

    # the same command again finds everything done, and disturbs nothing
    pid = node.sh("systemctl show -p MainPID --value llmgw-agent")
    again = operator.onboard(node, "--label", "rack=r1", server=server)
    assert "is there" in again.stderr
    assert "as it should be" in again.stderr
    assert node.sh("systemctl show -p MainPID --value llmgw-agent") == pid

    # it serves; and after offboarding nothing of llmgw is left but engines and weights
    server.apply(name="tiny", model="tiny.gguf", context=256, slots=1)
    server.await_model("tiny")
    assert server.chat("tiny")[0] == 200
    operator.ctl("offboard", "bare-1")
    assert node.sh("pgrep -c llama-server", check=False).strip() == "0"
    left = [path for path in node.changed() if "llmgw" in path and not path.startswith("opt/llmgw/engines/")]
    assert [path for path in left if not node.changed()[path].startswith("20000 ")] == []


def test_a_user_with_sudo_and_a_machine_without_systemd(make_node, server, operator):
    node = make_node("bare-2", "plain")
    if "sudo" not in node.sh("command -v sudo", check=False):
        pytest.skip("sudo is not installed here")
    node.sh("useradd -m -s /bin/sh -p '*' op; echo 'op ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/op")
    done = operator.onboard(node, server=server, user="op")
    assert "nothing starts the agent after a reboot" in done.stderr
    assert "started the agent for now" in done.stderr
    assert server.engine("bare-2")["state"] == "ready"


def test_several_machines_at_once_and_one_that_cannot(make_node, offline):
    good, bad = make_node("good", "plain"), make_node("bad", "plain")
    bad.sh("rm -f /usr/bin/python3*")
    both = offline.home / "both"
    both.write_text(
        "".join(
            f"Host {n.name}\nHostName 127.0.0.1\nPort {n.port}\nHostKeyAlias node-{n.name}\n"
            f"IdentityFile {n.keys}/user\nIdentitiesOnly yes\nUserKnownHostsFile {offline.home}/known\n"
            for n in (good, bad)
        )
    )
    (offline.home / "known").write_text(
        "".join(f"node-{n.name} {(n.keys / 'host.pub').read_text()}" for n in (good, bad))
    )
    argv = ["onboard", "root@good", "root@bad", "-F", both, "--agents-at", "https://127.0.0.1:1", "--pki", offline.pki]
    done = offline.ctl(*argv, "--from", offline.release, "--agent-yaml", offline.extra, "--wait", "0s", code=1)
    assert "1 of 2 machines are not nodes yet" in done.stderr
    assert "root@bad   failed at look: " in done.stderr
    assert "agent   running" in good.sh("/usr/local/bin/llmgw agent status")
    assert not [path for path in bad.changed() if "llmgw" in path]
