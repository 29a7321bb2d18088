"""The arbiter of run strategies: what it uses, what it refuses, and that results are those of the ops in any case."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import djinn
from djinn.hooks import RunOffer, RunStrategy, hookimpl
from djinn_server import run_strategies
from djinn_server.hookspecs.run_strategies import TemplateFacts
from djinn_server.running import arbiter
from djinn_server.running.arbiter import Candidate, TemplateChoice, TrialLimits
from djinn_server.running.run_request import CANCEL

DEVICE = "remote_accelerator:0"
RUNS = 12


class ReplaceRelus(RunOffer):
    """A run offer that replaces each `relu` by `compute` of its operand."""

    def __init__(self, strategy, places):
        self.strategy, self.places = strategy, places

    def run(self, run):
        for at in self.places:
            yield from run.advance(at)
            (x,), _ = run.arguments(at)
            place = (*run.facts.ops[at].makes, -1)[0]  # an op in place makes nothing
            made = self.strategy.compute(x)
            self.strategy.runs += 1
            yield from run.replace(at + 1, {} if self.strategy.forgets else {place: made})


class ReluStrategy(RunStrategy):
    djinn_api_version = "2.0"
    name = "relu"

    def __init__(self, compute=torch.relu, exact=True, op="aten::relu", forgets=False):
        self.compute, self.exact, self.op, self.forgets = compute, exact, op, forgets
        self.runs, self.decisions = 0, []

    def acts_on(self, template):
        places = [at for at, op in enumerate(template.ops) if op.name == self.op]
        return ReplaceRelus(self, places) if places else None

    @hookimpl
    def djinn_register_run_strategies(self):
        return [self]


@pytest.fixture
def use_strategy(monkeypatch):
    """Yield a function that lets `remote_accelerator` use a strategy at any speed, and the logged events."""
    logged = []
    monkeypatch.setattr(arbiter, "TrialLimits", lambda: TrialLimits(max_timed=1, min_timed=1, max_ratio=float("inf")))
    note = lambda event, **fields: logged.append((event, fields.get("reason", "")))
    monkeypatch.setattr(arbiter, "_log", SimpleNamespace(info=note, warning=note))

    def begin(strategy, **settings):
        djinn.shut_down()
        djinn.configure(executor="inline", plugins=[strategy], threads=1, **settings)
        return strategy

    yield begin, logged
    djinn.shut_down()
    djinn.configure()


def repeat(program, *inputs, times=RUNS):
    """Compare several runs with the local result, bitwise."""
    remote = [tensor.to(DEVICE) for tensor in inputs]
    for _ in range(times):
        assert torch.equal(program(*remote).cpu(), program(*inputs))


def two_relus(x):
    return torch.relu(torch.relu(x - 1.0) * 2.0 - 3.0).sum(0)


@pytest.fixture
def x():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) * 4


def test_equal_strategy_is_used(use_strategy, x):
    begin, logged = use_strategy
    strategy = begin(ReluStrategy())
    repeat(two_relus, x)
    assert strategy.runs > RUNS
    assert [event for event, _ in logged].count("a template runs by another strategy") == 1


def test_different_strategy_is_rejected_once(use_strategy, x):
    begin, logged = use_strategy
    strategy = begin(ReluStrategy(lambda x: torch.relu(x) + 1e-6))
    repeat(two_relus, x)
    assert strategy.runs == 2
    assert [event for event, _ in logged].count("a run strategy is not used") == 1


def test_result_in_memory_of_an_operand_is_not_used(use_strategy, x):
    begin, logged = use_strategy
    begin(ReluStrategy(lambda x: x.relu_()))
    remote, local = (x - 50.0).abs().to(DEVICE), (x - 50.0).abs()
    for _ in range(4):
        assert torch.equal(torch.relu(remote).cpu(), local)
    assert any("shares memory" in reason for _, reason in logged)


def test_failing_strategy_is_not_used(use_strategy, x):
    begin, logged = use_strategy

    def fail_later(x):
        if strategy.runs >= 7:  # in the middle of a run
            raise KeyError("broken")
        return torch.relu(x)

    strategy = begin(ReluStrategy(fail_later))
    repeat(two_relus, x)
    assert strategy.runs == 7
    assert [reason for event, reason in logged if event == "a run strategy is not used"] == [
        "the strategy raised KeyError: 'broken'"
    ]


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [(ReluStrategy(forgets=True), "lacks values"), (ReluStrategy(op="aten::relu_"), "writes into an operand")],
)
def test_unreplaceable_steps_are_refused(use_strategy, x, strategy, reason):
    begin, logged = use_strategy
    begin(strategy)
    repeat(lambda x: torch.relu_(torch.relu(x * 2.0) - 1.0), x, times=4)
    assert [reason in found for event, found in logged if event == "a run strategy is not used"] == [True]


@pytest.mark.parametrize("exact", [True, False])
def test_inexact_strategy_runs_only_for_inexact_sessions(use_strategy, x, exact):
    begin, _ = use_strategy
    strategy = begin(ReluStrategy(exact=False), exact=exact)
    repeat(two_relus, x)
    assert bool(strategy.runs) is not exact


def test_failed_op_poisons_same_values_as_without_strategy(use_strategy, x):
    begin, logged = use_strategy
    begin(ReluStrategy())

    def look_up(table, index):
        return torch.relu(table.index_select(0, index))

    table, right, wrong = x.to(DEVICE), torch.tensor([1, 2]).to(DEVICE), torch.tensor([1, 9]).to(DEVICE)
    for _ in range(RUNS):
        assert torch.equal(look_up(table, right).cpu(), look_up(x, torch.tensor([1, 2])))
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        look_up(table, wrong).cpu()
    assert torch.equal(look_up(table, right).cpu(), look_up(x, torch.tensor([1, 2])))
    assert not [event for event, _ in logged if event == "a run strategy is not used"]


class ReplaceAll(ReplaceRelus):
    """A run offer that replaces all ops from first to last by `compute` of the first operand."""

    def run(self, run):
        strategy, first = self.strategy, self.places[0]
        yield from run.advance(first)
        (x, *_), _ = run.arguments(first)
        places = [place for op in run.facts.ops[first:] for place in op.makes]
        released = {place for op in run.facts.ops[first:] for place in op.releases}
        needed = [place for place in places if place not in released]
        strategy.runs += 1
        yield from run.replace(len(run.facts.ops), dict(zip(needed, strategy.compute(x), strict=True)))


class ReplaceAllStrategy(ReluStrategy):
    def acts_on(self, template):
        offer = super().acts_on(template)
        return ReplaceAll(self, offer.places) if offer is not None else None


def reasons(logged):
    return [reason for event, reason in logged if event == "a run strategy is not used"]


def test_reused_result_memory_is_rejected(use_strategy, x):
    begin, logged = use_strategy
    buffer = torch.empty(8, 8)
    strategy = begin(ReluStrategy(lambda x: buffer.copy_(torch.relu(x))))
    remote = [(x + n).to(DEVICE) for n in range(6)]
    results = [torch.relu(one) for one in remote]
    assert all(torch.equal(found.cpu(), torch.relu(x + n)) for n, found in enumerate(results))
    results = []
    for one in remote:
        results.append(torch.relu(one))
        results[-1].sum().cpu()  # a submission of its own
    assert all(torch.equal(found.cpu(), torch.relu(x + n)) for n, found in enumerate(results))
    assert len(reasons(logged)) == 1
    assert "shares memory" in reasons(logged)[0]
    assert strategy.runs


@pytest.mark.parametrize("alike", [True, False])
def test_results_alias_as_op_results_do(use_strategy, x, alike):
    """`alike`: the ops return a view and its base but the strategy does not, or the reverse."""
    begin, logged = use_strategy
    begin(ReplaceAllStrategy((lambda x: [x.relu(), x.relu().view(64)]) if alike else (lambda x: [x.relu()] * 2)))

    def program(x):
        first = torch.relu(x)
        return first, (first.view(64) if alike else torch.relu(x))

    for _ in range(RUNS):
        first, second = program(x.to(DEVICE))
        second.cpu()
        first.add_(1.0)
        expected = program(x)
        expected[0].add_(1.0)
        assert torch.equal(second.cpu(), expected[1])
    assert any("view" in reason or "shares memory" in reason for reason in reasons(logged)), logged


def test_strategy_keeps_random_numbers_of_ops(use_strategy, x):
    begin, logged = use_strategy

    def draw(x):
        torch.rand(3)
        return torch.relu(x)

    begin(ReluStrategy(draw))
    torch.manual_seed(3)
    expected = torch.rand(5, device=DEVICE).cpu()
    torch.manual_seed(3)
    repeat(torch.relu, x)
    assert torch.equal(torch.rand(5, device=DEVICE).cpu(), expected)
    assert set(reasons(logged)) == {"the strategy draws random numbers"}


def test_random_op_cannot_be_replaced(use_strategy, x):
    begin, logged = use_strategy
    begin(ReluStrategy(lambda x: x.clone(), op="aten::bernoulli"))
    probability = x.sigmoid().to(DEVICE)
    for _ in range(3):
        (torch.bernoulli(probability) + 1.0).cpu()
    assert ["draws random numbers" in reason for reason in reasons(logged)] == [True]


@pytest.mark.parametrize("method", ["stage", "ran", "decided"])
def test_offer_that_raises_outside_run_is_not_used(use_strategy, x, monkeypatch, method):
    begin, logged = use_strategy

    def fail(self, *args, **kwargs):
        raise KeyError("broken")

    monkeypatch.setattr(ReplaceRelus, method, fail)
    begin(ReluStrategy())
    repeat(two_relus, x)
    assert reasons(logged) == ["the strategy raised KeyError: 'broken'"]


@pytest.mark.parametrize("method", ["begin", "free", "figures"])
def test_strategy_that_raises_outside_run_is_disabled(use_strategy, x, monkeypatch, method):
    begin, _ = use_strategy
    events = []
    note = lambda event, **fields: events.append((event, fields["error"]))
    monkeypatch.setattr(run_strategies, "_log", SimpleNamespace(warning=note))
    monkeypatch.setattr(arbiter._log, "warning", note)

    def fail(self, *args, **kwargs):
        raise KeyError("broken")

    monkeypatch.setattr(ReluStrategy, method, fail)
    strategy = begin(ReluStrategy())
    remote, local = x.to(DEVICE), x.clone()
    for _ in range(3):
        remote, local = two_relus(remote.mul_(1.5)), two_relus(local.mul_(1.5))
        torch.remote_accelerator.memory_stats()
        assert torch.equal(remote.cpu(), local)
        remote, local = x.to(DEVICE), x.clone()
    runs = strategy.runs
    djinn.shut_down()
    off = "a run strategy is not used: it failed to begin" if method == "begin" else "a run strategy is switched off"
    assert events == [(off, "KeyError('broken')")]
    assert not runs or method == "free", "free is called at the end"


@pytest.mark.parametrize("figures", [{"relu": float("nan")}, {"relu": "many"}])
def test_strategy_with_invalid_metrics_is_disabled(use_strategy, x, monkeypatch, figures):
    begin, logged = use_strategy
    monkeypatch.setattr(ReluStrategy, "figures", lambda self: figures)
    begin(ReluStrategy())
    repeat(two_relus, x, times=1)
    assert torch.remote_accelerator.memory_stats()
    repeat(two_relus, x)
    assert [event for event, _ in logged] == ["a run strategy is switched off"]


def test_offer_of_another_class_is_not_used(use_strategy, x, monkeypatch):
    begin, logged = use_strategy
    monkeypatch.setattr(ReluStrategy, "acts_on", lambda self, template: template)
    begin(ReluStrategy())
    repeat(two_relus, x, times=3)
    assert {event for event, _ in logged} == {"a run strategy failed to make an offer for a template"}


def test_empty_offer_is_abandoned(use_strategy, x, monkeypatch):
    begin, logged = use_strategy
    calls = []
    monkeypatch.setattr(ReplaceRelus, "run", lambda self, run: (calls.append(1), (yield from run.advance())))
    begin(ReluStrategy())
    repeat(two_relus, x, times=24)
    assert len(calls) == 16
    assert reasons(logged) == ["the strategy replaced nothing in 16 runs"]


def test_backward_offer_is_refused(use_strategy, x, monkeypatch):
    begin, logged = use_strategy

    def replace_backward(self, run):
        yield from run.advance(len(run.facts.ops))
        yield from run.replace(0, {})

    monkeypatch.setattr(ReplaceRelus, "run", replace_backward)
    begin(ReluStrategy())
    repeat(two_relus, x, times=4)
    assert ["cannot replace ops up to" in reason for reason in reasons(logged)] == [True]


def test_out_of_memory_skips_one_run(use_strategy, x):
    begin, logged = use_strategy

    def compute(x):
        if strategy.runs == 5:
            strategy.runs += 1
            raise torch.OutOfMemoryError("others have it")
        return torch.relu(x)

    strategy = begin(ReluStrategy(compute))
    repeat(two_relus, x)
    assert strategy.runs > RUNS
    assert not reasons(logged)


def test_cancellation_does_not_reject_offer(use_strategy, x, monkeypatch):
    begin, logged = use_strategy
    original, cancelled = ReplaceRelus.run, []

    def run(self, run):
        if len(cancelled) < 1:
            cancelled.append(run)
            run.run.work.halt.value |= CANCEL  # as another thread would, while ops run
        return original(self, run)

    monkeypatch.setattr(ReplaceRelus, "run", run)
    strategy = begin(ReluStrategy())
    with pytest.raises(djinn.errors.ProgramStopped):
        repeat(two_relus, x)
    repeat(two_relus, x)
    assert not reasons(logged)
    assert strategy.runs > RUNS


def test_fastest_offer_is_used():
    facts = TemplateFacts((), torch.device("cpu"))
    candidates = [Candidate(ReluStrategy(), ReplaceRelus(None, ())) for _ in range(3)]
    for candidate, ratio, used in zip(candidates, (0.8, 0.5, 0.2), (True, True, False), strict=True):
        candidate.ratio, candidate.used = ratio, used
    choice = TemplateChoice.__new__(TemplateChoice)
    choice.facts, choice.candidates = facts, candidates
    assert choice.next(exact=True) is candidates[1]
    candidates[1].failed = True
    assert choice.next(exact=True) is candidates[0]
    candidates[2].reset()
    assert choice.next(exact=True) is candidates[2], "one that is to be tried goes first"


def test_arbiter_compares_fastest_runs():
    limits = TrialLimits()
    assert limits.ratio([1.0] * 3, [0.5, 0.6, 0.7]) == 0.5
    assert limits.ratio([1.0] * 3, [2.0] * 3) is None, "three slow ones may have lost the processor"
    assert limits.ratio([1.0] * 8, [2.0] * 7 + [0.8]) == 0.8
