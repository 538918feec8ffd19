"""agent.yaml and server.yaml."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llmgw.agent import settings as agent
from llmgw.config import HostPort, ServerUrl
from llmgw.domain.engines import EngineSpec, NamedEngine
from llmgw.errors import ConfigError
from llmgw.server import settings as server

SEED = Path(__file__).with_name("agent_seed.yaml")


def agent_problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        agent.loads(text, "agent.yaml")
    return list(caught.value.problems)


def server_problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        server.loads(text, "server.yaml")
    return list(caught.value.problems)


def test_the_full_agent_file_is_accepted_as_it_stands() -> None:
    read = agent.load(SEED)
    assert read.servers == (ServerUrl(False, "llmgw-server.internal", 7443),)
    assert (read.heartbeat_interval_s, read.reconnect_base_s, read.reconnect_max_s) == (5.0, 1.0, 30.0)
    assert read.fabrics == (agent.Fabric(name="ib-a", hcas=("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), rate_gbps=200.0),)
    assert read.discovery == agent.Discovery(nvidia_smi="", ib_root="/sys/class/infiniband", prefer_nvml=True)
    assert read.named == (
        NamedEngine(
            "vllm",
            {"bin": "/opt/venvs/vllm/bin/vllm", "launch_mode": "ray", "ray_bin": "/opt/venvs/vllm/bin/ray"},
        ),
        NamedEngine("sglang", {"python": "/opt/venvs/sglang/bin/python"}),
    )
    assert read.supervisor == agent.Supervisor(
        work_dir="/var/lib/llmgw-agent", log_lines=512, stop_timeout_s=60.0, health_interval_s=2.0
    )
    assert read.node_id == socket.gethostname()
    assert [w for w in read.warnings if "without TLS" in w]


def test_the_optional_keys_of_the_full_agent_file_are_accepted_too() -> None:
    text = SEED.read_text()
    head, _, rest = text.partition("# Optional keys:\n")
    optional = "".join(line.removeprefix("# ").split("   (then")[0].rstrip() + "\n" for line in rest.splitlines())
    read = agent.loads(head.replace("http://", "https://") + optional, "agent.yaml")
    assert read.tls == agent.TlsFiles(
        ca="/etc/llmgw/ca.pem", cert="/etc/llmgw/agent.pem", key="/etc/llmgw/agent-key.pem"
    )
    assert (read.node_id, read.mgmt_addr, read.mgmt_interface) == ("gpu-a-01", "10.0.0.11", "eth0")
    assert read.labels == {"rack": "r12"}
    assert read.model_dirs == ("/var/lib/llmgw-models", "/mnt/lustre/models")
    assert read.engines_dir == "/opt/llmgw/engines"
    assert read.warnings == ()


def test_one_key_is_enough_for_an_agent() -> None:
    read = agent.loads("server: http://127.0.0.1:7443\nnode_id: n1\n", "agent.yaml")
    assert (read.node_id, read.warnings, read.engines_dir) == ("n1", (), "/opt/llmgw/engines")


def test_an_agent_takes_a_list_of_servers() -> None:
    read = agent.loads("server: [http://127.0.0.1:1, 'http://[::1]:2']\n", "agent.yaml")
    assert [str(s) for s in read.servers] == ["http://127.0.0.1:1", "http://[::1]:2"]


def test_an_agent_never_dials_in_the_clear_without_noticing() -> None:
    tls = "tls: {ca: /a, cert: /b, key: /c}\n"
    assert agent_problems("server: http://h:7443\n" + tls) == [
        "agent.yaml:1: server: is `http://` although `tls` is set: write `https://`, or remove `tls` to dial in the "
        "clear"
    ]
    assert agent_problems("server: https://h:7443\n") == [
        "agent.yaml:1: server: is `https://`, which needs `tls` with `ca`, `cert` and `key`"
    ]
    assert agent_problems("server: [https://h:7443, http://i]\n" + tls)[0].startswith("agent.yaml:1: server[1]: ")
    assert agent.loads("server: https://h:7443\n" + tls, "agent.yaml").warnings == ()


def test_problems_of_an_agent_file_between_keys_and_within_are_told_together() -> None:
    text = """\
