"""An executor keeps to its limit: nothing is lost, nothing changes, and what cannot be had is an error of one op."""

from __future__ import annotations

import gc
import itertools
import os
import stat

import pytest
import torch
from compared_layouts import equal, plain
from configured import configured
from long_forms import long_or
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import djinn
from djinn.testing import executor_figures, open_connections
from djinn_server.disk_quota import DiskQuota
from djinn_server.memory.spill import FileSpill, FreeExtents

REMOTE = "remote_accelerator:0"
MIB = 1 << 20
LIMIT = 64 * MIB


@pytest.fixture(scope="module")
def limited_device():
    """Yield the device on an own executor with 64 MiB."""
    with configured(threads=1, memory_gib=LIMIT / 2**30):
        djinn.init()
        yield REMOTE


@pytest.fixture
def actions_since_start(limited_device):
    """Return a function that counts memory actions of a name since the start of the test."""
    djinn.synchronize()
    before = executor_figures()

    def since(name):
        return executor_figures()[name] - before[name]

    return since


def peak():
    return executor_figures()["memory_run_peak"]


def test_oversized_training_is_bitwise_equal(limited_device, actions_since_start):
    def trained(device):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(6))).to(device)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=False)
        data = torch.randn(256, 768, generator=torch.Generator().manual_seed(1)).to(device)
        losses = []
        for _ in range(3):
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [parameter.detach().cpu() for parameter in model.parameters()]

    losses, parameters = trained("cpu")
    found, there = trained(limited_device)
    assert found == losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, there, strict=True))
    assert actions_since_start("evictions") > 0
    assert actions_since_start("restored_bytes") > 0
    assert peak() <= LIMIT


def test_restored_values_share_memory(limited_device, actions_since_start):
    squares = [torch.full((MIB,), float(i), device=limited_device) for i in range(24)]
    columns = [square.view(1024, 1024)[:, :512] for square in squares]
    for column in columns:
        column.add_(0.5)
    for i, square in enumerate(squares):
        there = square.cpu().view(1024, 1024)
        assert there[:, :512].eq(i + 0.5).all()
        assert there[:, 512:].eq(i).all()
    assert actions_since_start("evictions") >= 8


def test_unwritten_values_are_spilled_once(limited_device, actions_since_start):
    weights = [torch.randn(MIB).to(limited_device) for _ in range(20)]

    def total():
        return sum(weight.sum() for weight in weights).item()

    first = total()
    written = actions_since_start("spilled_bytes")
    for _ in range(3):
        assert total() == first
    assert actions_since_start("restored_bytes") > 0
    assert actions_since_start("spilled_bytes") <= max(written, 20 * 4 * MIB)


