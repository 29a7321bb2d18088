"""Other computation in the place of some nodes, where several executors work as one."""

from __future__ import annotations

import copy

import pytest
import torch

from djinn_client.runtime import client
from djinn_core.ir.handles import storage_of

REMOTE = "remote_accelerator:0"


class GatedAndConvolution(torch.nn.Module):
    """Two products of one input, and a convolution with a batch norm."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(16, 24) for _ in range(2))
        self.down = torch.nn.Linear(24, 16, bias=False)
        self.convolution, self.norm = torch.nn.Conv1d(1, 4, 3), torch.nn.BatchNorm1d(4)

    def forward(self, rows):
        made = self.down(torch.nn.functional.silu(self.gate(rows)) * self.up(rows))
        return self.norm(self.convolution(made[:, None])).sum(1)


@pytest.fixture(scope="module")
def inexact_session(make_pool):
    with make_pool("round_robin", exact=False, disable=("adaptive",)) as router:
        yield router


@torch.no_grad()
def test_derived_weights_are_cached_until_change(inexact_session):
    theirs = GatedAndConvolution().eval()
    ours = copy.deepcopy(theirs).to(REMOTE)
    rows = torch.randn(1, 16)
    with client.record_plans() as plans:
        torch.testing.assert_close(ours(rows.to(REMOTE)).cpu(), theirs(rows))
    assert {"fuse_projections", "fold_batch_norms"} <= {
        r.optimization for p in plans for r in p.plan.results if r.applied
    }
    derived = inexact_session._planner.derived.values
    before = len(derived._cached)
    for _ in range(2):
        torch.testing.assert_close(ours(rows.to(REMOTE)).cpu(), theirs(rows))
    assert len(derived._cached) == before
    for model in (ours, theirs):
        model.gate.weight.mul_(2)
    for _ in range(2):
        torch.testing.assert_close(ours(rows.to(REMOTE)).cpu(), theirs(rows))


@torch.no_grad()
def test_derived_values_are_freed_with_weights(inexact_session):
    derived = inexact_session._planner.derived.values
    ours, rows = GatedAndConvolution().eval().to(REMOTE), torch.randn(1, 16).to(REMOTE)
    ours(rows).cpu()
    assert derived
    storages = {storage_of(v) for made in derived._cached.values() for v in made}
    assert storages <= inexact_session._locations.homes.keys()
    del ours
    for _ in range(2):
        (rows + 1).cpu()
    left = {storage_of(v) for made in derived._cached.values() for v in made}
    assert not (storages - left) & inexact_session._locations.homes.keys()
    assert storages - left


@torch.no_grad()
def test_folded_batch_norm_with_split_batch(inexact_session):
    layers = [
        torch.nn.Conv2d(3, 24, 3),
        torch.nn.BatchNorm2d(24),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(24, 24, 3),
    ]
    theirs = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(24, 5)
    ).eval()
    ours = copy.deepcopy(theirs).to(REMOTE)
    with client.record_plans() as plans:
        for _ in range(3):
            batch = torch.randn(16, 3, 96, 96)
            torch.testing.assert_close(ours(batch.to(REMOTE)).cpu(), theirs(batch))
    (last,) = {frozenset(r.optimization for r in p.plan.results if r.applied) for p in plans[-1:]}
    assert {"fold_batch_norms", "split_batches"} <= last
    assert len(plans[-1].placement.devices) == 2
    for net in (ours, theirs):
        net[3].weight.mul_(2)
    torch.testing.assert_close(ours(batch.to(REMOTE)).cpu(), theirs(batch))
