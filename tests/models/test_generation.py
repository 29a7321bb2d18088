"""Hugging Face's `generate()` gives the same tokens here and on a server, with one round trip a token at the most."""

from __future__ import annotations

import copy

import pytest
import torch

import djinn

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module")
def small_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=384, n_positions=128, n_embd=64, n_layer=3, n_head=4)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # with weights as they are initialised one token wins every time
        for block in model.transformer.h:
            block.mlp.c_proj.weight.mul_(30)
    return model


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(0, 384, (2, 12), generator=torch.Generator().manual_seed(3))


def generate(model, prompt, count, **options):
    options = {"do_sample": False, "pad_token_id": 0, **options}
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=count, max_new_tokens=count, **options
    )


def test_greedy_tokens_equal_local(over, small_model, prompt):
    expected = generate(small_model, prompt, 24)
    assert len(set(expected[0, 12:].tolist())) > 8, "the model says the same thing all the time: nothing is shown"
    tokens = generate(copy.deepcopy(small_model).to(REMOTE), prompt.to(REMOTE), 24)
    assert tokens.device == torch.device(REMOTE)
    assert tokens.tolist() == expected.tolist()


def test_beam_search_equals_local(over_tcp, small_model, prompt):
    expected = generate(small_model, prompt, 8, num_beams=3)
    assert (
        generate(copy.deepcopy(small_model).to(REMOTE), prompt.to(REMOTE), 8, num_beams=3).tolist() == expected.tolist()
    )


def test_sampled_tokens_equal_local(over_tcp, small_model, prompt):
    torch.manual_seed(5)
    expected = generate(small_model, prompt, 12, do_sample=True, top_k=20)
    torch.manual_seed(5)
    sampled = generate(copy.deepcopy(small_model).to(REMOTE), prompt.to(REMOTE), 12, do_sample=True, top_k=20)
    assert sampled.tolist() == expected.tolist()


def test_gpt2_with_full_vocabulary_equals_local(over_tcp):
    """The model has half of GPT-2 small's layers and width, and its full vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_embd=384, n_head=6, n_layer=6)).eval()
    prompt = torch.randint(0, 50257, (1, 16))
    expected = generate(model, prompt, 6)
    djinn.reset_stats()
    assert generate(model.to(REMOTE), prompt.to(REMOTE), 6).tolist() == expected.tolist()
    weights = sum({p.data_ptr(): p.numel() * 4 for p in model.cpu().parameters()}.values())
    assert djinn.stats()["bytes_uploaded"] == pytest.approx(weights, rel=0.01), "tied weights travel once"


class StepCounters:
    """Store the client's counters at each step of `generate()`, as a logits processor."""

    def __init__(self):
        self.taken = []

    def __call__(self, input_ids, scores):
        self.taken.append(dict(djinn.stats()))
        return scores

    def per_step(self, name):
        """Return the increase of a counter from each step to the next."""
        return [b[name] - a[name] for a, b in zip(self.taken, self.taken[1:], strict=False)]


@pytest.fixture(scope="module")
def steps(over, small_model, prompt):
    """Return the counters of two runs. The second run needs no new plans or templates."""
    model = copy.deepcopy(small_model).to(REMOTE)
    runs = []
    for _ in range(2):
        steps = StepCounters()
        generate(model, prompt.to(REMOTE), 18, logits_processor=[steps])
        runs.append(steps)
    return runs


def test_decode_step_takes_one_round_trip(steps):
    for run in steps:
        assert set(run.per_step("round_trips")[2:]) == {1}


def test_decode_steps_reuse_plans_and_templates(steps):
    first, second = steps
    for name in ("plans_made", "templates_sent"):
        assert set(first.per_step(name)[2:]) == {0}, f"{name}: prefill and the first two steps differ"
        assert set(second.per_step(name)[1:]) == {0}, name
    for name in ("templates_reused", "submissions"):
        assert set(first.per_step(name)[2:]) == {1}, name


def test_decode_step_uploads_nothing(steps, over):
    _, run = steps
    assert set(run.per_step("bytes_uploaded")) == {0}
    # Over HTTP most of it are the headers of requests, whose number depends on who waits when.
    assert max(run.per_step("bytes_sent")[1:]) < (1024 if over == "tcp" else 4096)
    assert max(run.per_step("bytes_received")) < 2048
    assert min(run.per_step("instructions_sent")) > 50
