"""The server as a hardened systemd service of a bare machine: with mutual TLS, killed, and with a wrong file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from onboard_node import Node

from free_ports import free_port

pytestmark = [pytest.mark.flow, pytest.mark.timeout(240)]

FILE = "/usr/local/lib/llmgw/{}"
LLMGW = f"/usr/bin/python3 {FILE}"


def put(node: Node, pyz: Path) -> str:
    """The executable as a person copies it there; the command that runs it."""
    node.sh("mkdir -p /usr/local/lib/llmgw /etc/llmgw")
    argv = ["ssh", "-F", node.config, "-o", "BatchMode=yes", "--", "root@node", f"cat >{FILE.format(pyz.name)}"]
    with pyz.open("rb") as data:
        subprocess.run(argv, stdin=data, check=True, timeout=120)
    return LLMGW.format(pyz.name)


def test_the_server_serves_as_a_service_with_everything_on(make_node, pyz, tmp_path):
    node = make_node("gw")
    llmgw = put(node, pyz)
    http, agents = free_port(), free_port()
    ctl = f"{llmgw} ctl --server http://127.0.0.1:{http} --token-file /srv/llmgw/admin.token"
    node.sh(
        f"cd /etc/llmgw; {llmgw} ctl cert init --dir pki; {llmgw} ctl cert issue-server localhost --dir pki\n"
        f"{llmgw} ctl cert issue-client n1 --dir pki; cp pki/ca.pem pki/localhost.pem pki/localhost-key.pem .\n"
        "cat >server.yaml <<END\n"
        f"http: {{listen: 127.0.0.1:{http}}}\n"
        f"agents: {{listen: 127.0.0.1:{agents}, tls: {{ca: /etc/llmgw/ca.pem, cert: /etc/llmgw/localhost.pem, "
        "key: /etc/llmgw/localhost-key.pem}}\n"
        "engines: {}\nstate: /srv/llmgw/state.db\ngateway: {access_log: /var/log/llmgw/access.log}\nEND\n"
        f"cat >agent.yaml <<END\nserver: https://localhost:{agents}\nnode_id: n1\nmgmt_addr: 127.0.0.1\n"
        "tls: {ca: /etc/llmgw/ca.pem, cert: /etc/llmgw/pki/n1.pem, key: /etc/llmgw/pki/n1-key.pem}\nEND\n"
    )
    install = f"{llmgw} server -c /etc/llmgw/server.yaml install-service --start 2>&1"

    # a key that is root's is told with the command that helps
    said = node.sh("useradd --system llmgw; " + install, check=False)
    assert "`chown llmgw: /etc/llmgw/localhost-key.pem`, then run it again" in said
    node.sh("chown llmgw: /etc/llmgw/localhost-key.pem")
    assert f"it serves `127.0.0.1:{http}`" in node.sh(install)

    # mutual TLS works in all that hardening, and so does the access log
    node.sh(f"{llmgw} agent -c /etc/llmgw/agent.yaml >/tmp/agent.log 2>&1 &")
    node.sh(until(f"{ctl} nodes | grep -q 'n1 .*connected'"))
    node.sh(f"curl -s http://127.0.0.1:{http}/v1/nothing; {until('[ -s /var/log/llmgw/access.log ]')}")

    # killed, it comes back, and somebody answers all the time
    epoch = f"{ctl} status | grep '^Epoch'"
    before = node.sh(epoch).strip()
    pid = node.sh("systemctl show -p MainPID --value llmgw-server").strip()
    ask = f"curl -s -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{http}/healthz"
    codes = node.sh(f"kill -9 {pid}; for i in $(seq 60); do {ask}; sleep 0.1; done | sort -u")
    assert codes.split() == ["200"]
    node.sh(
        until(f"{epoch} | grep -qv '^{before}$'", "systemctl status llmgw-server; journalctl -n 60 -u llmgw-server")
    )


def until(condition: str, otherwise: str = "true") -> str:
    """A script that waits for a command to succeed; when it never does it shows what `otherwise` says."""
    return f"for i in $(seq 300); do {condition} && exit 0; sleep 0.1; done; {otherwise}; exit 1"


def test_a_service_that_does_not_stay_up_is_told_in_its_own_words(make_node, pyz):
    node = make_node("gw2")
    llmgw = put(node, pyz)
    port = free_port()
    tls = "{ca: /etc/llmgw/closed/ca.pem, cert: /etc/llmgw/c.pem, key: /etc/llmgw/k.pem}"
    node.sh(
        "useradd --system llmgw; cd /etc/llmgw; mkdir -m 700 closed; echo x >closed/ca.pem\n"
        "touch c.pem k.pem; chown llmgw: k.pem; chmod 600 k.pem\n"
        f"cat >server.yaml <<END\nhttp: {{listen: 127.0.0.1:{port}}}\nagents: {{tls: {tls}}}\nEND\n"
    )
    said = node.sh(f"{llmgw} server -c /etc/llmgw/server.yaml install-service --start 2>&1; echo exit $?")
    assert "error: the server is installed and does not stay up" in said
    assert "cause: cannot read `/etc/llmgw/closed/ca.pem`; Permission denied" in said
    assert "exit 1" in said

    # another program at its address is not taken for it
    node.sh(f"printf 'http: {{listen: 127.0.0.1:{port}}}\\n' >/etc/llmgw/server.yaml")
    node.sh(f"/usr/bin/python3 -m http.server {port} --bind 127.0.0.1 >/dev/null 2>&1 &")
    said = node.sh(f"{llmgw} server -c /etc/llmgw/server.yaml install-service --start 2>&1; echo exit $?")
    assert f"cause: cannot listen on `127.0.0.1:{port}`; Address already in use" in said
    assert "exit 1" in said
