"""Requests and tokens, counted from submissions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from djinn_client.runtime.connecting.servers import read_status
from djinn_core.wire.messages import Workload
from djinn_server.request_times import MODELS_LIMIT, OTHER_MODELS, RECENT, RequestTimes, together

PREFILL, DECODE, PLAIN = Workload("Llama", 8), Workload("Llama", 1), Workload("ResNet")


class Clock:
    """Feeds submissions that take a second each to a session's `RequestTimes`."""

    def __init__(self):
        self.times = RequestTimes()
        self.now = 1.0

    def run(self, workload, answers=True, pause=0.0):
        self.now += pause
        self.times.ran(workload, self.now, self.now + 1.0, answers=answers)
        self.now += 1.0

    @property
    def counts(self):
        self.times.close()
        found = self.times.figures()
        return found.requests, found.tokens


@pytest.fixture
def clock():
    return Clock()


def test_a_generation_is_one_request_of_all_its_tokens(clock):
    for _ in range(2):
        clock.run(PREFILL)
        for _ in range(3):
            clock.run(DECODE, pause=2.0)
    assert clock.counts == (2, 8)
    seen = clock.times.figures()
    assert (seen.model, seen.first_token.p50, seen.token.p99, seen.answer.p99) == ("Llama", 1.0, 3.0, 0.0)


def test_attention_without_decode_steps_answers_requests(clock):
    for _ in range(3):
        clock.run(PREFILL)
    assert clock.counts == (3, 0)
    assert clock.times.figures().answer.p50 == 1.0


def test_a_model_without_attention_answers_requests(clock):
    clock.run(PREFILL)
    clock.run(DECODE)
    for _ in range(3):
        clock.run(PLAIN)
    clock.run(None)
    assert clock.counts == (5, 2)
    assert set(clock.times.by_model) == {"Llama", "ResNet"}


def test_tokens_that_are_read_together_share_the_time(clock):
    clock.run(PREFILL)
    for step in range(4):
        clock.run(DECODE, answers=step == 3)
    assert clock.counts == (1, 5)
    assert clock.times.figures().token.p50 == 1.0


def test_a_prompt_in_pieces_has_one_first_token(clock):
    clock.run(PREFILL, answers=False)
    clock.run(PREFILL)
    clock.run(None)  # a second answer about the first token
    clock.run(DECODE)
    assert clock.counts == (1, 2)
    assert clock.times.figures().first_token.p50 == 2.0


def test_a_prompt_of_one_token_begins_a_generation(clock):
    for _ in range(4):
        clock.run(DECODE)
    assert clock.counts == (1, 4)


def test_figures_are_bounded(clock):
    for number in range(2 * MODELS_LIMIT):
        clock.run(Workload(f"Model{number}"))
    for _ in range(2 * RECENT):
        clock.run(Workload("ResNet"))
    assert clock.counts == (2 * MODELS_LIMIT + 2 * RECENT, 0)
    models = together([clock.times.by_model, {"Another": clock.times.by_model["Model0"]}])
    assert len(models) == MODELS_LIMIT + 1
    assert models[OTHER_MODELS].requests == MODELS_LIMIT + 2 * RECENT + 1
    assert len(models[OTHER_MODELS].answers.recent) == RECENT


def test_a_server_counts_what_a_model_generates(over_tcp, serving, url_of, monkeypatch):
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval().to("remote_accelerator:0")
    for length in (4, 5):
        prompt = torch.ones(1, length, dtype=torch.int64, device="remote_accelerator:0")
        model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0).cpu()
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to("remote_accelerator:0")
    plain(torch.ones(1, 4, device="remote_accelerator:0")).sum().item()
    monkeypatch.setenv("DJINN_TOKEN", serving.token)
    (row,) = read_status([url_of("tcp")])
    models = {one["model"]: one for executor in row["executors"] for one in executor["models"]}
    llama = models["LlamaForCausalLM"]
    assert (llama["requests"], llama["tokens"]) == (2, 12)
    assert 0 < llama["token"]["p50"] <= llama["token"]["p99"]
    assert llama["first_token"]["p99"] > 0
    assert models["Sequential"]["requests"] == 1
    (session,) = [one for executor in row["executors"] for one in executor["sessions"] if one["serving"]["tokens"]]
    assert (session["serving"]["requests"], session["serving"]["tokens"]) == (3, 12)
    (waited,) = [executor["queue"] for executor in row["executors"] if session in executor["sessions"]]
    assert sum(waited.values()) >= 12
