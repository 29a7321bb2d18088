"""Hot templates: what is compiled, when it is used, and that nothing changes by it. A real client, an executor inline."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

import djinn
from djinn.hooks import Compiler, hookimpl, pack, unpack
from djinn_server import inline
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.run_strategies import begin_strategies
from djinn_server.running import arbiter
from djinn_server.running.arbiter import TrialLimits
from djinn_server.shared_device import SharedDevice
from djinn_strategies import compiled
from djinn_strategies.compiling import hot_template
from djinn_strategies.compiling.hot_template import (
    AdoptedPhase,
    CheckingPhase,
    CompilingPhase,
    NotCompiledPhase,
    Thresholds,
)

DEVICE = "remote_accelerator:0"
QUICK = Thresholds(runs=2, seconds=0.0, observed=3, checks=2, misses=4, tries=2)
ANY_TIME = TrialLimits(max_timed=2, max_ratio=float("inf"))
RUNS = 16  # from cold to adopted, with some to spare


class CountingCompiler(Compiler):
    """A fake compiler that counts runs of the unchanged graph on this thread.

    `spoil` changes each result.
    """

    name = "counting"

    def __init__(self, spoil=None, error=None):
        self.spoil, self.error = spoil, error
        self.contexts, self.runs, self.prepared = [], 0, 0

    def prepare(self):
        self.prepared += 1
        if self.error is not None:
            raise self.error

    def compile(self, context):
        self.contexts.append(context)
        if self.error is not None:
            raise self.error

        def replay(inputs):
            self.runs += 1
            results = [result.clone() for result in context.graph_module(*inputs)]
            return [self.spoil(result) for result in results] if self.spoil else results

        return replay


class Plugin:
    name = "counting"
    djinn_api_version = "2.0"

    def __init__(self, compiler):
        self.compiler = compiler

    @hookimpl
    def djinn_register_compilers(self):
        return [self.compiler]


@pytest.fixture
def use_compiler(monkeypatch):
    """Return a function that lets `remote_accelerator` compile hot templates with a compiler."""

    def begin(compiler, limits=ANY_TIME):
        monkeypatch.setattr(compiled, "Thresholds", lambda: QUICK)
        monkeypatch.setattr(arbiter, "TrialLimits", lambda: limits)
        djinn.shut_down()
        _contexts.clear()

        def record_context(context, *others):
            _contexts.append(context)
            begin_strategies(context, *others)

        monkeypatch.setattr(inline, "begin_strategies", record_context)
        djinn.configure(executor="inline", plugins=["compiled", Plugin(compiler)], compilers=["counting"], threads=1)
        return compiler

    yield begin
    djinn.shut_down()
    djinn.configure()


_contexts = []  # of the present executor


def phases():
    """Return the phase of each template of the executor. Wait until no compilation is pending."""
    found = {}
    for strategy in [one for context in _contexts for one in context.device.arbiter.strategies]:
        for hot in strategy.templates:
            while type(hot.phase) is CompilingPhase:
                time.sleep(0.001)
            found[hot.template.source] = hot.phase
    return list(found.values())


def repeat(function, *inputs, times=RUNS):
    """Call `function` several times and fetch the results each time. Return the last results."""
    for _ in range(times):
        result = function(*inputs)
        fetched = [tensor.cpu() for tensor in (result if isinstance(result, tuple) else (result,))]
        phases()
    return fetched


def gated_block(x, w):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = (y @ w) * torch.sigmoid(x)
    return y + x.tanh()


@pytest.fixture
def operands():
    torch.manual_seed(0)
    return torch.randn(8, 16), torch.randn(16, 16)


def test_hot_template_is_compiled_and_equals_eager(use_compiler, operands):
    compiler = use_compiler(CountingCompiler())
    remote = [tensor.to(DEVICE) for tensor in operands]
    (found,) = repeat(gated_block, *remote)
    torch.testing.assert_close(found, gated_block(*operands))
    assert any(isinstance(phase, AdoptedPhase) for phase in phases())
    before = compiler.runs
    torch.testing.assert_close(repeat(gated_block, *remote, times=3)[0], gated_block(*operands))
    assert compiler.runs == before + 3
    assert compiler.prepared == 2
    (context,) = compiler.contexts
    assert not context.writes
    assert not context.grows
    assert [tuple(meta.shape) for meta in context.metas] in ([(8, 16), (16, 16)], [(16, 16), (8, 16)])


def test_compiler_is_prepared_before_first_program():
    class Waiting(CountingCompiler):
        def prepare(self):
            called.set()

    called = threading.Event()
    context = SimpleNamespace(device=SharedDevice(CpuRuntime()))
    begin_strategies(context, [compiled.CompiledTemplates()], (Waiting(),))
    assert called.wait(30)


@pytest.mark.parametrize("change", ["shape", "dtype", "stride", "number"])
def test_call_with_other_metadata_runs_uncompiled(use_compiler, operands, change):
    compiler = use_compiler(CountingCompiler())
    x, w = (tensor.to(DEVICE) for tensor in operands)

    def scaled(x, w, by=2.0):
        return gated_block(x, w) * by

    repeat(scaled, x, w)
    runs = compiler.runs
    others = {
        "shape": (operands[0][:4], operands[1]),
        "dtype": (operands[0].double(), operands[1].double()),
        "stride": (operands[0], operands[1].t()),
        "number": (*operands, 3.0),
    }[change]
    remote = [other.to(DEVICE) if isinstance(other, torch.Tensor) else other for other in others]
    (found,) = repeat(scaled, *remote, times=1)
    torch.testing.assert_close(found, scaled(*others))
    assert compiler.runs == runs


def test_growing_caches_are_compiled_once(use_compiler):
    compiler = use_compiler(CountingCompiler())
    torch.manual_seed(0)
    rows = torch.randn(40, 8)
    remote, cache = rows.to(DEVICE), rows[:2].to(DEVICE)
    for step in range(2, 40):
        cache = torch.cat([cache, remote[step : step + 1] * 2.0])
        scores = (cache.tanh() * 3.0 + cache.sigmoid()).sum(0, keepdim=True)
        torch.testing.assert_close(scores.cpu(), _scores(torch.cat([rows[:2], rows[2 : step + 1] * 2.0])))
        phases()
    assert [phase for phase in phases() if isinstance(phase, AdoptedPhase)]
    assert any(context.grows for context in compiler.contexts)
    assert len(compiler.contexts) <= 3
    assert compiler.runs > 10


def _scores(cache):
    return (cache.tanh() * 3.0 + cache.sigmoid()).sum(0, keepdim=True)


def test_irregular_slots_exclude_only_their_ops(use_compiler, operands):
    compiler = use_compiler(CountingCompiler())
    rows = torch.randn(7, 8, 16)
    remote, w = rows.to(DEVICE), operands[1].to(DEVICE)
    for step in range(2 * RUNS):
        at = step * step % 7
        torch.testing.assert_close(gated_block(remote[at], w).cpu(), gated_block(rows[at], operands[1]))
        phases()
    (context,) = compiler.contexts
    assert compiler.runs > RUNS
    assert "aten.select.int" not in [str(node.target) for node in context.graph_module.graph.nodes]


def test_slots_outside_compiled_region_may_vary(use_compiler, operands):
    compiler = use_compiler(CountingCompiler())
    x, w = (tensor.to(DEVICE) for tensor in operands)

    def step(chance):
        torch.manual_seed(3)
        kept = torch.nn.functional.dropout(x, chance)
        return gated_block(kept, w)

    repeat(lambda: step(0.5))
    for number in range(RUNS):
        repeat(step, 0.1 + number / 32, times=1)
    assert any(isinstance(phase, AdoptedPhase) for phase in phases())
    assert compiler.runs > RUNS


def test_initially_empty_cache_has_uncompiled_layout(use_compiler):
    compiler = use_compiler(CountingCompiler())
    rows, nothing = torch.randn(1, 4, 3, 8).transpose(1, 2), torch.empty(0)
    remote, empty = rows.to(DEVICE), nothing.to(DEVICE)
    found = repeat(lambda x, start: torch.cat([start, (x * 2 + 1).abs().neg()], 2), remote, empty)
    assert torch.equal(found[0], torch.cat([nothing, (rows * 2 + 1).abs().neg()], 2))
    assert any(isinstance(phase, AdoptedPhase) for phase in phases())
    (context,) = compiler.contexts
    unpack(pack(context))
    assert "aten.cat.default" not in [str(node.target) for node in context.graph_module.graph.nodes]


def test_compiled_result_need_not_allocate_excess_memory(use_compiler, operands):
    def loss(x, w):
        return torch.nn.functional.mse_loss(gated_block(x, w), x)

    assert loss(*operands).untyped_storage().nbytes() > 4, "else this tests nothing"
    compiler = use_compiler(CountingCompiler())
    (found,) = repeat(loss, *[tensor.to(DEVICE) for tensor in operands])
    torch.testing.assert_close(found, loss(*operands))
    assert any(isinstance(phase, AdoptedPhase) for phase in phases())
    assert compiler.runs > 2


def test_compiled_writes_and_views_equal_eager(use_compiler, operands):
    compiler = use_compiler(CountingCompiler())

    def step(total, x):
        fresh = x * 2.0 + 1.0
        total.add_(fresh.sum(0))
        top = fresh[1:3]
        seen = total.view(4, 4)
        return fresh, top, seen

    total, x = torch.zeros(16), operands[0]
    remote_total, remote_x = total.to(DEVICE), x.to(DEVICE)
    for _ in range(RUNS):
        expected, found = step(total, x), step(remote_total, remote_x)
        for here, there in zip(expected, found, strict=True):
            torch.testing.assert_close(there.cpu(), here)
        found[1].zero_()
        found[2].mul_(0.5)
        total.mul_(0.5)
        assert not found[0][1:3].cpu().any(), "a view shares the memory of what it looks into"
        torch.testing.assert_close(remote_total.cpu(), total)
        phases()
    assert any(context.writes for context in compiler.contexts)
    assert compiler.runs > 2


def test_aliased_written_inputs_run_uncompiled(use_compiler, operands):
    compiler = use_compiler(CountingCompiler())

    def step(target, source):
        target.add_(source * 2.0 + 1.0).mul_(0.5)
        return source.tanh() + 1.0

    apart = [torch.ones(16), torch.ones(16)]
    remote = [tensor.to(DEVICE) for tensor in apart]
    repeat(step, *remote)
    runs = compiler.runs
    both, there = torch.ones(16), torch.ones(16).to(DEVICE)
    (found,) = repeat(step, there, there.view(16), times=1)
    torch.testing.assert_close(found, step(both, both.view(16)))
    assert compiler.runs == runs


def test_views_of_written_values_are_compiled(use_compiler):
    compiler = use_compiler(CountingCompiler())

    def step(weight, turned):
        before = (turned * 2.0 + 1.0).tanh()
        weight.mul_(0.9).add_(0.1)
        return before + turned

    weight = torch.rand(3, 4)
    remote = weight.to(DEVICE)
    turned, there = weight.t(), remote.t()
    for _ in range(RUNS):
        torch.testing.assert_close(step(remote, there).cpu(), step(weight, turned))
        phases()
    (context,) = compiler.contexts
    unpack(pack(context))
    assert compiler.runs > 2
    runs = compiler.runs
    (found,) = repeat(step, remote, remote.clone().t(), times=1)  # a view of something else
    torch.testing.assert_close(found, step(weight, weight.clone().t()))
    assert compiler.runs == runs


def test_compiler_with_wrong_results_is_not_used(use_compiler, operands):
    compiler = use_compiler(CountingCompiler(spoil=lambda result: result + 1e-4))
    remote = [tensor.to(DEVICE) for tensor in operands]
    for _ in range(RUNS):
        torch.testing.assert_close(repeat(gated_block, *remote, times=1)[0], gated_block(*operands))
    assert not any(isinstance(phase, AdoptedPhase) for phase in phases())
    assert compiler.runs == 1


@pytest.mark.parametrize(("factor", "adopted"), [(1 + 1e-5, True), (1 + 1e-2, False)])
def test_sum_tolerance_follows_rounding_of_its_terms(use_compiler, factor, adopted):
    def total(x):
        return (x.tanh() * 3 - x.sin() + 0.02).sum()

    use_compiler(CountingCompiler(spoil=lambda result: result * factor))
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    terms = x.tanh() * 3 - x.sin() + 0.02
    assert terms.abs().sum() > 10 * terms.sum().abs()  # they cancel out
    repeat(total, x.to(DEVICE))
    assert [isinstance(phase, AdoptedPhase) for phase in phases()].count(True) == adopted


@pytest.mark.parametrize("spoil", [lambda result: result.t().contiguous().t(), lambda result: result[None][0:1][0]])
def test_compiled_result_with_other_layout_is_not_used(use_compiler, operands, spoil):
    use_compiler(CountingCompiler(spoil=spoil))
    remote = [tensor.to(DEVICE) for tensor in operands]
    (found,) = repeat(gated_block, *remote)
    torch.testing.assert_close(found, gated_block(*operands))
    adopted = any(isinstance(phase, AdoptedPhase) for phase in phases())
    assert adopted == (spoil(operands[0]).stride() == operands[0].stride())


def test_raising_compiler_is_called_once(use_compiler, operands):
    compiler = use_compiler(CountingCompiler(error=RuntimeError("no")))
    remote = [tensor.to(DEVICE) for tensor in operands]
    (found,) = repeat(gated_block, *remote)
    torch.testing.assert_close(found, gated_block(*operands))
    assert len(compiler.contexts) == 1
    assert any(type(phase) is NotCompiledPhase for phase in phases())


def test_slower_compiled_code_is_not_used(use_compiler, operands):
    compiler = use_compiler(CountingCompiler(), limits=TrialLimits(max_timed=2, max_ratio=0.0))
    remote = [tensor.to(DEVICE) for tensor in operands]
    repeat(gated_block, *remote)
    runs = compiler.runs
    repeat(gated_block, *remote, times=3)
    assert compiler.runs == runs
    assert not any(isinstance(phase, AdoptedPhase) for phase in phases())


def test_compilation_stops_after_several_shape_changes(use_compiler, operands):
    compiler = use_compiler(CountingCompiler())
    w = operands[1].to(DEVICE)
    for size in (8, 3, 5):
        x = torch.randn(size, 16)
        (found,) = repeat(gated_block, x.to(DEVICE), w, times=2 * RUNS)
        torch.testing.assert_close(found, gated_block(x, operands[1]))
    assert 1 <= len(compiler.contexts) <= QUICK.tries


def test_failing_op_in_compiled_template_raises_same_error(use_compiler):
    compiler = use_compiler(CountingCompiler())

    def look_up(table, index):
        return (table * 2.0 + 1.0).index_select(0, index).tanh().mul(3.0)

    table, good = torch.rand(4, 4), torch.tensor([1, 2])
    remote, right, wrong = table.to(DEVICE), good.to(DEVICE), torch.tensor([1, 9]).to(DEVICE)
    repeat(look_up, remote, right)
    runs = compiler.runs
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        look_up(remote, wrong).cpu()
    assert compiler.runs == runs + 1
    torch.testing.assert_close(look_up(remote, right).cpu(), look_up(table, good))
    assert any(type(phase) is NotCompiledPhase for phase in phases())


def test_random_ops_are_not_compiled(use_compiler, operands):
    compiler = use_compiler(CountingCompiler())
    x = operands[0].to(DEVICE)
    for _ in range(RUNS):
        torch.manual_seed(3)
        noise = torch.nn.functional.dropout(x * 2.0 + 1.0, 0.5).tanh().sigmoid() * 2.0
        phases()
        last = noise.cpu()
    torch.manual_seed(3)
    again = torch.nn.functional.dropout(x * 2.0 + 1.0, 0.5).tanh().sigmoid() * 2.0
    assert torch.equal(last, again.cpu())
    targets = [str(n.target) for c in compiler.contexts for n in c.graph_module.graph.nodes if n.op == "call_function"]
    assert not any("bernoulli" in target or "dropout" in target for target in targets)


def test_unknown_compiler_error_names_it():
    djinn.shut_down()
    djinn.configure(executor="inline", plugins=[], compilers=["nothing"])
    try:
        with pytest.raises(
            djinn.errors.StartupError, match=r"no installed plugin has the compiler 'nothing' .*djinn plugins"
        ):
            djinn.init()
    finally:
        djinn.shut_down()
        djinn.configure()


def test_op_failure_during_comparison_does_not_end_session(use_compiler):
    use_compiler(CountingCompiler())

    def look_up(table, index):
        return (table * 2.0 + 1.0).index_select(0, index).tanh().mul(3.0)

    table = torch.rand(4, 4)
    remote, right, wrong = table.to(DEVICE), torch.tensor([1, 2]).to(DEVICE), torch.tensor([1, 9]).to(DEVICE)
    repeat(look_up, remote, right, times=QUICK.runs + QUICK.observed)
    assert any(isinstance(phase, CheckingPhase) for phase in phases())
    for _ in range(3):
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            look_up(remote, wrong).cpu()
    (found,) = repeat(look_up, remote, right)
    torch.testing.assert_close(found, look_up(table, right.cpu()))
    assert any(isinstance(phase, AdoptedPhase) for phase in phases())


@pytest.mark.parametrize("adopted", [False, True])
def test_template_runs_uncompiled_after_failed_comparisons(use_compiler, operands, monkeypatch, adopted):
    use_compiler(CountingCompiler())
    remote = [tensor.to(DEVICE) for tensor in operands]
    raised = 0
    compare = hot_template.difference

    def difference(compiled, env):
        nonlocal raised
        if adopted and not any(isinstance(phase, AdoptedPhase) for phase in phases()):
            return compare(compiled, env)
        raised += 1
        raise torch.OutOfMemoryError("no memory for copies")

    monkeypatch.setattr(hot_template, "difference", difference)
    (found,) = repeat(gated_block, *remote, times=3 * RUNS)
    torch.testing.assert_close(found, gated_block(*operands))
    assert raised == QUICK.misses
    assert any(type(phase) is NotCompiledPhase for phase in phases())


@pytest.mark.parametrize("foreach", [False, True])
def test_training_step_is_compiled_as_one_graph(use_compiler, foreach):
    compiler = use_compiler(CountingCompiler())

    def losses(device, steps=2 * RUNS):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        x, y = torch.randn(32, 8).to(device), torch.randint(0, 4, (32,)).to(device)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            yield loss.item()
            phases()

    torch.testing.assert_close(list(losses(DEVICE)), list(losses("cpu")), rtol=1e-5, atol=1e-6)
    context = max(compiler.contexts, key=lambda context: len(context.graph_module.graph.nodes))
    targets = [str(node.target) for node in context.graph_module.graph.nodes if node.op == "call_function"]
    assert {"aten.addmm.default", "aten.native_layer_norm_backward.default"} <= {*targets}, "forward and backward"
    assert context.metas[-1].dtype is torch.float64, "bias corrections and learning rates"
    assert any(isinstance(phase, AdoptedPhase) and phase.job.relation.float_slots for phase in phases())
