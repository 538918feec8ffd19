"""Where a replica goes, and what each node says when it does not go there."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from domain_views import GIB, QWEN, READY, SPEC, engine, gpu, node, weights

from llmgw.domain.engines import EngineSpec, EngineState
from llmgw.domain.estimate import estimate
from llmgw.domain.facts import FabricFacts, Finding, Truth
from llmgw.domain.placement import Claim, Placement, Refusal, place
from llmgw.domain.report import NodeView, Presence

HOSTILE = "wörds of the nøde, “letter for letter”; with `ticks`, 100 % & <tags>"


def refused(view: NodeView, profile: Any = QWEN, spec: EngineSpec | None = SPEC, **more: Any) -> tuple[str, str]:
    outcome = place(profile, spec, [view], **more)
    assert isinstance(outcome, Refusal), outcome
    assert len(outcome.nodes) == 1
    return outcome.nodes[0].code, outcome.nodes[0].words


def placed(profile: Any, fleet: list[NodeView], spec: EngineSpec | None = SPEC, **more: Any) -> Placement:
    outcome = place(profile, spec, fleet, **more)
    assert isinstance(outcome, Placement), outcome
    return outcome


def test_an_empty_fleet_refuses_and_says_what_to_do() -> None:
    outcome = place(QWEN, SPEC, [])
    assert isinstance(outcome, Refusal)
    assert outcome.lines() == (
        "no node can run `qwen`: no node has ever connected: start `llmgw agent` on a machine whose agent.yaml names "
        "this server under `server`",
    )


@pytest.mark.parametrize(
    ("view", "code", "words"),
    [
        (node(presence=Presence.LOST, words="lost: no report for 40 s"), "not-connected", "lost: no report for 40 s"),
        (node(presence=Presence.STALE, words="stale: x"), "not-connected", "stale: x"),
        (node(probed=False), "not-probed", "has not finished probing"),
        (node(probed=False, engines=()), "not-probed", "has not finished probing"),
        (node(draining=True), "draining", "is draining: it takes no new replicas"),
        (node(engines=()), "engine-absent", "has no engine `llama.cpp`, and has not said why"),
        (node(engines=(engine(EngineState.UNPROBED, HOSTILE),)), "engine-unprobed", HOSTILE),
        (node(engines=(engine(EngineState.ABSENT, HOSTILE),)), "engine-absent", HOSTILE),
        (node(engines=(engine(EngineState.INSTALLING, HOSTILE),)), "engine-installing", HOSTILE),
        (node(engines=(engine(EngineState.FAILED, HOSTILE),)), "engine-failed", HOSTILE),
        (node(engines=(engine(EngineState.BROKEN, HOSTILE),)), "engine-broken", HOSTILE),
        (node(engines=(engine(EngineState.NAMED, HOSTILE, usable=False),)), "engine-named", HOSTILE),
        (
            node(engines=(evolve(READY, version="b0"),)),
            "engine-version",
            "engine `llama.cpp` is b0, b1 is wanted",
        ),
    ],
)
def test_a_node_is_passed_over_with_its_own_words(view: NodeView, code: str, words: str) -> None:
    assert refused(view) == (code, words)


def test_a_node_that_has_not_probed_or_has_probed_and_has_nothing_is_never_chosen() -> None:
    good = node("z-last", free=1 * GIB)
    for bad in (node("a", probed=False), node("a", engines=()), node("a", engines=(), probed=False)):
        outcome = placed(QWEN, [bad, good])
        assert outcome.node_id == "z-last"
        assert [item.node_id for item in outcome.refused] == ["a"]


def test_presence_is_asked_before_everything_else() -> None:
    view = node(presence=Presence.LOST, words="lost: w", probed=False, engines=(), draining=True)
    assert refused(view) == ("not-connected", "lost: w")


def test_the_status_of_the_wanted_version_counts_while_another_version_is_there() -> None:
    view = node(engines=(evolve(READY, version="b0", since=9.0), READY))
    assert placed(QWEN, [view]).engine_version == "b1"
    view = node(engines=(evolve(READY, version="b0", since=9.0), engine(EngineState.INSTALLING, HOSTILE)))
    assert refused(view) == ("engine-installing", HOSTILE)


def test_an_engine_the_node_names_is_used_at_whatever_version_once_it_was_seen_to_run() -> None:
    named = engine(EngineState.NAMED, "named", version=None, usable=True)
    assert placed(QWEN, [node(engines=(named,))]).engine_version == ""
    assert placed(QWEN, [node(engines=(named,))], spec=None).node_id == "n1"


def test_an_engine_nobody_names_says_where_to_name_it() -> None:
    assert refused(node(engines=()), spec=None)[1] == (
        "no engine `llama.cpp`: name it under `engines` in server.yaml or agent.yaml"
    )


def test_an_engine_meant_for_other_nodes_says_which_label_differs() -> None:
    spec = evolve(SPEC, node_selector={"gpu": "yes"})
    assert refused(node(engines=()), spec=spec)[1] == "has no label `gpu`, `yes` is wanted for engine `llama.cpp`"


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({}, "has no label `rack`, `r12` is wanted for `qwen`"),
        ({"rack": "r1"}, "label `rack` is `r1`, `r12` is wanted for `qwen`"),
    ],
)
def test_a_label_that_differs_is_named(labels: dict[str, str], words: str) -> None:
    profile = evolve(QWEN, node_selector={"rack": "r12"})
    assert refused(node(labels=labels), profile) == ("label", words)
    assert placed(profile, [node(labels={"rack": "r12", "more": "x"})]).node_id == "n1"


def test_weights_that_are_not_complete_refuse_in_the_nodes_words() -> None:
    view = node(files=(weights("/models/qwen.gguf", GIB, Truth.NO, HOSTILE),))
    assert refused(view) == ("weights-incomplete", HOSTILE)


def test_weights_nobody_lists_are_left_to_the_engine() -> None:
    outcome = placed(QWEN, [node(files=())])
    assert "size of the weights not known yet" in outcome.words
    assert outcome.memory_bytes is None


def test_a_format_the_engine_does_not_read_refuses() -> None:
    assert refused(node(), formats=("safetensors",))[0] == "model-format"
    assert placed(QWEN, [node()], formats=("gguf",)).node_id == "n1"


def test_memory_is_counted_free_now_less_what_is_still_loading() -> None:
    profile = evolve(QWEN, memory_bytes=6 * GIB)
    loading = Claim("x#0", "x", "n1", memory_bytes=4 * GIB)
    assert placed(profile, [node(free=8 * GIB)]).memory_bytes == 6 * GIB
    code, words = refused(node(free=8 * GIB), profile, claims=[loading])
    assert code == "memory"
    assert words == (
        "needs 6.4 GB by the profile's `memory`, 8.6 GB are free, of which 4.3 GB are for replicas still loading"
    )
    assert placed(profile, [node(free=8 * GIB)], claims=[evolve(loading, settled=True)]).node_id == "n1"
    assert placed(profile, [node(free=8 * GIB)], claims=[evolve(loading, node_id="n2")]).node_id == "n1"


def test_memory_of_the_replica_that_is_replaced_counts_as_free() -> None:
    profile = evolve(QWEN, memory_bytes=6 * GIB)
    leaving = Claim("qwen#0", "qwen", "n1", memory_bytes=6 * GIB, settled=True, leaving=True)
    assert refused(node(free=1 * GIB), profile)[0] == "memory"
    assert placed(profile, [node(free=1 * GIB)], claims=[leaving]).node_id == "n1"


def test_a_memory_limit_below_the_free_memory_counts() -> None:
    assert refused(node(limit_bytes=GIB), evolve(QWEN, memory_bytes=2 * GIB))[0] == "memory"


def test_unknown_free_memory_refuses_nobody_and_says_so() -> None:
    outcome = placed(evolve(QWEN, memory_bytes=6 * GIB), [node(free=None)])
    assert outcome.words == "free memory not known, so it was not checked"


def test_the_estimate_is_weights_and_cache_and_the_profile_overrides_it() -> None:
    file = weights("/models/qwen.gguf", 4 * GIB)
    guess = estimate(evolve(QWEN, context=4096, slots=4), file)
    assert guess.memory_bytes == 4 * GIB + 16384 * (4 * GIB // 32768) + (256 << 20)
    told = estimate(evolve(QWEN, context=4096, slots=4), evolve(file, cache_bytes_per_token=114688))
    assert told.memory_bytes == file.size_bytes + 16384 * 114688 + (256 << 20)
    assert "by the file's header" in told.words
    assert estimate(evolve(QWEN, memory_bytes=7), file).memory_bytes == 7
    assert estimate(QWEN, None).memory_bytes is None


CUDA = evolve(READY, build="cuda-13.3")


def test_gpus_wanted_from_a_node_without_any_quotes_its_driver() -> None:
    profile = evolve(QWEN, gpus=2)
    assert refused(node(engines=(CUDA,)), profile) == (
        "gpus-none",
        "has no GPU, 2 wanted: no NVIDIA driver is loaded",
    )
    assert refused(node(engines=(CUDA,), gpus=None), profile)[1].startswith("does not know its GPUs, 2 wanted")
    assert refused(node(gpus=(gpu("a"),)), evolve(QWEN, gpus=1)) == (
        "gpus-unused",
        "1 GPUs wanted, its engine is a `cpu` build",
    )


def test_auto_takes_the_fewest_devices_that_hold_the_estimate() -> None:
    fleet = [node(engines=(CUDA,), gpus=(gpu("a"), gpu("b"), gpu("c")), gpu_free=dict.fromkeys("abc", 20 * GIB))]
    assert len(placed(evolve(QWEN, memory_bytes=10 * GIB), fleet).gpus) == 1
    assert len(placed(evolve(QWEN, memory_bytes=30 * GIB), fleet).gpus) == 2
    assert refused(fleet[0], evolve(QWEN, memory_bytes=70 * GIB))[0] == "gpu-memory"
    assert placed(evolve(QWEN, gpus=0), fleet).gpus == ()


def test_devices_of_other_replicas_and_faulty_ones_are_not_taken() -> None:
    gpus = (gpu("a"), gpu("b", faulty="fell off the bus"))
    fleet = [node(engines=(CUDA,), gpus=gpus, gpu_free={"a": 20 * GIB, "b": 20 * GIB})]
    assert placed(QWEN, fleet).gpus == ("a",)
    claim = Claim("x#0", "x", "n1", ("a",), 1, settled=True)
    assert refused(fleet[0], claims=[claim]) == ("gpus-taken", "1 GPUs wanted, 0 of 2 are not taken by other replicas")
    assert placed(QWEN, fleet, claims=[evolve(claim, leaving=True)]).gpus == ("a",)


def test_weights_then_spread_then_load_then_id_decide() -> None:
    a, b, c = node("a"), node("b"), node("c")
    assert placed(QWEN, [c, b, a]).node_id == "a"
    busy = Claim("other#0", "other", "a", memory_bytes=1)
    assert placed(QWEN, [a, b], claims=[busy]).node_id == "b"
    same = Claim("qwen#0", "qwen", "b", memory_bytes=1)
    assert placed(QWEN, [a, b], claims=[busy, evolve(busy, replica_id="other#1"), same]).node_id == "a"
    holder = node("z", files=(weights("/models/qwen.gguf", GIB),))
    assert placed(QWEN, [a, b, holder], claims=[evolve(same, node_id="z")]).node_id == "z"


def test_one_line_for_every_node_in_the_order_of_their_ids() -> None:
    fleet = [node("b", probed=False), node("a", engines=(engine(EngineState.FAILED, HOSTILE),))]
    outcome = place(QWEN, SPEC, fleet)
    assert isinstance(outcome, Refusal)
    assert outcome.lines() == (
        "no node can run `qwen`: all 2 nodes refuse",
        f"a: {HOSTILE}",
        "b: has not finished probing",
    )


def test_a_replica_over_several_nodes_is_refused_with_the_largest_island() -> None:
    fabric = FabricFacts("ib0", ("mlx5_0",), usable=Finding(Truth.YES, "up"))
    fleet = [node("a", fabrics=(fabric,)), node("b", fabrics=(fabric,)), node("c")]
    outcome = place(evolve(QWEN, nodes=2), SPEC, fleet)
    assert isinstance(outcome, Refusal)
    assert "the largest island is 2 of 3 nodes (fabric `ib0`): write `nodes: 1`" in outcome.words
