"""`generate()` with late stop checks has the same results and side effects as with a wait for each token."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._pytree import tree_map_only

import djinn
from djinn_client.interception.async_fetch import Pending
from djinn_integrations.late_stop.check import LateStopCheck
from djinn_integrations.late_stop.pace import StepTimes

REMOTE = "remote_accelerator:0"
TOKENS = 14
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
VOCABULARY = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": None}


def make_model(name):
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    match name:
        case "gpt2":
            model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **VOCABULARY))
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**SIZES, **VOCABULARY))
        case "mistral":
            model = MistralForCausalLM(MistralConfig(**SIZES, **VOCABULARY, sliding_window=6))
        case "t5":
            sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
            model = T5ForConditionalGeneration(
                T5Config(**sizes, **VOCABULARY, pad_token_id=0, decoder_start_token_id=0)
            )
    with torch.no_grad():  # with freshly initialized weights, one token wins every time
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def executor():
    djinn.shut_down()
    djinn.configure(threads=1)
    djinn.init()
    yield
    djinn.shut_down()
    djinn.configure()


@pytest.fixture(scope="module")
def models():
    """Return a function that returns the local and the remote model of a name."""
    made = {}

    def get(name):
        if name not in made:
            local = make_model(name)
            made[name] = local, copy.deepcopy(local).to(REMOTE)
        return made[name]

    return get


@pytest.fixture
def checks(monkeypatch):
    """Return a list of all late checks. `undone` of each check is the result of its `finish`."""
    seen = []
    finish, begin = LateStopCheck.finish, LateStopCheck.__init__

    def record_begin(self, *args):
        begin(self, *args)
        seen.append(self)

    def record_finish(self):
        self.undone = finish(self)
        return self.undone

    monkeypatch.setattr(LateStopCheck, "__init__", record_begin)
    monkeypatch.setattr(LateStopCheck, "finish", record_finish)
    return seen


@pytest.fixture
def delay_replies(monkeypatch):
    """Return a function that delays each reply by a number of steps, as a slow link would."""

    def delay_by(steps):
        monkeypatch.setattr(StepTimes, "lateness", lambda self: steps)
        monkeypatch.setattr(Pending, "done", lambda self: False)

    return delay_by


class Streamer:
    """A streamer that stores its tokens; optionally raises at a token."""

    def __init__(self, raises_at=None):
        self.got = []
        self.raises_at = raises_at

    def put(self, tokens):
        assert tokens.device.type == "cpu"
        self.got.append(tokens.tolist())
        if len(self.got) == self.raises_at:
            raise RuntimeError("no more")

    def end(self):
        self.got.append("end")


def prompt_of(rows):
    return torch.randint(2, 60, (rows, 4), generator=torch.Generator().manual_seed(rows))


def generate(model, prompt, seed=3, **options):
    prompt = prompt.to(model.device)
    torch.manual_seed(seed)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def stop_tokens_at(model, prompt, place, **options):
    """Return stop tokens that end the rows at index `place`, or earlier if a token occurs before."""
    free = generate(model, prompt, **options)
    return sorted({int(row[place + i - TOKENS]) for i, row in enumerate(free)})


def cache_of(cache):
    layers = getattr(cache, "self_attention_cache", cache).layers
    return [(layer.keys, layer.values, torch.as_tensor(layer.get_seq_length())) for layer in layers]


def output_parts(output, cache):
    """Return all parts of a result in a fixed order."""
    if isinstance(output, torch.Tensor):
        collected = {"sequences": output}
    else:
        collected = {name: value for name, value in output.items() if name != "past_key_values"}
        cache = output.past_key_values
    return collected | {"cache": cache_of(cache) if cache is not None else None}


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, check_device=False, check_stride=True)
    assert memory(actual) == memory(expected)


def memory(output_parts):
    """Return storage offset and storage size of each tensor."""
    return tree_map_only(torch.Tensor, lambda t: (t.storage_offset(), t.untyped_storage().nbytes()), output_parts)


def dynamic(config):
    from transformers import DynamicCache

    return DynamicCache(config=config)


def static(config):
    from transformers import StaticCache

    return StaticCache(config=config, max_cache_len=32)


ALL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
SAMPLING = {"do_sample": True, "top_k": 30, "temperature": 1.3}
CASES = {
    "greedy": ("gpt2", 1, 5, {}, None),
    "greedy-rows-streamed": ("gpt2", 3, 2, {"streamed": True}, None),
    "sampled-rows": ("llama", 2, 3, SAMPLING, None),
    "sampled-all-outputs": ("gpt2", 2, 4, {**ALL, **SAMPLING, "repetition_penalty": 1.2}, None),
    "attentions": ("eager", 1, 2, {"return_dict_in_generate": True, "output_attentions": True}, None),
    "no-cache": ("gpt2", 1, 3, {"use_cache": False}, None),
    "own-dynamic-cache": ("llama", 2, 4, SAMPLING, dynamic),
    "own-static-cache": ("llama", 2, 4, {}, static),
    "sliding-cache-returned": ("mistral", 2, 9, ALL, None),
    "static-cache-dropped": ("llama", 1, 3, {"cache_implementation": "static"}, None),
    "encoder-decoder": ("t5", 2, 3, {**ALL, **SAMPLING}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_late_stop_equals_waiting_for_each_token(case, models, delay_replies, checks):
    name, rows, steps, options, make_cache = CASES[case]
    local, remote = models("llama" if name == "eager" else name)
    prompt = prompt_of(rows)
    options = dict(options)
    streamed = options.pop("streamed", False)
    plain = {k: v for k, v in options.items() if k in {*SAMPLING, "repetition_penalty"}}
    options["eos_token_id"] = stop_tokens_at(local, prompt, 5, **plain)
    delay_replies(steps)
    answers = []
    for model in (local, remote):
        if name == "eager":
            model.set_attn_implementation("eager")
        streamer = Streamer() if streamed else None
        cache = make_cache(model.config) if make_cache else None
        output = generate(model, prompt, streamer=streamer, past_key_values=cache, **options)
        drawn = torch.rand(4, device=model.device)
        if name == "eager":
            model.set_attn_implementation("sdpa")
        answers.append((output_parts(output, cache), drawn, streamer.got if streamed else None))
    (check,) = checks
    assert check.undone > 0, "nothing was surplus, and nothing is shown"
    (expected, drawn_here, heard_here), (actual, drawn, heard) = answers
    assert actual["sequences"].tolist() == expected["sequences"].tolist()
    assert len(actual["sequences"][0]) < prompt.shape[1] + TOKENS
    assert_same(actual, expected)
    assert torch.equal(drawn.cpu(), drawn_here)
    assert heard == heard_here
    djinn.synchronize()


@pytest.mark.parametrize("place", [0, 6, TOKENS - 1])
def test_stop_at_any_step(place, models, delay_replies):
    local, remote = models("gpt2")
    prompt = prompt_of(2)
    ends = stop_tokens_at(local, prompt, place, do_sample=True)
    delay_replies(1 + place)
    expected = generate(local, prompt, do_sample=True, eos_token_id=ends)
    drawn = torch.rand(2)
    assert generate(remote, prompt, do_sample=True, eos_token_id=ends).tolist() == expected.tolist()
    assert torch.equal(torch.rand(2, device=REMOTE).cpu(), drawn)


def test_cache_continues_after_late_stop(models, delay_replies):
    local, remote = models("mistral")
    delay_replies(4)
    answers = []
    for model in (local, remote):
        cache = dynamic(model.config)
        first = generate(
            model, prompt_of(1), past_key_values=cache, eos_token_id=stop_tokens_at(local, prompt_of(1), 7)
        )
        more = torch.cat([first.cpu(), prompt_of(1)], dim=1)
        answers.append(generate(model, more, past_key_values=cache).tolist())
    assert answers[1] == answers[0]


@pytest.mark.parametrize("length", [3, 9], ids=["short", "long"])  # the window is 6
@pytest.mark.parametrize("place", [0, 1, 4, None])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_returned_cache_has_layout_of_local(name, place, length, models, delay_replies, checks):
    local, remote = models(name)
    delay_replies(2)
    prompt = torch.randint(2, 60, (2, length), generator=torch.Generator().manual_seed(1))
    ends = None if place is None else stop_tokens_at(local, prompt, place)
    options = {"return_dict_in_generate": True, "eos_token_id": ends}
    expected, actual = (output_parts(generate(model, prompt, **options), None) for model in (local, remote))
    assert bool(checks[-1].undone) == (place is not None)
    assert_same(actual, expected)


def test_late_stop_respects_max_length(models, delay_replies, checks):
    _, remote = models("gpt2")
    delay_replies(5)
    assert generate(remote, prompt_of(1), max_new_tokens=4).shape[1] == 4 + 4
    assert (checks[-1].steps, checks[-1].undone) == (4, 0)


def test_late_stop_respects_model_positions(models, delay_replies, checks, caplog):
    local, remote = models("gpt2")
    delay_replies(5)
    long = torch.randint(2, 60, (1, 62), generator=torch.Generator().manual_seed(1))
    last = generate(local, long, max_new_tokens=2)[0, -1].item()
    expected = generate(local, long, max_new_tokens=9, eos_token_id=last)
    assert generate(remote, long, max_new_tokens=9, eos_token_id=last).tolist() == expected.tolist()
    assert checks[-1].steps == 2
    assert not caplog.records


def test_failures_in_surplus_steps_are_undone(models, delay_replies, checks):
    local, remote = models("gpt2")
    delay_replies(4)
    ends = stop_tokens_at(local, prompt_of(1), 3)
    expected = generate(local, prompt_of(1), eos_token_id=ends)
    actual = generate(remote, prompt_of(1), eos_token_id=ends, pad_token_id=4711)  # invalid token: surplus steps fail
    assert actual.tolist() == expected.tolist()
    assert checks[-1].undone == 4
    assert torch.ones(1, device=REMOTE).item() == 1
    djinn.synchronize()


def test_errors_of_surplus_steps_are_dropped(models, delay_replies, checks, monkeypatch):
    local, remote = models("llama")
    delay_replies(4)
    options = {**ALL, **SAMPLING}
    ends = stop_tokens_at(local, prompt_of(1), 3, **SAMPLING)
    expected = generate(local, prompt_of(1), eos_token_id=ends, **options)
    drawn = torch.rand(2)
    last = len(expected.scores)
    layer = remote.model.layers[1]
    forward = layer.forward
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > allowed:
            raise ValueError("too many steps")
        return forward(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", failing)
    allowed = last + 2
    actual = generate(remote, prompt_of(1), eos_token_id=ends, **options)
    assert len(calls) == allowed + 1
    assert_same(output_parts(actual, None), output_parts(expected, None))
    assert torch.equal(torch.rand(2, device=REMOTE).cpu(), drawn)
    calls.clear()
    allowed = last - 1
    with pytest.raises(ValueError, match="too many steps"):
        generate(remote, prompt_of(1), eos_token_id=ends, **options)


def test_remote_failure_of_a_step_is_raised(models, delay_replies, monkeypatch):
    _, remote = models("gpt2")
    delay_replies(3)
    calls = []
    forward = remote.transformer.wte.forward

    def wrong(tokens):
        calls.append(1)
        return forward(tokens + 4711 if len(calls) == 3 else tokens)

    monkeypatch.setattr(remote.transformer.wte, "forward", wrong)
    with pytest.raises(djinn.errors.RemoteIndexError):
        generate(remote, prompt_of(1), eos_token_id=0)
    djinn.synchronize()


def test_raising_callback_sees_exact_state(models, delay_replies):
    local, remote = models("llama")
    delay_replies(3)
    answers = []
    for model in (local, remote):
        cache = dynamic(model.config)
        streamer = Streamer(raises_at=5)
        with pytest.raises(RuntimeError, match="no more"):
            generate(model, prompt_of(1), streamer=streamer, past_key_values=cache, **SAMPLING)
        answers.append((cache_of(cache), torch.rand(2, device=model.device).cpu(), streamer.got))
    assert_same(answers[1], answers[0])
