"""Simulated devices: time by the roofline model, results by shape, memory as described, and a user's program on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import djinn
import djinn_simulated
from djinn.errors import StartupError
from djinn.testing import PluginConformance
from djinn_simulated.device import SETTING, SimulatedDevice
from djinn_simulated.pretending import OP_START_SECONDS

CLUSTER = """
network = { gbs = 10 }
[[machines]]
name = "node"
devices = 2
memory_gib = 1
tflops = 1
gbs = 100
link = { gbs = 100 }
"""
FLOPS, BANDWIDTH = 1e12, 1e11


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_simulated


@pytest.fixture
def cluster_file(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    return file


@pytest.fixture
def runtime(cluster_file):
    return SimulatedDevice(cluster_file).open(1)


def test_simulated_devices_match_cluster_file(cluster_file):
    found = SimulatedDevice(cluster_file).discover()
    assert [d.id for d in found] == ["simulated:0", "simulated:1"]
    assert {(d.kind, d.memory, d.flops, d.bandwidth) for d in found} == {("simulated", 1 << 30, FLOPS, BANDWIDTH)}


def test_no_devices_without_cluster_file():
    assert SimulatedDevice().discover() == ()
    with pytest.raises(StartupError, match=SETTING):
        SimulatedDevice().open(0)


def test_missing_cluster_file_raises():
    with pytest.raises(StartupError, match="nowhere"):
        SimulatedDevice(Path("/nowhere/cluster.toml")).discover()


def test_simulated_time_of_compute_and_memory_bound_ops(runtime):
    a, b = torch.ones(512, 256), torch.ones(256, 1024)
    with runtime.running():
        product = a @ b
    assert runtime.take_seconds() == pytest.approx(OP_START_SECONDS + 2 * 512 * 256 * 1024 / FLOPS)
    assert product.shape == (512, 1024)
    assert not product.any()
    with runtime.running():
        _ = product + product
    assert runtime.take_seconds() == pytest.approx(OP_START_SECONDS + 3 * product.nbytes / BANDWIDTH)
    assert runtime.take_seconds() == 0


def test_kernels_unknown_to_flop_counter(runtime):
    query, key = torch.ones(2, 4, 16, 8), torch.ones(2, 4, 32, 8)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    with torch.no_grad():
        with runtime.running():
            torch.nn.functional.scaled_dot_product_attention(query, key, key)
        attention = runtime.take_seconds()
        with runtime.running():
            layer(torch.ones(8, 256, 64))
    whole = 2 * 8 * 256 * (4 * 64 * 64 + 2 * 64 * 128) + 4 * 8 * 256 * 256 * 64
    assert attention >= OP_START_SECONDS + 4 * query.numel() * 32 / FLOPS
    assert runtime.take_seconds() == pytest.approx(OP_START_SECONDS + whole / FLOPS, rel=0.05)


def test_simulated_views_and_writes_share_memory(runtime):
    x = torch.ones(4, 6)
    with runtime.running():
        row = x.t()[2]
        same = x.add_(1)
        values, indices = x.max(1)
        parts = x.split(3, 1)
    assert row.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert same is x
    assert (values.shape, indices.dtype) == ((4,), torch.int64)
    assert [p.shape for p in parts] == [(4, 3), (4, 3)]


def test_ops_without_results_take_the_time_of_their_memory(runtime):
    weights, momenta = [[torch.ones(64, 64) for _ in range(3)] for _ in range(2)]
    with runtime.running():
        torch._foreach_mul_(weights, 0.9)
    assert runtime.take_seconds() == pytest.approx(OP_START_SECONDS + 3 * weights[0].nbytes / BANDWIDTH)
    with runtime.running():
        torch._foreach_add_(weights, momenta)
    assert runtime.take_seconds() == pytest.approx(OP_START_SECONDS + 6 * weights[0].nbytes / BANDWIDTH)


def test_results_without_elements_have_their_layout(runtime):
    with runtime.running():
        made = torch.empty_strided((0,), (1,)), torch.ones(2, 0) * 2
    assert [(tuple(one.shape), one.dtype) for one in made] == [((0,), torch.float32), ((2, 0), torch.float32)]


def test_data_dependent_ops_are_computed(runtime):
    mask = torch.tensor([True, False, True])
    with runtime.running():
        assert torch.nonzero(mask).shape == (2, 1)
        assert torch.zeros(2).sum().item() == 0


def test_simulation_stores_small_uploads_only(runtime):
    small, large = torch.ones(16, dtype=torch.uint8), torch.ones(2 << 20, dtype=torch.uint8)
    assert runtime.receive(small).all()
    assert not runtime.receive(large).any()


def test_memory_limit_follows_cluster_file(runtime):
    with runtime.running():
        held = torch.ones(1).expand(150 << 20).clone()
        assert runtime.memory()["allocated"] >= held.nbytes
        with pytest.raises(torch.OutOfMemoryError, match="are free"):
            held.clone()
        del held
        torch.ones(1).expand(150 << 20).clone()
    assert runtime.memory()["free"] == 1 << 30


@torch.no_grad()
def test_simulated_time_is_logged(cluster_file, monkeypatch, caplog):
    for name in ("DJINN_SERVERS", "DJINN_CONNECTION_FILE"):
        monkeypatch.delenv(name, raising=False)
    djinn.shut_down()
    settings = {"simulated": {"cluster": cluster_file}}
    djinn.configure(executor="inline", device="simulated:1", placement_policy="single", plugin_settings=settings)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()).to("remote_accelerator:0")
        data = torch.randn(512, 1024).to("remote_accelerator:0")
        djinn.synchronize()
        djinn.reset_stats()
        result = model(data).cpu()
        took = djinn.stats()["server_execute_us"] / 1e6
        (device,) = djinn.topology().devices
    finally:
        djinn.shut_down()
        djinn.configure()
    assert result.shape == (512, 1024)
    assert not result.any()
    product, rectified = 2 * 512 * 1024 * 1024 / FLOPS, 2 * result.nbytes / BANDWIDTH
    assert took == pytest.approx(product + rectified + 2 * OP_START_SECONDS, rel=0.1)
    assert (device.id, device.flops, device.bandwidth) == ("simulated:1", FLOPS, BANDWIDTH)
    assert "all results are zeros" in caplog.text
    assert "simulated devices would have needed 0.0011" in caplog.text
