"""What the two ends say to each other: one JSON object a line, `type` first.

The agent says hello, report, answer and renew; the server says welcome or refused, ack, desired, ask and issued. A node
that has no certificate yet says join and enroll, and hears authority and issued. Unknown keys are ignored and an
unknown type becomes `Unknown`, so that neighbouring versions talk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from attrs import field, frozen

from llmgw.domain.facts import NodeFacts
from llmgw.domain.report import Desired, NodeReport
from llmgw.errors import WireError
from llmgw.wire.shapes import from_json, to_json

PROTOCOL = 1
LINE_LIMIT = 1 << 20
OPENING_LIMIT = 64 << 10


@frozen
class Hello:
    """The agent's first message.

    Args:
        protocol: number of the protocol it speaks.
        node_id: who it is; under TLS the certificate must say the same.
        version: of llmgw on the node.
        boot_id: changes when the node boots.
        instance_id: changes when the agent starts, so that two agents with one name are told apart.
        clock: seconds since the epoch by the node's clock, to see skew.
        heartbeat_interval_s: what its configuration says; the server's welcome wins.
        facts: None when they did not fit or are not known yet.
    """

    protocol: int
    node_id: str
    version: str
    boot_id: str
    instance_id: str
    clock: float
    heartbeat_interval_s: float
    facts: NodeFacts | None = None


@frozen
class Welcome:
    """The server took the agent in: only now is the agent connected. `epoch` fences, as in `Desired`.

    `protocol` is the one both speak. `renews`: the server signs new certificates for agents that say `renew`.
    """

    protocol: int
    server_id: str
    epoch: int
    heartbeat_interval_s: float
    renews: bool = False


@frozen
class Refused:
    """The server does not take the agent in, or no longer; the socket closes. `words` travel unchanged."""

    code: str
    words: str


@frozen
class Report:
    """One heartbeat."""

    report: NodeReport


@frozen
class Ack:
    """The report `seq`, and every one before it on this connection, arrived."""

    seq: int


@frozen
class DesiredSet:
    """What the node must run, in full."""

    desired: Desired


@frozen
class Ask:
    """A small question, such as `logs`; answered by an `Answer` with the same id."""

    id: str
    what: str
    args: Mapping[str, str] = field(factory=dict)


@frozen
class Answer:
    """`error` is a sentence when the question could not be answered; otherwise `result` is JSON."""

    id: str
    result: Any = None
    error: str = ""


@frozen
class Join:
    """First message of a node without a certificate; the server's answer is `Authority`."""

    protocol: int
    version: str


@frozen
class Authority:
    """The server's CA, PEM, so that the node can prove the server by the fingerprint it was given."""

    ca: str


@frozen
class Enroll:
    """Spend a join token on a certificate for `node_id`; `csr` is PEM and names the node too."""

    token: str = field(repr=False)
    node_id: str
    csr: str


@frozen
class Renew:
    """Ask for a new certificate for the node this connection belongs to; `csr` is PEM."""

    csr: str


@frozen
class Issued:
    """A certificate, PEM, for an `Enroll` or a `Renew`; or `error`, a sentence."""

    cert: str = ""
    error: str = ""


@frozen
class Unknown:
    """A message of a type this version does not know: counted and skipped."""

    type: str


Message: TypeAlias = (
    Hello | Welcome | Refused | Report | Ack | DesiredSet | Ask | Answer | Join | Authority | Enroll | Renew | Issued
)

_TYPES: dict[str, type[Any]] = {
    "hello": Hello,
    "welcome": Welcome,
    "refused": Refused,
    "report": Report,
    "ack": Ack,
    "desired": DesiredSet,
    "ask": Ask,
    "answer": Answer,
    "join": Join,
    "authority": Authority,
    "enroll": Enroll,
    "renew": Renew,
    "issued": Issued,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}


def encode(message: Message, limit: int = LINE_LIMIT) -> bytes:
    """A message as one line, newline included.

    A lone surrogate (a file name that is not UTF-8) becomes `?`: it cannot travel, and a heartbeat must not fail on it.

    Raises:
        WireError: it is longer than `limit` bytes, or holds a value JSON has no word for.
    """
    name = _NAMES[type(message)]
    try:
        text = json.dumps(
            {"type": name, **to_json(message)}, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"cannot send `{name}`", cause=str(error)) from error
    line = text.encode("utf-8", "replace") + b"\n"
    if len(line) > limit:
        raise WireError(f"cannot send `{name}`", cause=f"it has {len(line)} bytes, {limit} are allowed")
    return line


def decode(data: Any) -> Message | Unknown:
    """A parsed line as a message.

    Raises:
        WireError: no object, no `type`, or not the shape of its type.
    """
    if not isinstance(data, dict):
        raise WireError("the peer sent a line that is not a JSON object")
    name = data.get("type")
    if not isinstance(name, str):
        raise WireError("the peer sent a message without a `type`")
    kind = _TYPES.get(name)
    if kind is None:
        return Unknown(name[:64])
    message: Message = from_json(data, kind)
    return message
