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
from djinn_integrations.late_stop.pace import MAX_STEPS, StepTimes

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
def local_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, bos_token_id=1, eos_token_id=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def remote_model(local_model):
    return copy.deepcopy(local_model).to(REMOTE)


@pytest.fixture
def late_checks(monkeypatch):
    """Return a list of the late checks."""
    checks = []
    make = seam._make_check

    def record_check(*args, **kwargs):
        checks.append(make(*args, **kwargs))
        return checks[-1]

    monkeypatch.setattr(seam, "_make_check", record_check)
    return checks


def generate(model, **options):
    prompt = torch.tensor([[1, 7, 9]], device=model.device)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": 3, **options}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def counting_processors():
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


def test_custom_criteria_see_no_surplus_steps(local_model, remote_model, late_checks):
    criteria, processor = counting_processors()
    expected = generate(local_model, stopping_criteria=[copy.copy(criteria)])
    assert generate(remote_model, stopping_criteria=[criteria]).tolist() == expected.tolist()
    assert criteria.calls == 3
    generate(remote_model, logits_processor=[processor])
    assert processor.calls == TOKENS
    assert not late_checks


def fixed_window_static_cache(model):
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
    "a cache that forgets": lambda model: {"past_key_values": fixed_window_static_cache(model)},
    "padding that fails in a returned cache": lambda model: {"return_dict_in_generate": True, "pad_token_id": 4711},
}


@pytest.mark.parametrize("case", WAITING)
def test_unsupported_generation_waits_for_each_token(case, local_model, remote_model, late_checks):
    expected, actual = (generate(model, **WAITING[case](model)) for model in (local_model, remote_model))
    if not isinstance(actual, torch.Tensor):
        expected, actual = expected.sequences, actual.sequences
    assert actual.tolist() == expected.tolist()
    assert not late_checks


def test_late_stop_is_off_with_hooks_training_and_capture(remote_model, late_checks):
    calls = []
    with remote_model.model.layers[0].register_forward_hook(lambda *_: calls.append(1)):
        generate(remote_model)
    assert len(calls) == TOKENS
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        generate(remote_model)
    with djinn.capture():
        generate(remote_model)
    remote_model.train()
    generate(remote_model)
    remote_model.eval()
    assert not late_checks
    generate(remote_model)
    assert late_checks


def test_reason_for_waiting_is_logged(remote_model, caplog):
    criteria, _ = counting_processors()
    with caplog.at_level("DEBUG", "djinn.late_stop"):
        generate(remote_model, stopping_criteria=[criteria])
    assert "Criteria may have state" in caplog.text


def test_late_stop_is_disabled_in_open_session(local_model, remote_model, late_checks):
    djinn.configure(disable=("late_stop",))
    try:
        assert generate(remote_model).tolist() == generate(local_model).tolist()
    finally:
        djinn.configure(disable=())
    assert not late_checks


def test_late_stop_ignores_local_models(local_model, late_checks):
    generate(local_model)
    assert not late_checks


def test_late_stop_is_off_with_two_sampling_threads(remote_model, late_checks, monkeypatch):
    monkeypatch.setattr(StepTimes, "lateness", lambda self: 5)
    generate(remote_model, do_sample=True)
    (check,) = late_checks
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
        (1.0, 0.001, 0.001, MAX_STEPS),
        (None, 0.008, 0.031, 2),
    ],
)
def test_lateness_follows_round_trip_time(round_trip, issuing, running, steps, monkeypatch):
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
def test_steps_fetch_no_scalars(padding, local_model, remote_model, late_checks):
    prompt = torch.tensor([[1, 7, 9], [1, 5, 8]])
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": 3}
    expected = local_model.generate(prompt, attention_mask=mask, **options)
    prompt, mask = prompt.to(REMOTE), mask.to(REMOTE)
    with djinn.profile() as profile:
        tokens = remote_model.generate(prompt, attention_mask=mask, **options)
    assert late_checks
    assert not [e for e in profile.events if e.kind == "wait" and e.name == "a number"]
    assert torch.equal(tokens.cpu(), expected)
