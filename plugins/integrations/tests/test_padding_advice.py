"""transformers' advice about padding is shown without an additional round trip."""

from __future__ import annotations

import pytest
import torch

import djinn


@pytest.fixture(scope="module")
def model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, pad_token_id=3)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture
def advice(monkeypatch):
    from transformers import modeling_utils

    given = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", given.append)
    return given


@pytest.mark.parametrize(("ids", "padded"), [([5, 6, 3], True), ([3, 5, 6], True), ([5, 3, 6], False), ([3], False)])
def test_padding_without_mask_is_reported_late(model, embedded, advice, ids, padded):
    model.to(embedded)
    tokens = torch.tensor([[7] * len(ids), ids]).to(embedded)
    djinn.reset_stats()
    with torch.no_grad():
        logits = model(tokens).logits
    assert djinn.stats()["round_trips"] == 0
    logits.cpu()
    assert bool(advice) == padded
    assert all("attention_mask" in text for text in advice)


def test_cpu_and_masked_calls_are_unchanged(model, embedded, advice):
    with torch.no_grad():
        model.cpu()(torch.tensor([[5, 6, 3]]))
        assert len(advice) == 1
        remote = model.to(embedded)(torch.tensor([[5, 3]]).to(embedded), attention_mask=torch.ones(1, 2).to(embedded))
    remote.logits.cpu()
    assert len(advice) == 1
