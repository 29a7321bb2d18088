"""A prompt in chunks over two executors: the same logits, caches and tokens; whatever ops a model is made of."""

from __future__ import annotations

import re

import pytest
import torch

from djinn.hooks import hookimpl
from djinn_client.runtime import client
from djinn_optimizations.prefill import DivideSequences
from djinn_optimizations.prefill.choosing import ChunkChoice

REMOTE = "remote_accelerator:0"
LENGTH = 24


class FixedChunks:
    """The optimization `prefill` with given chunks, independent of the prompt's length."""

    djinn_api_version = "2.0"
    ends = (10, LENGTH)

    @hookimpl
    def djinn_register_optimizations(self):
        return [DivideSequences(lambda _, rows: ChunkChoice((*self.ends[:-1], rows.rows), "as given"))]


@pytest.fixture(scope="module")
def fixed_chunks(make_pool):
    plugin = FixedChunks()
    others = ("round_robin", "cleanup", "attention", "kv_cache", "transformer")
    with make_pool("round_robin", plugins=["pool", *others, plugin], exact=False):
        yield plugin


def prefill_reasons(plans):
    results = [r for plan in plans for r in plan.plan.results if r.optimization == "prefill"]
    return [r.reason for r in results if r.applied], [r.reason for r in results if not r.applied]


def models():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = LlamaConfig(hidden_size=32, intermediate_size=48, vocab_size=64, **layers)
    gpt = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0)
    return {"llama": LlamaForCausalLM(llama).eval(), "gpt": GPT2LMHeadModel(gpt).eval()}


@torch.no_grad()
@pytest.mark.parametrize(("name", "prompts"), [("llama", 2), ("gpt", 1)])
def test_divided_prefill_keeps_tokens(fixed_chunks, name, prompts):
    model = models()[name]
    prompt = torch.randint(1, 64, (prompts, LENGTH))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    tokens, logits = model.generate(prompt, **options), model(prompt).logits
    model.to(REMOTE)
    with client.record_plans() as plans:
        assert torch.equal(model.generate(prompt.to(REMOTE), **options).cpu(), tokens)
    assert prefill_reasons(plans)[0] == ["as given"]
    torch.testing.assert_close(model(prompt.to(REMOTE)).logits.cpu(), logits)


class ShapeOps(torch.nn.Module):
    """Shape ops between rows, with attention in between."""

    def __init__(self, length):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(64, 16), torch.nn.Embedding(64, 16)
        self.inward, self.norm = torch.nn.Linear(16, 48), torch.nn.LayerNorm(16)
        self.register_buffer("scale", torch.rand(length, 1))

    def forward(self, ids):
        rows = (self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))) * self.scale
        query, key, value = self.inward(rows.squeeze(0)).unsqueeze(0).chunk(3, dim=-1)
        query, key, value = (t.reshape(1, -1, 4, 4).permute(0, 2, 1, 3) for t in (query, key, value))
        made = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        made = made.transpose(1, 2).flatten(2) @ self.inward.weight[:16].t()
        made = torch.cat([made.softmax(-1), rows.mean(-1, keepdim=True).expand(-1, -1, 2)], -1)
        first, second = made.split([9, 9], dim=2)
        made = torch.where(first > second, first.sigmoid(), second.cumsum(-1))
        left = made.unbind(2)[0] + made.select(2, 1) + made.sum(2)
        return left, self.norm(rows)[:, -1], made.cumsum(1), made[:, 3:20]


@torch.no_grad()
@pytest.mark.parametrize("ends", [(10, LENGTH), (1, 2, LENGTH - 1)], ids=["two", "three"])
def test_divided_prefill_of_any_ops(fixed_chunks, ends, monkeypatch):
    monkeypatch.setattr(FixedChunks, "ends", ends)
    torch.manual_seed(0)
    model, ids = ShapeOps(ends[-1]).eval(), torch.randint(1, 64, (1, ends[-1]))
    expected = model(ids)
    model.to(REMOTE)
    with client.record_plans() as plans:
        for mine, other in zip(model(ids.to(REMOTE)), expected, strict=True):
            torch.testing.assert_close(mine.cpu(), other)
    assert prefill_reasons(plans)[0][:1] == ["as given"], [(len(p.graph.nodes), p.plan.results) for p in plans]


class MaskedOrWritten(torch.nn.Module):
    """Attention with an explicit mask, or with a write into its rows."""

    def __init__(self, written):
        super().__init__()
        self.words, self.written = torch.nn.Embedding(64, 16), written

    def forward(self, ids):
        rows = self.words(ids)
        if self.written:
            made = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
            return made.mul_(2)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=ids.device).tril()
        made = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=causal)
        return torch.nn.functional.scaled_dot_product_attention(made, rows, rows, is_causal=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("written", "reason"), [(True, "mul_.*writes into values that would be split"), (False, "has a mask or dropout")]
)
def test_indivisible_prefill_gives_reason(fixed_chunks, written, reason):
    model, ids = MaskedOrWritten(written).eval(), torch.randint(1, 64, (1, LENGTH))
    expected = model(ids)
    model.to(REMOTE)
    with client.record_plans() as plans:
        torch.testing.assert_close(model(ids.to(REMOTE)).cpu(), expected)
    applied, refused = prefill_reasons(plans)
    assert not applied
    assert any(re.search(reason, r) for r in refused), refused
