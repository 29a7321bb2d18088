"""Prompts with common first tokens, with the cache of results and `exact=False`: rows that an earlier run has are not computed again."""

from __future__ import annotations

import copy

import pytest
import torch
from configured import configured

import djinn
from djinn.testing import executor_figures

REMOTE = "remote_accelerator:0"
CACHE = {"result_cache": {"gib": 0.25, "seconds": 0.0}}
SHARED, WIDTH = 24, 16
SMALL = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
LLAMA = SMALL | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "gpt2": SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "llama": LLAMA,
    "phi3": LLAMA,
    "opt": LLAMA | {"ffn_dim": 64, "word_embed_proj_dim": 32},
}


@pytest.fixture
def caching_session():
    with configured(executor="inline", plugin_settings=CACHE, threads=1, exact=False):
        djinn.init()
        yield


def runs_reused():
    return executor_figures()["runs_reused"]


def prompts(*lengths, shared=SHARED):
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(2, 100, (1, shared), generator=generator)
    rest = [torch.randint(2, 100, (1, length - shared), generator=generator) for length in lengths]
    return [torch.cat([first, one], 1) for one in rest]


@pytest.mark.usefixtures("caching_session")
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_after_a_common_prefix_gives_logits_and_cache_of_local(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    local = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family])).eval()
    remote = copy.deepcopy(local).to(REMOTE)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for number, ids in enumerate(prompts(30, 40, 25, 33)):
        before = runs_reused()
        found, expected = (model.generate(one, **options) for model, one in ((remote, ids.to(REMOTE)), (local, ids)))
        pairs = [*zip(found.logits, expected.logits, strict=True)]
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            pairs += [(ours.keys, theirs.keys), (ours.values, theirs.values)]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.cpu(), theirs)
            assert ours.stride() == theirs.stride()
        assert not number or runs_reused() == before + 1
    assert executor_figures()["result_cache_prefix_hits"] == 3


class Model:
    """A layer of attention. Its parts can be replaced by parts that mix rows."""

    def __init__(self, **parts):
        generator = torch.Generator().manual_seed(1)
        sizes = {"words": (100, WIDTH), "places": (128, WIDTH), "qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
        self.weights = {name: torch.randn(size, generator=generator) * 0.3 for name, size in sizes.items()}
        self.parts = {
            "positions": lambda n, d: torch.arange(n, device=d),
            "mix": lambda x, _: x,
            "attend": causal_attention,
        } | parts

    def run(self, ids, device, shift=0):
        """Return keys, values and the last row."""
        at = {name: one.to(device) for name, one in self.weights.items()}
        ids = ids.to(device)
        places = self.parts["positions"](ids.shape[1], device) + shift
        x = torch.nn.functional.embedding(ids, at["words"]) + torch.nn.functional.embedding(places, at["places"])
        x = self.parts["mix"](x, ids)
        q, k, v = (one.view(1, -1, 2, 8).transpose(1, 2) for one in (x @ at["qkv"].t()).split(WIDTH, -1))
        k, v = k.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)
        made = self.parts["attend"](q, k, v).transpose(1, 2).reshape(1, -1, WIDTH)
        return k, v, torch.tanh(torch.nn.functional.linear(made, at["out"]) + x)[:, -1].sum(-1)


def causal_attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def full_attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def masked_attention(allowed):
    def attend(q, k, v):
        row = torch.arange(q.shape[-2], device=q.device)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed(row[:, None], row[None]))

    return attend


def count_reused_runs(model, *runs):
    """Return how many of the runs reused an earlier run. Compare each with the local result."""
    before = runs_reused()
    for ids, shift in runs:
        found, expected = model.run(ids, REMOTE, shift), model.run(ids, "cpu", shift)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)
            assert ours.stride() == theirs.stride()
    return runs_reused() - before


