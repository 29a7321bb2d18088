"""KV sessions: the memory of a cache is pinned, freed and restored by its program, on an executor with a memory limit and one without."""

from __future__ import annotations

import pytest
import torch
from configured import configured
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import djinn
from djinn.testing import executor_figures
from djinn_kv_cache.session import CacheMemory

REMOTE = "remote_accelerator:0"
MIB = 1 << 20
LIMIT = 64 * MIB
# A cache of 8 layers, with 2 x 64 KiB a layer and 32 tokens.
CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=512, pad_token_id=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def limited_device():
    """Yield the device on an executor with 64 MiB."""
    with configured(threads=1, memory_gib=LIMIT / 2**30):
        djinn.init()
        yield REMOTE


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def prompt(seed=0):
    return torch.randint(1, 512, (8, 48), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, steps, after=lambda cache: None):
    """Return the tokens and the cache of a greedy generation. `after`: called with the cache after each token."""
    cache, tokens = DynamicCache(config=CONFIG), []
    with torch.no_grad():
        for _ in range(steps):
            ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            tokens.append(ids)
            after(cache)
    return torch.cat([token.cpu() for token in tokens], dim=1), cache


def cache_bytes(cache):
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def fill(device, mib):
    """Return tensors that take `mib` MiB, each used once."""
    return [torch.full((MIB // 4,), float(n)).to(device) for n in range(mib)]


def test_freed_cache_is_restored(limited_device, model):
    expected, _ = generate(model, prompt(), 6)
    there = model.to(limited_device)
    try:
        seen = []

        def pause(cache):
            kv = djinn.kv_session(cache)
            assert kv.size().resident == kv.size().total == cache_bytes(cache)
            freed = kv.evict()
            seen.append(executor_figures()["memory_away"])
            assert (freed.total, freed.resident, freed.pinned) == (cache_bytes(cache), 0, 0)
            if len(seen) % 2:  # otherwise the next step restores it
                assert kv.restore().resident == cache_bytes(cache)

        tokens, cache = generate(there, prompt().to(limited_device), 6, pause)
        assert torch.equal(tokens, expected)
        assert len(seen) == 6
        assert seen[-1] >= cache_bytes(cache)
    finally:
        model.to("cpu")


def test_pinned_cache_is_not_evicted(limited_device, model):
    there = model.to(limited_device)
    try:
        pinned, first = generate(there, prompt().to(limited_device), 3)
        kv = djinn.kv_session(first)
        assert kv.pin().pinned == cache_bytes(first)
        _, other = generate(there, prompt(1).to(limited_device), 3)
        ballast = fill(limited_device, 60)
        for _ in range(2):  # so that the other cache has had to go
            assert sum(one.sum().item() for one in ballast) == sum(range(60)) * MIB // 4
        assert kv.size().resident == kv.size().total
        assert djinn.kv_session(other).size().resident < cache_bytes(other)
        kv.unpin()
        assert sum(one.sum().item() for one in ballast) == sum(range(60)) * MIB // 4
        assert kv.size().pinned == 0
        assert kv.size().resident < kv.size().total
        del ballast, pinned
    finally:
        model.to("cpu")


def test_successor_of_pinned_cache_is_pinned(limited_device, model):
    there = model.to(limited_device)
    try:
        sizes = []

        def pin(cache):
            if not sizes:
                djinn.kv_session(cache).pin()
            found = djinn.kv_session(cache).size()
            sizes.append(found.pinned)
            assert found.pinned == found.total == cache_bytes(cache)

        generate(there, prompt().to(limited_device), 5, pin)
        assert sizes == sorted(set(sizes))
        assert len(sizes) == 5
    finally:
        model.to("cpu")


def test_all_session_caches_are_found(limited_device, model):
    there = model.to(limited_device)
    try:
        planned = djinn.stats()["plans_made"]
        _, cache = generate(there, prompt().to(limited_device), 3)
        with djinn.kv_session() as kv:
            assert kv.pin().pinned == cache_bytes(cache)
        assert djinn.stats()["plans_made"] == planned, "programs are analysed, not planned"
        assert kv.size().pinned == 0
        assert kv.evict().resident == 0
        assert torch.isfinite(cache.layers[0].keys.cpu()).all()
    finally:
        model.to("cpu")


def test_oversized_pin_raises_and_loses_nothing(limited_device):
    count = LIMIT // 7  # floats: two of these are more than the limit
    large = torch.ones(count, device=limited_device)
    kv = djinn.kv_session([large])
    kv.pin()
    more = torch.ones(count, device=limited_device)
    with pytest.raises(torch.OutOfMemoryError, match="do not fit"):
        more.sum().item()
    assert large.sum().item() == count
    kv.close()
    again = torch.ones(count, device=limited_device)
    assert again.sum().item() == count
    with pytest.raises(torch.OutOfMemoryError, match="cannot pin the KV cache"):
        djinn.kv_session([large, again]).pin()
    assert large.sum().item() == again.sum().item() == count


def test_nothing_is_evicted_without_a_limit():
    with configured(threads=1):
        values = [torch.ones(1000, device=REMOTE)]
        kv = djinn.kv_session({"keys": values, "of": [(values[0], "twice")]})
        assert kv.size() == CacheMemory(4000, 4000, 0, limited=False)
        assert not kv.pin().limited
        with pytest.raises(djinn.errors.UnsupportedOperation, match="memory_gib"):
            kv.evict()
        assert djinn.kv_session(DynamicCache()).size() == CacheMemory()


def test_pool_executors_handle_own_caches(model):
    with configured(threads=1, executors=2, memory_gib=LIMIT / 2**30, placement_policy="round_robin"):
        there = model.to(REMOTE)
        try:
            _, cache = generate(there, prompt().to(REMOTE), 3)
            kv = djinn.kv_session(cache)
            before = kv.size()
            assert before.resident >= cache_bytes(cache)
            assert kv.evict().resident == 0
            assert kv.restore().resident == before.resident
        finally:
            model.to("cpu")