server: https://h
node_id: -x-
mgmt_addr: host
mgmt_interface: a/b
heartbeat_intervall: 5s
reconnect_base: 1m
fabrics:
- {name: a, hcas: []}
- {name: a, hcas: [mlx5_0, mlx5_0]}
discovery: {nvidia_smi: nvidia-smi}
engines:
  vllm: {launch_mode: rai, bin: vllm}
  sglang: {pyton: /x}
  llama.cpp: /usr/bin/llama-server
supervisor: {stop_timeout: 1ms, log_lines: 0}
"""
    said = [p.split(": ", 2)[:2] for p in agent_problems(text)]
    assert said == [
        ["agent.yaml:1", "server"],
        ["agent.yaml:2", "node_id"],
        ["agent.yaml:3", "mgmt_addr"],
        ["agent.yaml:4", "mgmt_interface"],
        ["agent.yaml:5", "heartbeat_intervall"],
        ["agent.yaml:6", "reconnect_base"],
        ["agent.yaml:8", "fabrics[0].hcas"],
        ["agent.yaml:9", "fabrics[1].hcas"],
        ["agent.yaml:9", "fabrics[1].name"],
        ["agent.yaml:10", "discovery.nvidia_smi"],
        ["agent.yaml:12", "engines.vllm.launch_mode"],
        ["agent.yaml:12", "engines.vllm.bin"],
        ["agent.yaml:13", "engines.sglang.pyton"],
        ["agent.yaml:13", "engines.sglang.python"],
        ["agent.yaml:14", "engines.llama.cpp"],
        ["agent.yaml:15", "supervisor.stop_timeout"],
        ["agent.yaml:15", "supervisor.log_lines"],
    ]


def test_an_engine_of_a_plugin_is_taken_with_a_warning() -> None:
    read = agent.loads("server: http://localhost\nengines: {tgi: {bin: /opt/tgi, mode: x}}\n", "agent.yaml")
    assert read.named == (NamedEngine("tgi", {"bin": "/opt/tgi", "mode": "x"}),)
    assert "engines.tgi" in read.warnings[0]


def test_checking_a_file_says_that_it_is_valid_and_what_deserves_a_look() -> None:
    said = agent.check(SEED)
    assert said[0] == f"`{SEED}` is valid"
    assert said[1].startswith("warning: server `http://llmgw-server.internal:7443`")
    assert server.check() == ("the defaults are valid",)


def test_a_server_needs_no_file() -> None:
    read = server.load()
    assert read.agents.listen == HostPort("127.0.0.1", 7443)
    assert read.http.listen == HostPort("127.0.0.1", 8080)
    assert (read.state, read.state_dir) == ("/var/lib/llmgw/state.db", Path("/var/lib/llmgw"))
    assert read.http.admin_token_file == "/var/lib/llmgw/admin.token"
    assert read.engine_specs == (EngineSpec("llama.cpp", "b10991", sources=("github",)),)
    assert (read.keys_required, read.profiles_dir, read.warnings) == (False, None, ())
    assert read.gateway == server.GatewaySettings(
        workers=1, queue=64, queue_timeout_s=30.0, first_token_timeout_s=600.0, token_gap_timeout_s=60.0
    )
    assert read.scheduling == server.SchedulingSettings(lost_after=3, mass_loss_fraction=0.55)


def test_every_key_of_the_server_file_is_read() -> None:
    digest = "a" * 64
    read = server.loads(
        f"""
agents: {{listen: "0.0.0.0:7443", tls: {{ca: /ca, cert: /c, key: /k, crl: /crl}}}}
http: {{listen: "0.0.0.0:443", tls: {{cert: /hc, key: /hk}}, admin_token_file: /t}}
state: /srv/llmgw/s.db
engines:
  llama.cpp: b1
  vllm:
    {{version: "0.10", node_selector: {{gpu: "yes"}}, sha256: {{a.tar.gz: {digest}}}, builds: cuda, sources: [pypi]}}
