"""Messages survive the trip, and what cannot travel is said so."""

from __future__ import annotations

import json

import pytest
from wire_helpers import some_facts

from llmgw.domain.engines import EngineSpec, EngineState, EngineStatus, Progress
from llmgw.domain.facts import DiskReading, GpuReading, NodeWarning, Readings
from llmgw.domain.replicas import ReplicaSpec, ReplicaState, ReplicaStatus
from llmgw.domain.report import Desired, NodeReport
from llmgw.errors import WireError
from llmgw.wire.codec import Codec
from llmgw.wire.messages import (
    PROTOCOL,
    Ack,
    Answer,
    Ask,
    DesiredSet,
    Hello,
    Refused,
    Report,
    Unknown,
    Welcome,
    decode,
    encode,
)

REPORT = NodeReport(
    seq=3,
    generation=7,
    epoch=2,
    probed_at=12.5,
    facts=some_facts(),
    readings=Readings(1.0, 5, 0.25, (DiskReading("/", 1, 2),), (GpuReading("GPU-1", 3),)),
    engines=(EngineStatus("llama.cpp", "b1", "cpu", EngineState.INSTALLING, "fetching", 1.0, Progress(1, None)),),
    replicas=(ReplicaStatus("m#0", 1, "m", ReplicaState.READY, "ready", 1.0, port=8000, last_log=("a\nb", "ü")),),
    warnings=(NodeWarning("no-avx2", "this processor has no AVX2", 1.0),),
)
MESSAGES = [
    Hello(PROTOCOL, "node-a", "0.1.0", "boot", "instance", 5.25, 5.0, some_facts()),
    Hello(PROTOCOL, "node-a", "0.1.0", "boot", "instance", 5.25, 5.0, None),
    Welcome(PROTOCOL, "server", 4, 2.5),
    Refused("tls-refused", "the certificate is for node `b`"),
    Report(REPORT),
    Report(NodeReport(1, None, None, None, None, None)),
    Ack(9),
    DesiredSet(
        Desired(
            2,
            1,
            (EngineSpec("llama.cpp", "b1", {"gpu": "yes"}),),
            (ReplicaSpec("m#0", 1, "m", "m", "hf:x/y", "llama.cpp", "b1", 4096, 4, api_key="secret"),),
        )
    ),
    Ask("1", "logs", {"replica": "m#0", "lines": "20"}),
    Answer("1", {"lines": ["a", None, 1.5, {"deep": [True]}]}),
    Answer("1", None, "there is no such replica"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_went(message: object) -> None:
    line = encode(message)  # type: ignore[arg-type]
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    codec = Codec()
    codec.raise_limit()
    assert codec.feed(line) == [message]


def test_a_secret_travels_but_is_not_shown() -> None:
    desired = next(message for message in MESSAGES if isinstance(message, DesiredSet))
    assert b"secret" in encode(desired)
    assert "secret" not in repr(desired)


def test_a_message_from_a_newer_version_is_understood_as_far_as_possible() -> None:
    data = json.loads(encode(Report(REPORT)))
    data["later"] = 1
    data["report"]["later"] = {"x": 1}
    data["report"]["facts"]["cpu"]["later"] = []
    assert decode(data) == Report(REPORT)
    assert decode({"type": "gossip"}) == Unknown("gossip")


def test_an_unknown_engine_state_is_refused_with_its_place() -> None:
    data = json.loads(encode(Report(REPORT)))
    data["report"]["engines"][0]["state"] = "sparkling"
    with pytest.raises(WireError, match="state"):
        decode(data)


def test_a_file_name_that_is_not_utf8_does_not_stop_a_report() -> None:
    assert Codec().feed(encode(Refused("x", "no file `\udcff.gguf`"))) == [Refused("x", "no file `?.gguf`")]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Answer("1", float("nan")), "cannot send `answer`"),
        (Answer("1", {"x": object()}), "cannot send `answer`"),
        (Answer("1", "x" * (1 << 20)), "1048576 are allowed"),
    ],
    ids=["NaN", "object", "too long"],
)
def test_what_cannot_be_said_is_refused_before_it_is_sent(message: Answer, words: str) -> None:
    with pytest.raises(WireError, match=words):
        encode(message)
