"""The systemd units are valid, hold what engines need, and leave the server little."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from llmgw.system import layout

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")


@pytest.fixture
def units(tmp_path):
    program = tmp_path / "llmgw"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    agent = tmp_path / layout.AGENT_UNIT
    agent.write_text(layout.agent_unit([str(program), "agent", "-c", "/etc/llmgw/agent.yaml"]))
    server = tmp_path / layout.SERVER_UNIT
    server.write_text(layout.server_unit([str(program), "server"], user="daemon", state_dir="/var/lib/llmgw"))
    return agent, server


@needs_systemd
def test_systemd_reads_both_units_without_complaint(units):
    for unit in units:
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
        ours = [line for line in done.stderr.splitlines() if unit.name in line]
        assert (done.returncode, ours) == (0, []), done.stderr


@needs_systemd
def test_the_server_is_hardened(units):
    argv = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(units[1])]
    done = subprocess.run(argv, capture_output=True, text=True)
    exposure = re.search(r"Overall exposure level for .*: ([\d.]+)", done.stdout)
    if exposure is None:
        pytest.skip(f"this systemd cannot judge a file: {done.stderr.strip()[:200]}")
    assert float(exposure[1]) < 3.0


def test_the_agents_unit_leaves_engines_alone(units):
    lines = units[0].read_text().splitlines()
    for needed in (
        "KillMode=process", "Delegate=yes", "OOMPolicy=continue", "LimitMEMLOCK=infinity", "TasksMax=infinity",
        "RestartPreventExitStatus=2",
    ):  # fmt: skip
        assert needed in lines
    text = "\n".join(lines)
    for harmful in ("PrivateTmp", "PrivateDevices", "MemoryDenyWriteExecute", "ProtectSystem", "DynamicUser"):
        assert harmful not in text


def test_arguments_with_spaces_and_signs_reach_the_program_as_they_are():
    assert 'ExecStart="/opt/a b/llmgw" agent -c /x/50%%/$$y' in layout.agent_unit(
        ["/opt/a b/llmgw", "agent", "-c", "/x/50%/$y"]
    )


def test_a_hardened_server_may_write_its_access_log_wherever_that_is(tmp_path):
    from click.testing import CliRunner

    from llmgw.server.app import command

    def unit(access_log: str) -> list[str]:
        config = tmp_path / "server.yaml"
        config.write_text(f"gateway: {{access_log: {access_log}}}\n")
        done = CliRunner().invoke(command, ["-c", str(config), "install-service", "--print"], catch_exceptions=False)
        return done.output.splitlines()

    assert "LogsDirectory=llmgw" in unit("/var/log/llmgw/access.log")
    assert "ReadWritePaths=-/srv/logs" in unit("/srv/logs/access.log")
    beside = unit("/var/lib/llmgw/access.log")
    assert not any(line.startswith(("LogsDirectory=", "ReadWritePaths=")) for line in beside)


def test_the_agents_unit_names_its_file_whole_though_it_was_named_from_here(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from llmgw.agent.app import command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.yaml").write_text("server: http://127.0.0.1\n")
    argv = ["-c", "agent.yaml", "install-service", "--print"]
    said = CliRunner().invoke(command, argv, catch_exceptions=False).output
    assert f"agent -c {tmp_path}/agent.yaml\n" in said
