"""`generate()` waits only if a late stop check could be observed, and seldom otherwise."""

from __future__ import annotations

import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import djinn
from djinn_integrations.late_stop import seam
from djinn_integrations.late_stop.pace import MOST, StepTimes

REMOTE = "remote_accelerator:0"
TOKENS = 6


@pytest.fixture(scope="module", autouse=True)
def executor():
    djinn.shut_down()
    djinn.configure(threads=1)
    yield
    djinn.shut_down()
    djinn.configure()


@pytest.fixture(scope="module")
def local():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, bos_token_id=1, eos_token_id=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def remote(local):
    return copy.deepcopy(local).to(REMOTE)


@pytest.fixture
def made(monkeypatch):
    """Return a list of the late checks."""
    checks = []
    make = seam._make_check

    def noted(*args, **kwargs):
        checks.append(make(*args, **kwargs))
        return checks[-1]

    monkeypatch.setattr(seam, "_make_check", noted)
    return checks


def generate(model, **options):
    prompt = torch.tensor([[1, 7, 9]], device=model.device)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": 3, **options}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def counting():
    from transformers import LogitsProcessor, StoppingCriteria

    class Criteria(StoppingCriteria):
        def __init__(self):
            self.calls = 0

        def __call__(self, input_ids, scores, **_):
            self.calls += 1
            return torch.full((len(input_ids),), self.calls == 3, device=input_ids.device)

    class Processor(LogitsProcessor):
        def __init__(self):
            self.calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores

    return Criteria(), Processor()


def test_custom_criteria_see_no_surplus_steps(local, remote, made):
    criteria, processor = counting()
    expected = generate(local, stopping_criteria=[copy.copy(criteria)])
    assert generate(remote, stopping_criteria=[criteria]).tolist() == expected.tolist()
    assert criteria.calls == 3
    generate(remote, logits_processor=[processor])
    assert processor.calls == TOKENS
    assert not made


def static_of_fixed_window(model):
    from transformers import StaticCache
    from transformers.cache_utils import StaticSlidingWindowLayer

    cache = StaticCache(config=model.config, max_cache_len=16)
    cache.layers = [StaticSlidingWindowLayer(16, 8)]
    return cache


WAITING = {
    "time": lambda model: {"max_time": 1000.0},
    "beams": lambda model: {"num_beams": 2},
    "prompt lookup": lambda model: {"prompt_lookup_num_tokens": 2},
    "assistant": lambda model: {"assistant_model": model},
    "a cache that forgets": lambda model: {"past_key_values": static_of_fixed_window(model)},
    "padding that fails in a returned cache": lambda model: {"return_dict_in_generate": True, "pad_token_id": 4711},
}


@pytest.mark.parametrize("case", WAITING)
def test_unsupported_generation_waits_for_each_token(case, local, remote, made):
    expected, actual = (generate(model, **WAITING[case](model)) for model in (local, remote))
    if not isinstance(actual, torch.Tensor):
        expected, actual = expected.sequences, actual.sequences
    assert actual.tolist() == expected.tolist()
    assert not made


def test_hooks_training_and_captures_wait(remote, made):
    calls = []
    with remote.model.layers[0].register_forward_hook(lambda *_: calls.append(1)):
        generate(remote)
    assert len(calls) == TOKENS
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        generate(remote)
    with djinn.capture():
        generate(remote)
    remote.train()
    generate(remote)
    remote.eval()
    assert not made
    generate(remote)
    assert made


def test_reason_for_waiting_is_logged(remote, caplog):
    criteria, _ = counting()
    with caplog.at_level("DEBUG", "djinn.late_stop"):
        generate(remote, stopping_criteria=[criteria])
    assert "Criteria may have state" in caplog.text


def test_late_stop_is_disabled_in_open_session(local, remote, made):
    djinn.configure(disable=("late_stop",))
    try:
        assert generate(remote).tolist() == generate(local).tolist()
    finally:
        djinn.configure(disable=())
    assert not made


def test_local_models_are_unchanged(local, made):
    generate(local)
    assert not made


def test_two_sampling_threads_wait(remote, made, monkeypatch):
    monkeypatch.setattr(StepTimes, "lateness", lambda self: 5)
    generate(remote, do_sample=True)
    (check,) = made
    assert check._may_go_on(4)
    inside, done = threading.Event(), threading.Event()

    def draw():
        with seam._sampling:
            inside.set()
            done.wait(300)

    other = threading.Thread(target=draw)
    with seam._sampling:
        other.start()
        inside.wait(300)
        assert not check._may_go_on(4)
        done.set()
        other.join()
        assert check._may_go_on(4)


def test_other_sample_function_is_unchanged():
    def sample(self, input_ids):
        pass

    older = SimpleNamespace(GenerationMixin=type("GenerationMixin", (), {"_sample": sample}))
    seam.adapt(older)
    assert older.GenerationMixin._sample is sample
    import transformers.generation.utils as present

    renamed = SimpleNamespace(**{k: v for k, v in vars(present).items() if k != "_undo_generation_steps"})
    before = present.GenerationMixin._sample
    seam.adapt(renamed)
    assert present.GenerationMixin._sample is before


@pytest.mark.parametrize(
    ("round_trip", "issuing", "running", "steps"),
    [
        (0.030, 0.008, 0.031, 2),
        (0.030, 0.003, 0.002, 11),
        (0.0002, 0.008, 0.031, 1),
        (0.0002, 0.003, 0.002, 1),
        (1.0, 0.001, 0.001, MOST),
        (None, 0.008, 0.031, 2),
    ],
)
def test_lateness_follows_link(round_trip, issuing, running, steps, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    pace = StepTimes(round_trip)
    assert pace.lateness() == 2
    for step in range(5):
        pace.begin_next()
        clock[0] += issuing * (3 if step == 2 else 1)
        pace.record_issued()
        pace.record_run(step * running)
    assert pace.lateness() == steps


@pytest.mark.parametrize("padding", [0, 1])
def test_steps_fetch_no_scalars(padding, local, remote, made):
    prompt = torch.tensor([[1, 7, 9], [1, 5, 8]])
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": 3}
    expected = local.generate(prompt, attention_mask=mask, **options)
    prompt, mask = prompt.to(REMOTE), mask.to(REMOTE)
    with djinn.profile() as profile:
        tokens = remote.generate(prompt, attention_mask=mask, **options)
    assert made
    assert not [e for e in profile.events if e.kind == "wait" and e.name == "a number"]
    assert torch.equal(tokens.cpu(), expected)
