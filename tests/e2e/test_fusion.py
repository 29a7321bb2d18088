"""Fewer ops, the same results within rounding; weights are put together once, and again when they change."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import djinn
from djinn.testing import executor_figures
from djinn_client.runtime import client
from tests.shared.executors import only_executor
from tests.shared.servers import DEVICE

REMOTE = "remote_accelerator:0"
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="products are fused on CPUs only")


@pytest.fixture(scope="module", autouse=True)
def inexact_session(connect, url_of):
    """Connect to a server with `exact=False`, so that results may be rounded differently."""
    with connect(url_of("tcp"), exact=False, disable=("adaptive",)):  # which leaves out what does not pay for so little
        yield


class GatedMlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.other = (torch.nn.Linear(16, n) for n in (24, 24, 8))
        self.down = torch.nn.Linear(24, 16, bias=False)

    def forward(self, rows):
        return self.down(torch.nn.functional.silu(self.gate(rows)) * self.up(rows)), self.other(rows)


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.ConvTranspose2d(8, 4, 2, 2)
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(4)])

    def forward(self, pictures):
        return self.norms[1](self.second(self.norms[0](self.first(pictures)).relu_()))


def run_and_list_optimizations(run):
    """Run a program. Return its result, the applied optimizations, and its plans."""
    with client.record_plans() as plans:
        result = run()
    return result, {r.optimization for plan in plans for r in plan.plan.results if r.applied}, plans


@on_cpu
@torch.no_grad()
def test_fusion_merges_products_of_one_input():
    torch.manual_seed(0)
    theirs = GatedMlp().eval()
    ours = copy.deepcopy(theirs).to(REMOTE)
    rows = torch.randn(1, 1, 16)
    (first, second), names, plans = run_and_list_optimizations(lambda: [t.cpu() for t in ours(rows.to(REMOTE))])
    assert "fuse_projections" in names
    assert any(len(plan.graph.by_op.get("linear", ())) == 2 for plan in plans), "one for three, and `down`"
    for mine, other in zip((first, second), theirs(rows), strict=True):
        torch.testing.assert_close(mine, other)


@on_cpu
@torch.no_grad()
def test_fused_weights_are_cached_until_change():
    theirs = GatedMlp().eval()
    ours = copy.deepcopy(theirs).to(REMOTE)

    def compare():
        rows = torch.randn(1, 16)
        made = ours(rows.to(REMOTE))
        for mine, other in zip(made, theirs(rows), strict=True):
            torch.testing.assert_close(mine.cpu(), other)

    for _ in range(10):  # so few ops on so little are planned when they come for the ninth time
        compare()
    derived = len(only_executor().submissions._derived._cached)
    assert derived
    compare()
    assert len(only_executor().submissions._derived._cached) == derived, "what is put together stays so"
    for model in (ours, theirs):
        model.other.weight.mul_(3)
    for _ in range(3):
        compare()


@torch.no_grad()
def test_fusion_is_not_applied_to_many_rows():
    ours = GatedMlp().eval().to(REMOTE)
    rows = torch.randn(2, 16).to(REMOTE)
    _, names, _ = run_and_list_optimizations(lambda: [made.cpu() for made in ours(rows)])
    assert "fuse_projections" not in names


@torch.no_grad()
def test_batch_norms_are_folded_into_convolutions():
    theirs = Convolutions()
    for _ in range(3):
        theirs(torch.randn(4, 3, 8, 8))  # so that the statistics are some
    theirs.eval()
    ours = copy.deepcopy(theirs).to(REMOTE)
    pictures = torch.randn(2, 3, 8, 8)
    mine, names, plans = run_and_list_optimizations(lambda: ours(pictures.to(REMOTE)).cpu())
    assert "fold_batch_norms" in names
    assert any(not plan.graph.by_op.get("batch_norm") and plan.graph.by_op.get("relu_") for plan in plans)
    torch.testing.assert_close(mine, theirs(pictures))
    for model in (ours, theirs):
        model.norms[0].running_var.mul_(4)
    torch.testing.assert_close(ours(pictures.to(REMOTE)).cpu(), theirs(pictures))


@torch.no_grad()
def test_fused_program_has_separate_plan_for_other_sizes():
    theirs = Convolutions().eval()
    ours = copy.deepcopy(theirs).to(REMOTE)
    for size in (8, 11, 8):
        pictures = torch.randn(1, 3, size, size)
        torch.testing.assert_close(ours(pictures.to(REMOTE)).cpu(), theirs(pictures))


def test_fusion_is_not_applied_to_training():
    ours = Convolutions().to(REMOTE)

    def step():
        ours(torch.randn(2, 3, 8, 8).to(REMOTE)).sum().backward()
        djinn.synchronize()

    _, names, _ = run_and_list_optimizations(step)
    assert names.isdisjoint({"fuse_projections", "fold_batch_norms"})


@torch.no_grad()
def test_fused_weights_are_freed_with_weights():
    gc.collect()
    djinn.synchronize()
    before = executor_figures()["values"]
    ours = GatedMlp().eval().to(REMOTE)
    ours(torch.randn(1, 16).to(REMOTE))[0].cpu()
    del ours
    gc.collect()
    djinn.synchronize()
    djinn.synchronize()
    assert executor_figures()["values"] <= before


@torch.no_grad()
def test_prefix_of_rewritten_program_is_rewritten():
    ours = Convolutions().eval().to(REMOTE)
    pictures = torch.randn(2, 3, 8, 8).to(REMOTE)

    def whole():
        torch.ones(3, device=REMOTE).mul_(2)  # so that what follows is a part of it
        return ours(pictures).cpu()

    expected, names, _ = run_and_list_optimizations(whole)
    assert "fold_batch_norms" in names
    again, names, plans = run_and_list_optimizations(lambda: ours(pictures).cpu())
    assert plans, "it is planned by itself"
    assert "fold_batch_norms" in names
    torch.testing.assert_close(again, expected)


@on_cpu
@torch.no_grad()
def test_fusion_leaves_later_ops_unchanged():
    ours, rows = GatedMlp().eval().to(REMOTE), torch.randn(1, 1, 16).to(REMOTE)
    cache = torch.zeros(1, 30, 8, device=REMOTE)

    def step():
        result, other = ours(rows)
        return (torch.cat([cache, other], 1).sum() + result.sum()).cpu()

    _, names, plans = run_and_list_optimizations(step)
    assert "fuse_projections" in names
    rewritten = next(plan.schedule.rewritten for plan in plans if plan.schedule.rewritten is not None)
    own = {rewritten.origin.calls[rewritten.nodes[i]].signature.form.op for i in rewritten.own}
    assert own == {"aten::linear"}, "a plan that relies on the cache's size holds for one step only"