SOUND = {
    "causal": {},
    "causal mask": {"attend": masked_attention(lambda row, key: key <= row)},
    "window": {"attend": masked_attention(lambda row, key: (key <= row) & (key > row - 7))},
    "norm of a row": {"mix": lambda x, _: torch.nn.functional.layer_norm(x, (WIDTH,))},
    "repeated": {"positions": lambda n, d: torch.arange(n, device=d) % 5},
}
UNSOUND = {
    "attention to later rows": {"attend": full_attention},
    "one later row": {"attend": masked_attention(lambda row, key: (key <= row) | ((row == 3) & (key == 27)))},
    "mask depends on the length": {
        "attend": masked_attention(lambda row, key: (key <= row) & (row + key != key.shape[1]))
    },
    "mean of the rows": {"mix": lambda x, _: x + x.mean(1, keepdim=True)},
    "sum over rows": {"mix": lambda x, _: x.cumsum(1)},
    "norm of all rows": {"mix": lambda x, _: torch.nn.functional.layer_norm(x, x.shape[1:])},
    "rows reversed": {"mix": lambda x, _: x.flip(1)},
    "positions from the end": {"positions": lambda n, d: n - torch.arange(n, device=d)},
    "number of rows": {"mix": lambda x, _: x * x.shape[1]},
    "neighbours": {"mix": lambda x, _: torch.cat([x[:, 1:], x[:, :1]], 1)},
    "rows twice": {"mix": lambda x, _: torch.cat([x, x], 1)[:, : x.shape[1]]},
    "rows as columns": {"mix": lambda x, _: x.transpose(1, 2).reshape(1, -1, WIDTH)},
    "softmax over rows": {"mix": lambda x, _: x.softmax(1)},
    "sum of the tokens": {"mix": lambda x, ids: x * ids.sum()},
    "product over rows": {"mix": lambda x, _: x @ (x.transpose(1, 2) @ x)},
}

SOUND_FOR_ONE_LENGTH = {"mask depends on the length", "positions from the end", "number of rows"}


@pytest.mark.usefixtures("caching_session")
@pytest.mark.parametrize("parts", SOUND.values(), ids=SOUND)
def test_rows_of_an_earlier_run_are_reused_if_they_depend_on_no_later_row(parts):
    assert count_reused_runs(Model(**parts), *[(ids, 0) for ids in prompts(28, 35, 40, 27)]) == 3


@pytest.mark.usefixtures("caching_session")
@pytest.mark.parametrize("name", UNSOUND)
def test_runs_whose_first_rows_depend_on_later_ones_are_computed(name):
    lengths = (28, 35, 40, 27) if name in SOUND_FOR_ONE_LENGTH else (28, 28, 35, 35)
    assert count_reused_runs(Model(**UNSOUND[name]), *[(ids, 0) for ids in prompts(*lengths)]) == 0


@pytest.mark.usefixtures("caching_session")
class TestKey:
    def test_other_positions_are_computed(self):
        first, second, third = prompts(28, 35, 40)
        assert count_reused_runs(Model(), (first, 0), (second, 1), (third, 1)) == 1

    def test_other_weights_are_computed(self):
        model, (first, second, third) = Model(), prompts(28, 35, 40)
        assert count_reused_runs(model, (first, 0)) == 0
        model.weights["qkv"] = model.weights["qkv"] + 1
        assert count_reused_runs(model, (second, 0), (third, 0)) == 1

    def test_other_shapes_are_computed(self):
        model, (first, second) = Model(), prompts(28, 35)
        for ids, sizes in ((first, (2, 8)), (second, (4, 4))):
            model.parts["mix"] = lambda x, _, sizes=sizes: x.view(1, -1, *sizes).softmax(-1).view(1, -1, WIDTH)
            assert count_reused_runs(model, (ids, 0)) == 0

    def test_short_common_prefix_is_computed(self):
        assert count_reused_runs(Model(), *[(ids, 0) for ids in prompts(28, 35, shared=4)]) == 0

    def test_prompt_that_an_earlier_one_begins_with_is_reused(self):
        (ids,) = prompts(40)
        lengths = (40, 30, 29, 28)  # the client has the layouts of the second run checked
        assert count_reused_runs(Model(), *[(ids[:, :length].clone(), 0) for length in lengths]) >= 2

    def test_writes_into_results_do_not_change_later_runs(self):
        model, (first, second, third) = Model(), prompts(28, 35, 40)
        kept = list[torch.Tensor]()
        for ids in (first, second):
            kept.extend(model.run(ids, REMOTE))
            djinn.synchronize()
        for one in kept:
            one.zero_()
        djinn.synchronize()
        assert count_reused_runs(model, (third, 0)) == 1


def test_exact_sessions_compute_all_rows():
    with configured(executor="inline", plugin_settings=CACHE, threads=1):
        djinn.init()
        assert count_reused_runs(Model(), *[(ids, 0) for ids in prompts(28, 35, 40)]) == 0
