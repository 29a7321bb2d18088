"""Requests and tokens, counted from submissions."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from configured import configured
from transformers import LlamaConfig, LlamaForCausalLM

from djinn_client.runtime.connecting.servers import read_status
from djinn_core.wire.executor_reports import Sessions
from djinn_core.wire.messages import DeviceInfo, Workload
from djinn_observability.dashboard.metrics import MetricsPage
from djinn_server.events import ServerEvents
from djinn_server.gateway.assignment import LoadMeter
from djinn_server.gateway.context import GatewayContext
from djinn_server.gateway.operations import server_metrics
from djinn_server.request_times import MODELS_LIMIT, OTHER_MODELS, RECENT, ModelNames, RequestTimes
from djinn_server.session_metrics import SessionGauges
from djinn_server.usage_metrics import UsageMetrics

PREFILL, DECODE, PLAIN = Workload("Llama", 8), Workload("Llama", 1), Workload("ResNet")


class RequestFeeder:
    """Feed submissions of one second each to a session's `RequestTimes`."""

    def __init__(self, names=None):
        self.times = RequestTimes(names or ModelNames())
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
    return RequestFeeder()


def test_generation_is_one_request(clock):
    for _ in range(2):
        clock.run(PREFILL)
        for _ in range(3):
            clock.run(DECODE, pause=2.0)
    assert clock.counts == (2, 8)
    seen = clock.times.figures()
    assert (seen.model, seen.first_token.p50, seen.token.p99, seen.answer.p99) == ("Llama", 1.0, 3.0, 0.0)


def test_attention_without_decode_counts_requests(clock):
    for _ in range(3):
        clock.run(PREFILL)
    assert clock.counts == (3, 0)
    assert clock.times.figures().answer.p50 == 1.0


def test_model_without_attention_counts_requests(clock):
    clock.run(PREFILL)
    clock.run(DECODE)
    for _ in range(3):
        clock.run(PLAIN)
    clock.run(None)
    assert clock.counts == (5, 2)
    assert set(clock.times.by_model) == {"Llama", "ResNet"}


def test_tokens_read_together_share_time(clock):
    clock.run(PREFILL)
    for step in range(4):
        clock.run(DECODE, answers=step == 3)
    assert clock.counts == (1, 5)
    assert clock.times.figures().token.p50 == 1.0


def test_chunked_prompt_has_one_first_token(clock):
    clock.run(PREFILL, answers=False)
    clock.run(PREFILL)
    clock.run(None)  # a second answer about the first token
    clock.run(DECODE)
    assert clock.counts == (1, 2)
    assert clock.times.figures().first_token.p50 == 2.0


def test_single_token_prompt_starts_generation(clock):
    for _ in range(4):
        clock.run(DECODE)
    assert clock.counts == (1, 4)


def test_number_of_request_figures_is_bounded(clock):
    for number in range(2 * MODELS_LIMIT):
        clock.run(Workload(f"Model{number}"))
    for _ in range(2 * RECENT):
        clock.run(Workload("ResNet"))
    assert clock.counts == (2 * MODELS_LIMIT + 2 * RECENT, 0)
    models = clock.times.by_model
    assert len(models) == MODELS_LIMIT + 1
    assert models[OTHER_MODELS].requests == MODELS_LIMIT + 2 * RECENT
    assert len(models[OTHER_MODELS].answers.recent) == RECENT


class FakeSession:
    """A fake session that ran these models."""

    def __init__(self, usage, models):
        clock = RequestFeeder(usage.model_names)
        for model in models:
            clock.run(Workload(model))
        self.request_times = lambda: clock.times.by_model
        self.counters = dict
        self.holdings = lambda: (0, {})
        self.gauges = SessionGauges


def test_first_model_names_are_kept():
    usage = UsageMetrics()
    sessions = [FakeSession(usage, [f"Model{n}" for n in range(first, first + 24)]) for first in (0, 24, 0)]
    expected = {f"Model{n}": 2 if n < 24 else 1 for n in range(MODELS_LIMIT)} | {OTHER_MODELS: 48 - MODELS_LIMIT}
    for session in sessions:
        usage.enter(session)
    for session in (None, *sessions):  # the order in which sessions end changes nothing
        if session is not None:
            usage.leave(session)
        assert {name: times.requests for name, times in usage.models().items()} == expected


def test_metrics_keep_the_first_model_names_of_a_tenant_over_restarts():
    """Restarted executors report new names. `/metrics` keeps the first names, and sums up the rest."""
    restarted, tenants = [UsageMetrics() for _ in range(3)], ("alice", "bob")
    for life, usage in enumerate(restarted):
        usage.enter(FakeSession(usage, ["Always", *[f"Model{life}_{n}" for n in range(24)]]))
    executor = SimpleNamespace(device_id="cpu:0", restarts=0, meter=LoadMeter())
    pools = [(tenant, SimpleNamespace(executors=[executor])) for tenant in tenants]
    authentication = SimpleNamespace(tenants=tenants)
    context = GatewayContext(authentication, SimpleNamespace(pools=lambda: pools, ready=True), ServerEvents())
    export = MetricsPage(partial(server_metrics, context)).export

    def scrape(usage):
        """Return the number of requests by model, of each tenant."""
        metered = usage.report(usage.holdings())
        executor.report = lambda: Sessions(1, DeviceInfo("cpu:0", "cpu"), (), metered)
        text = export("")[0].decode()
        name = r'djinn_executor_request_duration_seconds_count\{.*model="(\w+)",tenant="%s"\} (\S+)'
        return [{model: float(count) for model, count in re.findall(name % tenant, text)} for tenant in tenants]

    expected = [
        {"Always": 1, **{f"Model0_{n}": 1 for n in range(24)}},
        {"Always": 1, **{f"Model1_{n}": 1 for n in range(7)}, OTHER_MODELS: 17},
        {"Always": 1, OTHER_MODELS: 24},
        {"Always": 1, **{f"Model0_{n}": 1 for n in range(24)}},
    ]
    for usage, models in zip((*restarted, restarted[0]), expected, strict=True):
        assert scrape(usage) == [models, models]


def test_server_counts_generated_tokens(own_server, monkeypatch):
    server = own_server("--threads", "1")
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local",)):
        sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval().to("remote_accelerator:0")
        for length in (4, 5):
            prompt = torch.ones(1, length, dtype=torch.int64, device="remote_accelerator:0")
            model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0).cpu()
        plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to("remote_accelerator:0")
        plain(torch.ones(1, 4, device="remote_accelerator:0")).sum().item()
        monkeypatch.setenv("DJINN_TOKEN", server.token)
        (row,) = read_status([server.url("tcp")])
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
