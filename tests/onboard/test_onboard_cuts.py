"""The connection is killed at every stage: the next run ends in the same state as one that was never disturbed."""

from __future__ import annotations

import os

import pytest
from onboard_cutter import Cutter

pytestmark = pytest.mark.timeout(240)

# each connection of an onboarding, in order, and the stage it belongs to
CONNECTIONS = ("look", "install", "certificate", "certificate", "configure", "service")


def state(node) -> dict[str, str]:
    """What counts of a node: program, configuration, certificate, service; not what a running agent writes."""
    kept = {}
    for path, kind in node.changed().items():
        if path.startswith(("etc/llmgw", "usr/local", "etc/systemd")) and "__pycache__" not in path:
            kept[path] = kind.split(" ")[0] if path.endswith((".pem", ".in-use")) else kind
    return kept


@pytest.fixture
def through(make_node, offline):
    """A node and the relay the operator reaches it through."""
    made = []

    def make(name):
        node = make_node(name, "plain")
        cutter = Cutter(node.port)
        node.config.write_text(node.config.read_text().replace(f"Port {node.port}", f"Port {cutter.port}"))
        made.append(cutter)
        return node, cutter

    yield make
    for each in made:
        each.close()


@pytest.fixture
def reference(through, offline):
    """State and byte counts of an undisturbed run."""
    node, cutter = through("whole")
    offline.onboard(node, "--node-id", "same")
    return state(node), [tuple(each) for each in cutter.totals]


def cut(cutter, totals, index, *, backwards, at=None):
    """Half of what was sent (for the file: in its middle), or the last words of the answer and what ends it."""
    there, back = totals[index]
    cutter.cut(index if at is None else at, **({"back": back - 300} if backwards else {"there": there // 2}))


def test_cut_at_one_stage_after_the_other_and_run_again(through, offline, reference):
    wanted, totals = reference
    assert len(totals) == len(CONNECTIONS)
    assert any(path.endswith("agent.yaml") for path in wanted)
    node, cutter = through("cut")
    for index, stage in enumerate(CONNECTIONS):
        # once the certificate is there, its second connection is not made any more
        cut(cutter, totals, index, backwards=index % 2 == 0, at=index - (stage == "service"))
        done = offline.onboard(node, "--node-id", "same", code=1)
        assert cutter.cuts == index + 1, f"{stage}: {cutter.totals}"
        assert f"error: {stage}: " in done.stderr
    cutter.whole()
    assert "service: " in offline.onboard(node, "--node-id", "same").stderr
    assert state(node) == wanted


@pytest.mark.skipif(
    not os.environ.get("LLMGW_TEST_FULL"), reason="LLMGW_TEST_FULL=1 runs it: a fresh node for each cut"
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backwards", [False, True])
def test_each_cut_on_a_machine_of_its_own(through, offline, reference, backwards):
    wanted, totals = reference
    for index, stage in enumerate(CONNECTIONS):
        node, cutter = through(f"cut-{index}")
        cut(cutter, totals, index, backwards=backwards)
        done = offline.onboard(node, "--node-id", "same", code=1)
        assert f"error: {stage}: " in done.stderr
        cutter.whole()
        offline.onboard(node, "--node-id", "same")
        assert state(node) == wanted, stage
        node.stop()
