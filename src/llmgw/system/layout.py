"""Where an installed llmgw lies on a machine, and the systemd units that run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LIB = Path("/usr/local/lib/llmgw")
"""Each release as one file, `current` pointing at one of them, what they unpack into, and plugins."""
CURRENT = LIB / "current"
PREVIOUS = LIB / "previous"
UNPACKED = LIB / "unpacked"
PLUGINS = LIB / "plugins"
PROGRAM = Path("/usr/local/bin/llmgw")
ETC = Path("/etc/llmgw")
UNITS = Path("/etc/systemd/system")
AGENT_UNIT = "llmgw-agent.service"
SERVER_UNIT = "llmgw-server.service"
AGENT_LOG = Path("/var/log/llmgw-agent.log")


def has_systemd() -> bool:
    """Whether systemd runs this machine (sd_booted(3))."""
    return Path("/run/systemd/system").is_dir()


def agent_unit(argv: Sequence[str], unpacked: Path = UNPACKED) -> str:
    """The agent's unit.

    Engines are its children and must outlive it: only the agent itself is stopped (`KillMode=process`), an engine that
    is killed for want of memory does not stop the agent (`OOMPolicy=continue`), and the agent may make control groups
    (`Delegate=yes`). Whatever hides devices, sockets or directories, or forbids generated code, would break engines and
    package managers, which inherit it, so there is none of that; RDMA needs memory that is never swapped.
    """
    return f"""\
[Unit]
Description=llmgw agent: installs, proves and runs inference engines on this node
Documentation=man:systemd.service(5)
Wants=network-online.target
After=network-online.target nss-lookup.target time-sync.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={_command(argv)}
Environment=SHIV_ROOT={unpacked}
Environment=PYTHONUNBUFFERED=1
Restart=always
RestartSec=2
# 2: a configuration file is wrong, and stays so until somebody edits it
RestartPreventExitStatus=2
KillMode=process
TimeoutStopSec=90
Delegate=yes
OOMPolicy=continue
OOMScoreAdjust=-500
TasksMax=infinity
LimitNOFILE=1048576
LimitMEMLOCK=infinity
UMask=0022

[Install]
WantedBy=multi-user.target
"""


def server_unit(
    argv: Sequence[str], *, user: str, state_dir: str, writable: Sequence[str] = (), log_dir: str = ""
) -> str:
    """The server's unit: it needs its state directory and its sockets, so everything else is taken from it.

    Gateways are left to finish their answers, as the server has told them (`KillMode=process`). No
    `MemoryDenyWriteExecute`: the callbacks of mutual TLS (pyOpenSSL, by cffi) are made while it runs.

    Args:
        state_dir: directory of the state, absolute.
        writable: further directories it writes to.
        log_dir: directory of the gateways' access log, "" for none. Made when it is below `/var/log`.
    """
    under = state_dir.removeprefix("/var/lib/")
    state = f"StateDirectory={under}\nStateDirectoryMode=0700\n" if under != state_dir else ""
    paths = [*([] if state else [state_dir]), *writable]
    under = log_dir.removeprefix("/var/log/")
    if log_dir and under == log_dir:
        paths.append(f"-{log_dir}")
    elif log_dir:
        state += f"LogsDirectory={under}\nLogsDirectoryMode=0750\n"
    more = f"ReadWritePaths={' '.join(paths)}\n" if paths else ""
    return f"""\
[Unit]
Description=llmgw server: the control plane and its gateways
Documentation=man:systemd.service(5)
Wants=network-online.target
After=network-online.target nss-lookup.target

[Service]
Type=exec
ExecStart={_command(argv)}
ExecReload=/bin/kill -HUP $MAINPID
Environment=SHIV_ROOT={UNPACKED}
Environment=PYTHONUNBUFFERED=1
Restart=always
RestartSec=2
RestartPreventExitStatus=2
KillMode=process
TimeoutStopSec=60
User={user}
Group={user}
{state}{more}LimitNOFILE=1048576
UMask=0077
CapabilityBoundingSet=CAP_NET_BIND_SERVICE
AmbientCapabilities=CAP_NET_BIND_SERVICE
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
ProcSubset=all
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""


def _command(argv: Sequence[str]) -> str:
    # systemd.service(5): `%` and `$` are expanded, quotes and spaces are not taken as they are
    quoted = []
    for each in argv:
        safe = each.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
        quoted.append(f'"{safe}"' if any(c in each for c in " \t\"'\\;") else safe)
    return " ".join(quoted)