@pytest.mark.filterwarnings("ignore:(Sparse|.*functions that produce)")
def test_sparse_and_nested_tensors_spill_and_return(limited_device, actions_since_start):
    def made(i, device):
        dense = torch.arange(float(MIB // 2), device="cpu").add(i).reshape(512, 1024).to(device)
        return [dense.to_sparse_csr(), torch.quantize_per_tensor(dense, 2.0**12, i, torch.qint32), dense.to_sparse()]

    held = [made(i, limited_device) for i in range(8)]
    for i in range(8):
        assert equal(plain(held[i]), plain(made(i, "cpu")))
    assert actions_since_start("evictions") > 0
    assert actions_since_start("restored_bytes") > 0
    assert peak() <= LIMIT


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_memory_counts_indices_and_values(limited_device):
    def held():
        gc.collect()
        djinn.synchronize()
        return torch.remote_accelerator.memory_allocated()

    ours = [torch.arange(4096.0).to(limited_device).to_sparse() for _ in range(2)]
    base = held()
    csr = torch.eye(512).to(limited_device).to_sparse_csr()
    parts = [csr.crow_indices(), csr.col_indices(), csr.values()]
    assert held() - base == sum(part.nbytes for part in parts) == 513 * 8 + 512 * 8 + 512 * 4
    del csr, parts
    assert held() == base
    del ours[0]
    assert base - held() == 4095 * (8 + 4)


def test_failed_allocation_fails_its_op(limited_device):
    kept = torch.ones(1000, device=limited_device)
    huge = torch.zeros(LIMIT, device=limited_device)  # four times as many bytes
    other = kept + 1
    with pytest.raises(torch.OutOfMemoryError, match=r"268,435,456 bytes do not fit.*67,108,864.*memory_gib"):
        huge.sum().item()
    assert other.sum().item() == 2000
    assert torch.full((MIB,), 3.0, device=limited_device).sum().item() == 3 * MIB


def test_failed_upload_fails_its_users(limited_device):
    with pytest.raises(torch.OutOfMemoryError, match="out of memory for an upload"):
        torch.zeros(2 * LIMIT, dtype=torch.uint8).to(limited_device).sum().item()
    assert torch.ones(10).to(limited_device).sum().item() == 10


def test_failing_op_under_pressure_poisons_dependants(limited_device, actions_since_start):
    parts = [torch.full((MIB,), float(i), device=limited_device) for i in range(20)]
    bad = torch.zeros(3, device=limited_device)[torch.tensor([7]).to(limited_device)]
    sums = torch.stack([part.sum() for part in parts])
    with pytest.raises(IndexError):
        (bad + 1).sum().item()
    assert sums.tolist() == [float(i) * MIB for i in range(20)]
    assert actions_since_start("evictions") > 0


def test_random_numbers_are_drawn_once_under_limit(limited_device, actions_since_start):
    torch.manual_seed(3)
    noise = [torch.randn(MIB, device=limited_device) for _ in range(20)]
    again = [n * 2 for n in noise]
    torch.manual_seed(3)
    for n, twice in zip(noise, again, strict=True):
        assert torch.equal(n.cpu() * 2, twice.cpu())
    assert actions_since_start("evictions") > 0


def test_executor_memory_figures(limited_device):
    figures = executor_figures()
    assert figures["memory_limit"] == LIMIT
    assert figures["device_total"] == LIMIT
    assert open_connections()[0].attached.device.memory == LIMIT
    assert open_connections()[0].attached.device.spill > 0


def cache_bytes(cache):
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("ballast", [0, 56], ids=["room", "short"])
def test_decode_cache_counts_its_bytes(limited_device, actions_since_start, ballast):
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(limited_device)
    beside = [torch.full((MIB // 4,), 1.0).to(limited_device) for _ in range(ballast)]
    weights = sum(p.nbytes for p in model.parameters())
    ids = torch.randint(1, 512, (4, 20), generator=torch.Generator().manual_seed(0)).to(limited_device)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        for step in range(long_or(20, 48)):
            ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            ids.cpu()
            figures = executor_figures()
            assert figures["used_caches"] == cache_bytes(cache), step
            assert weights <= figures["used_weights"] < weights + 4096, step
    assert bool(actions_since_start("evictions")) is bool(ballast)
    assert all(one.sum().item() == MIB // 4 for one in beside)


def test_cache_bytes_count_during_generation(limited_device):
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(limited_device)
    ids = torch.randint(1, 512, (1, 12), generator=torch.Generator().manual_seed(0)).to(limited_device)
    seen, tokens = [], 480  # so many that the session forgets the kinds of values that are gone, more than once

    class CountingStreamer(list):
        """A streamer that stores the executor's counters at each token."""

        def put(self, _):
            seen.append(executor_figures()["used_caches"])

        def end(self):
            """The text is whole."""

    mask = torch.ones_like(ids)
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=CountingStreamer(),
            return_dict_in_generate=True,
        )  # fmt: skip
    assert seen[-1] == cache_bytes(made.past_key_values)
    a_token = cache_bytes(made.past_key_values) // (12 + tokens - 1)
    # When a token comes, later steps may be under way, and the executor may run one step ahead of the last.
    counted = [held / a_token - 12 for held in seen[1:]]
    assert all(n <= held <= tokens for n, held in enumerate(counted)), counted


def test_spill_file_is_private(tmp_path):
    space = FileSpill(DiskQuota(), tmp_path)
    tensors = [torch.full((5000,), i, dtype=torch.uint8) for i in range(3)]
    extents = [space.write(tensor) for tensor in tensors]
    assert not list(tmp_path.iterdir())
    assert stat.S_IMODE(os.fstat(space._descriptor()).st_mode) == 0o600
    assert space.used == 15_000
    for i, extent in enumerate(extents):
        back = bytearray(5000)
        extent.read_into(memoryview(back))
        assert set(back) == {i}
    space.free(extents[1])
    assert space.used == 10_000
    assert space.write(tensors[0]).start == extents[1].start
    space.close()
    assert space.used == 0


def test_free_extents_are_reused():
    gaps = FreeExtents()
    large = gaps.allocate(40_000)
    gaps.free_range(large, 40_000)
    small, rest = gaps.allocate(4096), gaps.allocate(30_000)
    assert (small, rest) == (large, large + 4096)
    assert gaps.end == large + 4096 + 32_768


def test_spill_file_does_not_grow_with_values_that_grow():
    gaps = FreeExtents()
    other = gaps.allocate(4096)
    live, held, most = [], 0, 0
    for step in range(10_000):  # sizes that never come back the same
        size = 4096 * (16 + step * 7919 % 1999)
        live.append((gaps.allocate(size), size))
        held += size
        most = max(most, held)
        if len(live) > 4:
            start, size = live.pop(step * 31 % 5)
            gaps.free_range(start, size)
            held -= size
        assert gaps.end <= 3 * most
    ranges = sorted([(other, 4096), *live])
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ranges)), "none overlap"
    for start, size in live:
        gaps.free_range(start, size)
    assert gaps.end == 4096
