"""`djinn plan`: models on clusters from a description."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from djinn.errors import ConfigurationError, InvalidStage
from djinn.planning import read_cluster
from djinn_commands.planning.forecast import modules_of
from djinn_commands.planning.plan_command import plan as command

CLUSTER = """
network = { gbs = 1, us = 100 }
rack = { gbs = 10, us = 10 }
client = { gbs = 0.5, us = 1000 }

[[machines]]
name = "node"
count = 4
rack = 2
devices = 2
memory_gib = MEMORY
tflops = 10
gbs = 100
link = { gbs = 100, us = 1 }
"""
CONFIGURATION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "vocab_size": 512,
    "torch_dtype": "float32",
}


@pytest.fixture
def run_plan(tmp_path):
    """Return a function that runs `djinn plan` for a small Llama on devices of `memory` GiB and returns its output."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGURATION))

    def run_plan(memory, *options):
        (tmp_path / "cluster.toml").write_text(CLUSTER.replace("MEMORY", str(memory)))
        arguments = [str(tmp_path / "model"), "--cluster", str(tmp_path / "cluster.toml"), "--tokens", "16", *options]
        return CliRunner().invoke(command, arguments, catch_exceptions=False).stdout

    return run_plan


def test_large_model_is_split_over_devices(run_plan):
    whole = json.loads(run_plan(1, "--json"))
    assert [d["device"] for d in whole["devices"]] == ["node0/cuda:0"]
    assert whole["replicas"] == whole["devices_in_cluster"] == 8
    parts = json.loads(run_plan(0.012, "--json", "--step", "decode", "--batch", "2"))
    first, *_, last = parts["devices"]
    assert "model.embed_tokens" in first["modules"]
    assert "lm_head" in last["modules"]
    assert all(d["inputs"] < d["peak"] <= d["memory"] for d in parts["devices"])
    assert sum(d["inputs"] for d in parts["devices"]) > 0.012 * 2**30
    assert parts["latency"] >= sum(d["busy"] for d in parts["devices"])
    assert parts["interval"] == pytest.approx(max(d["busy"] for d in parts["devices"]))
    assert sum(parts["shares"].values()) == pytest.approx(1)
    assert parts["upload_bytes"] > parts["devices"][0]["inputs"]


def test_plan_shows_placement_time_and_reason(run_plan):
    text = run_plan(0.012)
    assert "on 3 of 8 devices of" in text
    assert "node0/cuda:0: model.embed_tokens" in text
    assert "latency" in text
    assert re.search(r"throughput .*/s \([\d.,]+ m?s each\) if batches follow without a pause", text)
    assert re.search(r"limited by  ops on node\S+\. Time of ops on all devices: ", text)


def test_oversized_model_is_refused_with_figures(run_plan):
    with pytest.raises(InvalidStage, match="fit into no device and cannot be cut into parts") as refused:
        run_plan(0.001)
    assert re.search(r"node0/cuda:0: it would hold [\d,]+ bytes \([\d,]+ of inputs", str(refused.value))
    assert "connect a server" not in str(refused.value)
    assert re.search(r"has room for 1,073,741: [\d,]+ bytes are short", str(refused.value))


def test_links_of_innermost_group_apply():
    topology = read_cluster(CLUSTER.replace("MEMORY", "16"))
    assert len(topology.devices) == 8
    assert len(topology.links) < 16
    gbs = {
        ends: topology.link(*ends).bandwidth / 1e9
        for ends in [
            ("node0/cuda:0", "node0/cuda:1"),
            ("node0/cuda:0", "node1/cuda:0"),
            ("node1/cuda:1", "node2/cuda:0"),
            ("client", "node3/cuda:1"),
            ("node3/cuda:1", "client"),
        ]
    }
    assert list(gbs.values()) == [100, 10, 1, 0.5, 0.5]
    assert topology.link("node0/cuda:0", "node0/cuda:0").transfer_seconds(1 << 30) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tflops = 10", "teraflops = 10"), "teraflops"),
        (("gbs = 100\n", ""), r"missing required field `gbs`.*docs/planning.md"),
        (("devices = 2", "devices = 0"), "above 0"),
        (("link = { gbs = 100, us = 1 }", ""), "above 0"),
        (('name = "node"', "name = node"), "does not describe a cluster"),
        (
            (
                "[[machines]]",
                '[[machines]]\nname="node"\ndevices=1\nmemory_gib=1\ntflops=1\ngbs=1\nlink={gbs=1}\n[[machines]]',
            ),
            "one name",
        ),
    ],
)
def test_invalid_cluster_files_are_refused(change, message):
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        read_cluster(CLUSTER.replace("MEMORY", "16").replace(*change))


def test_machines_with_one_device_need_no_link():
    alone = (
        CLUSTER.replace("MEMORY", "16")
        .replace("link = { gbs = 100, us = 1 }", "")
        .replace("devices = 2", "devices = 1")
    )
    assert read_cluster(alone).link("node0/cuda:0", "node1/cuda:0").bandwidth == 10e9


def test_plan_summarises_modules_by_ranges():
    paths = ["model", "model.embed", "model.layers.0.attn", "model.layers.1.mlp", "model.layers.3", "", "lm_head"]
    assert modules_of(paths) == ("model.embed", "model.layers.0-1", "model.layers.3", "lm_head")


def test_built_in_plugins_plan_without_packages(run_plan, monkeypatch):
    monkeypatch.setenv("DJINN_DISABLE", "parallel,cost_based")
    assert json.loads(run_plan(1, "--json"))["scheduler"] == "sequential"
