"""The operator's side: `llmgw ctl onboard` and its kin as processes, with a home of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


class Operator:
    """Args: `pki`, the CA's directory; `release`, a directory with SHA256SUMS; `assets`, models the node sees."""

    def __init__(self, home: Path, pki: Path, release: Path, assets: Path) -> None:
        self.home, self.pki, self.release, self.assets = home, pki, release, assets
        home.mkdir(parents=True)
        self.env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        self.env |= {"HOME": str(home)}
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "SSH_AUTH_SOCK"):
            self.env.pop(name, None)
        self.extra = home / "more.yaml"
        self.extra.write_text(
            yaml.safe_dump(
                {
                    "mgmt_addr": "127.0.0.1",
                    "model_dirs": [str(assets)],
                    "heartbeat_interval": "500ms",
                    "reconnect_base": "100ms",
                    "reconnect_max": "500ms",
                }
            )
        )

    def ctl(
        self, *argv: Any, server: Any = None, code: int | None = 0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        where = [] if server is None else ["--server", server.url, "--token-file", str(server.token_file)]
        done = subprocess.run(
            [sys.executable, "-m", "llmgw", "ctl", *where, *map(str, argv)],
            capture_output=True,
            text=True,
            env=self.env | (env or {}),
            timeout=170,
            stdin=subprocess.DEVNULL,
        )
        if code is not None:
            assert done.returncode == code, done.stdout + done.stderr
        return done

    def onboard(
        self, node: Any, *more: Any, server: Any = None, user: str = "root", wait: str = "100s", **given: Any
    ) -> subprocess.CompletedProcess[str]:
        """`ctl onboard` of one node; without a server it does not wait for one."""
        url = f"https://127.0.0.1:{server.agents_port if server is not None else 1}"
        argv = ["onboard", f"{user}@{node.name}", "-F", node.config, "--agents-at", url, "--pki", self.pki]
        argv += ["--from", self.release, "--agent-yaml", self.extra, "--wait", wait if server is not None else "0s"]
        return self.ctl(*argv, *more, server=server, **given)


def times(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    """Stage -> seconds, from the progress lines."""
    return {
        stage: float(took) for stage, took in re.findall(r"^\S+  (\w+): .* \(([\d.]+) s\)$", done.stderr, re.MULTILINE)
    }
