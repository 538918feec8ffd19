from __future__ import annotations

import pytest
from probe_fakes import DATA, make_tree

from llmgw.domain.facts import Truth
from llmgw.probe.fabrics import FabricLabel, fabric_facts, parse_rate, parse_state, read_hcas
from llmgw.probe.tree import Tree

ROOT = "/sys/class/infiniband"
PREFIX = "fe80:0000:0000:0000"


def port(state="4: ACTIVE", layer="InfiniBand", rate="400 Gb/sec (4X NDR)", sm="0x1", prefix=PREFIX, phys="5: LinkUp"):
    return {
        "state": state, "link_layer": layer, "rate": rate, "sm_lid": sm, "phys_state": phys,
        "gids/0": f"{prefix}:8ae9:a4ff:fe9c:7f1a",
    }  # fmt: skip


def judge(tmp_path, hcas, label):
    """`hcas`: name or name:port -> port files; `label`: the HCAs of a fabric `a` of 400 Gb/s."""
    files = {}
    for where, port_files in hcas.items():
        name, _, number = where.partition(":")
        for key, value in port_files.items():
            files[f"{ROOT}/{name}/ports/{number or 1}/{key}"] = f"{value}\n"
        files[f"{ROOT}/{name}/device/net/ib{name[-1]}/address"] = "x"
    tree = Tree(make_tree(tmp_path, files))
    return fabric_facts(FabricLabel("a", tuple(label), 400.0), read_hcas(tree, ROOT), ROOT)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("40 Gb/sec (4X QDR)", 40.0),
        ("2.5 Gb/sec (1X SDR)", 2.5),
        ("500 Gb/sec (4X HDR)", 500.0),
        ("0 GB/sec", None),
        ("", None),
        (None, None),
    ],
)
def test_rates_are_read(text, rate):
    assert parse_rate(text) == rate


def test_states_are_read():
    assert parse_state("4: ACTIVE") == "ACTIVE"
    assert parse_state("2: INIT") == "INIT"
    assert parse_state(None) is None


def test_recorded_hcas_are_judged(tmp_path):
    recorded = (line.split(" => ") for line in (DATA / "infiniband-sysfs.txt").read_text().splitlines()[1:])
    tree = Tree(make_tree(tmp_path, {f"{ROOT}/{path}": f"{value}\n" for path, value in recorded}))
    hcas = read_hcas(tree, ROOT)
    assert sorted(hcas) == ["hfi1_0", "mlx4_0", "mlx5_0"]
    good = fabric_facts(FabricLabel("a", ("mlx4_0",), 40.0), hcas, ROOT)
    assert (good.usable.value, good.usable.words) == (Truth.YES, "`mlx4_0` is ACTIVE at 40 Gb/s")
    both = fabric_facts(FabricLabel("a", ("mlx4_0", "mlx5_0"), 40.0), hcas, ROOT)
    assert "at 25 Gb/s, slower than the 40 Gb/s" in both.usable.words
    silent = fabric_facts(FabricLabel("a", ("hfi1_0",), None), hcas, ROOT)
    assert (silent.usable.value, "does not tell its state" in silent.usable.words) == (Truth.UNKNOWN, True)


def test_a_fabric_with_all_hcas_active_is_usable_and_names_its_interfaces(tmp_path):
    found = judge(tmp_path, {"mlx5_0": port(), "mlx5_1": port()}, ["mlx5_0", "mlx5_1:1"])
    assert found.usable.value is Truth.YES
    assert found.usable.words == "`mlx5_0` is ACTIVE, `mlx5_1` is ACTIVE at 400 Gb/s"
    assert found.interfaces == ("ib0", "ib1")


@pytest.mark.parametrize(
    ("hcas", "label", "words"),
    [
        ({}, ["mlx5_0"], "`/sys/class/infiniband` has no InfiniBand device"),
        ({"mlx5_1": port()}, ["mlx5_0"], "`mlx5_0` is not on this node, which has `mlx5_1`"),
        ({"mlx5_0": port(state="2: INIT")}, ["mlx5_0"], "no subnet manager answers"),
        ({"mlx5_0": port(sm="0x0")}, ["mlx5_0"], "knows no subnet manager"),
        ({"mlx5_0": port(state="1: DOWN", phys="2: Polling")}, ["mlx5_0"], "DOWN (physical state Polling)"),
        ({"mlx5_0": port(layer="Ethernet", sm="0x0")}, ["mlx5_0"], "is Ethernet, not InfiniBand"),
        ({"mlx5_0": port()}, ["mlx5_0:2"], "port 2 of `mlx5_0` is missing"),
        (
            {"mlx5_0": port(), "mlx5_1": port(prefix="fec0:0000:0000:0001")},
            ["mlx5_0", "mlx5_1"],
            "on different subnets: `mlx5_0` has fe80:0000:0000:0000, `mlx5_1` has fec0:0000:0000:0001",
        ),
        ({"mlx5_0": port(), "mlx5_1": port(state="2: INIT")}, ["mlx5_0", "mlx5_1"], "`mlx5_1` port 1 is INIT"),
        ({"mlx5_0": port()}, [], "no HCA is named"),
    ],
)
def test_a_label_that_does_not_hold_is_refuted_in_words(tmp_path, hcas, label, words):
    found = judge(tmp_path, hcas, label)
    assert found.usable.value is Truth.NO
    assert words in found.usable.words


def test_of_two_ports_the_active_one_counts_unless_one_is_named(tmp_path):
    hcas = {"mlx5_0:1": port(state="1: DOWN"), "mlx5_0:2": port()}
    assert judge(tmp_path, hcas, ["mlx5_0"]).usable.value is Truth.YES
    assert judge(tmp_path, hcas, ["mlx5_0:1"]).usable.value is Truth.NO


def test_a_certain_no_outweighs_an_unknown(tmp_path):
    hcas = {"hfi1_0": {"rate": "100 Gb/sec (4X EDR)"}, "mlx5_0": port(state="1: DOWN")}
    assert judge(tmp_path, hcas, ["hfi1_0", "mlx5_0"]).usable.value is Truth.NO