sources: [https://mirror.example/base/, "file:///srv/mirror", github]
profiles_dir: /etc/llmgw/profiles
gateway:
  {{workers: 2, queue: 5, queue_timeout: 1s, first_token_timeout: 2m, token_gap_timeout: 3s, keys_required: true}}
scheduling: {{lost_after: 5, mass_loss_fraction: 0.7}}
""",
        "server.yaml",
    )
    top = ("https://mirror.example/base/", "file:///srv/mirror", "github")
    assert read.engine_specs == (
        EngineSpec("llama.cpp", "b1", sources=top),
        EngineSpec("vllm", "0.10", {"gpu": "yes"}, {"a.tar.gz": digest}, ("cuda",), ("pypi",)),
    )
    assert read.agents.tls == server.AgentTls(ca="/ca", cert="/c", key="/k", crl="/crl")
    assert read.http == server.HttpSettings(
        listen=HostPort("0.0.0.0", 443), tls=server.HttpTls(cert="/hc", key="/hk"), admin_token_file="/t"
    )
    assert (read.state_dir, read.profiles_dir) == (Path("/srv/llmgw"), "/etc/llmgw/profiles")
    assert read.gateway.token_gap_timeout_s == 3.0
    assert read.warnings == ()


def test_the_admin_token_lives_beside_the_state() -> None:
    read = server.loads("state: /srv/x/state.db\n", "server.yaml")
    assert read.http.admin_token_file == "/srv/x/admin.token"


def test_agents_are_not_taken_in_the_clear_off_loopback_unless_asked_for() -> None:
    (said,) = server_problems("agents: {listen: '0.0.0.0:7443'}\n")
    assert said.startswith("server.yaml:1: agents.listen: `0.0.0.0:7443` can be reached by others")
    assert "insecure: true" in said
    read = server.loads("agents: {listen: '0.0.0.0:7443', insecure: true}\n", "server.yaml")
    assert "takes agents without TLS" in read.warnings[0]
    assert server.loads("agents: {listen: 'localhost:7443'}\n", "server.yaml").warnings == ()


def test_keys_are_required_off_loopback_unless_said_otherwise() -> None:
    assert server.loads("http: {listen: '0.0.0.0:80'}\n", "s").keys_required
    read = server.loads("http: {listen: '0.0.0.0:80'}\ngateway: {keys_required: false}\n", "s")
    assert not read.keys_required
    assert any("keys_required is off" in words for words in read.warnings)


def test_a_postgresql_state_is_parsed_and_its_password_shown_nowhere() -> None:
    read = server.loads("state: postgresql://me:hunter2@db/llmgw\n", "server.yaml")
    assert read.postgresql
    assert read.state == "postgresql://me:hunter2@db/llmgw"
    assert "hunter2" not in repr(read)
    assert read.state_dir == Path("/var/lib/llmgw")


def test_problems_of_a_server_file_are_told_together() -> None:
    text = """\
engines:
  llama.cpp: 0.10
  vllm: {builds: [CPU!], sources: []}
  Tgi: v1
  sglang: {version: "1 2", sha256: {a: xyz}}
sources: [githb, http://mirror/, https://u:p@mirror/, file:relative]
state: state.db
gateway: {workers: 0, queue_timeout: 5}
scheduling: {lost_after: 1, mass_loss_fraction: 2}
"""
    said = server_problems(text)
    assert said[0].endswith('expected a version or a map, got the number 0.1, write it in quotes: `"0.10"`')
    assert [p.split(": ", 2)[:2] for p in said] == [
        ["server.yaml:2", "engines.llama.cpp"],
        ["server.yaml:3", "engines.vllm.builds"],
        ["server.yaml:3", "engines.vllm.sources"],
        ["server.yaml:3", "engines.vllm.version"],
        ["server.yaml:4", "engines.Tgi"],
        ["server.yaml:5", "engines.sglang.version"],
        ["server.yaml:5", "engines.sglang.sha256"],
        *(["server.yaml:6", f"sources[{n}]"] for n in range(4)),
        ["server.yaml:7", "state"],
        ["server.yaml:8", "gateway.workers"],
        ["server.yaml:8", "gateway.queue_timeout"],
        ["server.yaml:9", "scheduling.lost_after"],
        ["server.yaml:9", "scheduling.mass_loss_fraction"],
    ]


@pytest.mark.parametrize(
    "source", ["githb", "http://mirror/", "https://u:p@mirror/", "file:relative", "file://host/x", "", "https://"]
)
def test_a_source_that_cannot_be_trusted_or_read_is_refused(source: str) -> None:
    (said,) = server_problems(f"sources: ['{source}']\n")
    assert "u:p" not in said


def test_a_plain_http_mirror_is_taken_on_loopback_only() -> None:
    assert server.loads("sources: ['http://127.0.0.1:9/']\n", "s").sources == ("http://127.0.0.1:9/",)
