"""Onboarding one machine: look, install, certificate, configure, service. Each stage sees what is left to do.

Nothing is written before the machine was looked at and the release's file was checked here; the node checks it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from llmgw.ctl.onboarding import scripts
from llmgw.ctl.onboarding.look import Looked, look
from llmgw.ctl.onboarding.remote import Remote
from llmgw.ctl.text import escape
from llmgw.domain.ids import check_node_id
from llmgw.errors import LlmgwError, PkiError, UsageError
from llmgw.system.clock import Clock
from llmgw.units import format_size

if TYPE_CHECKING:
    from llmgw.ctl.onboarding.release import Releases
    from llmgw.pki.issuer import Issuer

STAGES = ("look", "install", "certificate", "configure", "service", "wait")
_DAY_S = 86400.0

Tell = Callable[[str, str, float | None], None]
"""Told (stage, words, seconds it took); None seconds: it has begun."""


@frozen
class Plan:
    """What a machine is to become.

    Args:
        server: the address agents dial, `https://HOST:7443` or `http://…`; several are allowed.
        node_id: None takes the machine's host name.
        labels: as in agent.yaml.
        extra: further keys of agent.yaml.
        pki: directory of the CA; needed for `https`.
        days: how long the node's certificate is valid.
        replace_config: write over an agent.yaml that somebody edited.
    """

    server: tuple[str, ...]
    node_id: str | None = None
    labels: Mapping[str, str] = field(factory=dict)
    extra: Mapping[str, Any] = field(factory=dict)
    pki: Path | None = None
    days: int = 365
    replace_config: bool = False

    @property
    def tls(self) -> bool:
        return any(each.startswith("https://") for each in self.server)


class StageFailed(LlmgwError):
    """A stage failed; the error says which, and the next run goes on from what is there."""

    code = "stage-failed"

    def __init__(self, stage: str, error: LlmgwError) -> None:
        super().__init__(f"{stage}: {error.message}", cause=error.cause, hint=error.hint, code=error.code)
        self.stage = stage


class Onboarding:
    """The stages up to a started agent.

    Args:
        tell: told as each stage begins and ends.
    """

    def __init__(self, remote: Remote, plan: Plan, releases: Releases, clock: Clock, tell: Tell) -> None:
        self._remote = remote
        self._plan = plan
        self._releases = releases
        self._clock = clock
        self._tell = tell
        self.node_id = plan.node_id or ""
        self._issuer: Issuer | None = None

    def run(self, stages: Sequence[str] = STAGES[:-1]) -> str:
        """Go through the stages.

        Returns:
            The node's id.

        Raises:
            StageFailed: one failed.
        """
        looked = self._stage("look", self._look)
        for name, step in (
            ("install", self._install), ("certificate", self._certificate),
            ("configure", self._configure), ("service", self._service),
        ):  # fmt: skip
            if name in stages:
                self._stage(name, lambda step=step: step(looked))  # type: ignore[misc]
        return self.node_id

    def _stage(self, name: str, step: Callable[[], Any]) -> Any:
        began = self._clock.monotonic()
        self._tell(name, "", None)
        try:
            made = step()
        except LlmgwError as error:
            raise StageFailed(name, error) from error
        words = made.words() if isinstance(made, Looked) else str(made)
        self._tell(name, words, self._clock.monotonic() - began)
        return made

    def _look(self) -> Looked:
        self._issuer = self._load_issuer()
        looked = look(self._remote)
        self._remote.sudo = looked.root == "sudo"
        self.node_id = self.node_id or looked.host
        if not self.node_id:
            raise UsageError(f"`{self._remote.target}` has no usable host name", hint="name it with `--node-id`")
        check_node_id(self.node_id)
        self._releases.get(looked.arch)
        return looked

    def _load_issuer(self) -> Issuer | None:
        if not self._plan.tls:
            return None
        if self._plan.pki is None:
            raise UsageError(
                "the server is dialed by `https`, so the node needs a certificate", hint="name `--pki DIR`"
            )
        from llmgw.pki.issuer import Issuer

        return Issuer.load(self._plan.pki / "ca.pem", self._plan.pki / "ca-key.pem")

    def _install(self, looked: Looked) -> str:
        release = self._releases.get(looked.arch)
        there = (looked.current, looked.current_sha256) == (release.name, release.sha256)
        data = b"" if there else release.path.read_bytes()
        args = (release.name, release.sha256, looked.python, "keep" if there else "receive")
        done = self._remote.run(scripts.INSTALL, *args, stdin=data, timeout_s=900)
        said = done.stdout.strip().splitlines()
        if not said or said[-1] != f"llmgw {release.version}":
            raise LlmgwError(f"`{release.name}` does not run there", cause=escape(done.last_line())[:300])
        return f"llmgw {release.version}" + (" is there" if there else f", {format_size(len(data))} sent and checked")

    def _certificate(self, _looked: Looked) -> str:
        if self._issuer is None or self._plan.pki is None:
            return "not needed: the server is dialed in the clear"
        ca = (self._plan.pki / "ca.pem").read_text()
        answer = self._exchange({"ca": ca})
        if answer.get("request") is None:
            return escape(str(answer.get("words")))[:200]
        made = self._issuer.sign_request(
            str(answer["request"])[:10000], self.node_id, life_s=self._plan.days * _DAY_S, now=self._clock.now()
        )
        from llmgw.pki.keys import certificate_pem
        from llmgw.system.files import write_atomic

        pem = certificate_pem(made)
        self._exchange({"ca": ca, "certificate": pem.decode()})
        # kept beside the CA, so that it can be listed and revoked; its key has never been here
        write_atomic(self._plan.pki / f"{self.node_id}.pem", pem)
        return f"issued for `{self.node_id}` until {made.not_valid_after_utc:%Y-%m-%d}; its key was made on the node"

    def _exchange(self, message: dict[str, str]) -> dict[str, Any]:
        done = self._remote.run(scripts.CERTIFICATE, self.node_id, stdin=json.dumps(message).encode())
        try:
            answer = json.loads(done.stdout)
        except ValueError as error:
            raise PkiError("the node gave no usable answer", cause=escape(done.last_line())[:200]) from error
        if not isinstance(answer, dict):
            raise PkiError("the node gave no usable answer")
        return answer

    def _configure(self, _looked: Looked) -> str:
        data = self.agent_yaml()
        mode = "replace" if self._plan.replace_config else "keep"
        done = self._remote.run(scripts.CONFIGURE, mode, hashlib.sha256(data).hexdigest(), stdin=data)
        return {
            "same": "agent.yaml is as it should be",
            "edited": "agent.yaml was edited there and is left alone (`--replace-config` writes over it)",
            "written": "agent.yaml written",
        }.get(done.stdout.strip(), "agent.yaml: " + escape(done.stdout.strip())[:100])

    def agent_yaml(self) -> bytes:
        """The node's agent.yaml."""
        import yaml

        servers = list(self._plan.server)
        content: dict[str, Any] = {"server": servers[0] if len(servers) == 1 else servers, "node_id": self.node_id}
        if self._plan.tls:
            content["tls"] = {
                "ca": "/etc/llmgw/ca.pem", "cert": "/etc/llmgw/agent.pem", "key": "/etc/llmgw/agent-key.pem",
            }  # fmt: skip
        if self._plan.labels:
            content["labels"] = dict(self._plan.labels)
        content |= self._plan.extra
        head = "# Written by `llmgw ctl onboard`. What you change here is kept.\n"
        return (head + yaml.safe_dump(content, sort_keys=False)).encode()

    def _service(self, looked: Looked) -> str:
        done = self._remote.run(scripts.SERVICE, timeout_s=180)
        lines = [escape(line)[:200] for line in done.stdout.strip().splitlines()]
        return "; ".join(lines) if not looked.systemd else (lines[-1] if lines else "started")
