"""`llmgw ctl`: the group, and the one place where its clock and HTTP client are made."""

from __future__ import annotations

from typing import Any

import click

from llmgw.ctl.client import Transport
from llmgw.ctl.lazy import LazyGroup
from llmgw.ctl.session import Session, connection
from llmgw.system.clock import RealClock

COMMANDS = {
    "nodes": ("llmgw.ctl.nodes:nodes", "List nodes and what they say, or describe one"),
    "engines": ("llmgw.ctl.engines:engines", "List engines: wanted, and as they are on each node"),
    "profiles": ("llmgw.ctl.profiles:profiles", "List profiles, their states and refusals"),
    "replicas": ("llmgw.ctl.replicas:replicas", "List replicas and their states"),
    "apply": ("llmgw.ctl.profiles:apply", "Create or change profiles from YAML files"),
    "delete": ("llmgw.ctl.profiles:delete", "Delete a profile; its replicas drain and stop"),
    "scale": ("llmgw.ctl.profiles:scale", "Change how many replicas of a profile run"),
    "drain": ("llmgw.ctl.nodes:drain", "Empty nodes; replicas are replaced elsewhere before they leave"),
    "undrain": ("llmgw.ctl.nodes:undrain", "Let drained nodes take replicas again"),
    "forget": ("llmgw.ctl.nodes:forget", "Take nodes that are gone for good out of every listing"),
    "explain": ("llmgw.ctl.profiles:explain", "Say why a profile runs where it does, or nowhere"),
    "logs": ("llmgw.ctl.replicas:logs", "Show the last lines a replica's engine wrote"),
    "events": ("llmgw.ctl.events:events", "Show what happened lately, or follow it"),
    "keys": ("llmgw.ctl.keys:keys", "Create, list and delete API keys"),
    "usage": ("llmgw.ctl.usage:usage", "Show what clients used, by key, model or day"),
    "requests": ("llmgw.ctl.requests:requests", "Show the requests under way, live with -f"),
    "weights": ("llmgw.ctl.weights:weights", "List models on nodes, fetch them ahead, remove unused ones"),
    "status": ("llmgw.ctl.status:status", "Show the server, its gateways and what they are doing"),
    "join-token": ("llmgw.ctl.jointokens:join_token", "Let a new node join without a certificate"),
    "onboard": ("llmgw.ctl.onboard:onboard", "Make machines into nodes, over ssh"),
    "offboard": ("llmgw.ctl.offboard:offboard", "Remove llmgw from nodes, over ssh"),
    "upgrade": ("llmgw.ctl.upgrade:upgrade", "Bring nodes to another release, engines undisturbed"),
    "cert": ("llmgw.ctl.certs:cert", "Make and revoke certificates of nodes, servers and operators"),
}


def _dial(ca: str | None, certificate: tuple[str, str] | None = None) -> Transport:
    from llmgw.ctl.dialing import Dialer  # only when dialing

    return Dialer(ca, certificate)


class _Group(LazyGroup):
    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        extra.setdefault("obj", Session(RealClock(), _dial))
        return super().make_context(info_name, args, parent, **extra)


@click.group(cls=_Group, table=COMMANDS)
@connection
def command() -> None:
    """Look at a cluster and change it.

    The server is taken from --server, LLMGW_SERVER, ~/.config/llmgw/ctl.yaml, a running `llmgw up`, or
    http://127.0.0.1:8080.
    """
