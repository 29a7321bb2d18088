"""Moved poolings: equal results within rounding. The code runs on local tensors."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch

import djinn
from djinn.testing import optimization_context
from djinn_optimizations.pooling import PoolFirst

REMOTE = "remote_accelerator:0"
nn = torch.nn


class PooledTwice(nn.Module):
    """A model in which a second op uses the pooled value."""

    def __init__(self):
        super().__init__()
        self.point, self.pool = nn.Conv2d(4, 6, 1), nn.AvgPool2d(2)

    def forward(self, x):
        made = self.point(x)
        return self.pool(made), made.mean()


def optimize_model(model):
    """Return the optimization's result for a model, its local parameters and input by value id, and the input."""
    ours, data = copy.deepcopy(model).eval(), torch.randn(2, 4, 13, 13)
    with torch.no_grad(), djinn.capture() as found:
        ours, given = ours.to(REMOTE), data.to(REMOTE)
        made = ours(given)
    del made
    result = PoolFirst().optimize(attrs.evolve(optimization_context(found.graph), profile=found.profile))
    here = {
        r.remote.handle: t.detach()
        for r, t in [*zip(ours.parameters(), model.parameters(), strict=True), (given, data)]
    }
    return result, here, data


ALIKE = {
    "transition": (nn.Sequential(nn.Conv2d(4, 6, 1), nn.AvgPool2d(3, 2)), "pointwise convolutions of averages"),
    "grouped": (nn.Sequential(nn.Conv2d(4, 6, 1, groups=2), nn.AvgPool2d(2)), "pointwise convolutions of averages"),
    "head": (nn.Sequential(nn.Conv2d(4, 6, 1), nn.AdaptiveAvgPool2d(1)), "pointwise convolutions of averages"),
    "uneven": (nn.Sequential(nn.Conv2d(4, 6, 1), nn.AdaptiveAvgPool2d(5)), "pointwise convolutions of averages"),
    "relu": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)), "activations of the largest"),
    "in place": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(True), nn.MaxPool2d(2)), "activations of the largest"),
    "leaky": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.LeakyReLU(0.1), nn.MaxPool2d(2)), "activations of the largest"),
    "largest twice": (nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(3, 2)), "two poolings at once"),
    "average twice": (nn.Sequential(nn.AvgPool2d(2), nn.AvgPool2d(3)), "two poolings at once"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_pooling_applies_beneficial_rewrites(name):
    model, told = ALIKE[name]
    result, here, data = optimize_model(model)
    assert result.applied
    assert told in result.reason
    (substitution,) = result.rewrite.substitutions
    if name in {"relu", "leaky"}:  # the module before stays unchanged
        here[substitution.inputs[0]] = model[0](data)
    with torch.no_grad():
        (made,) = substitution.compute([here[v] for v in substitution.inputs])
        torch.testing.assert_close(made, model(data))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(4, 6, 1), nn.AvgPool2d(2, padding=1)),  # padding adds zeros that have no bias
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.AvgPool2d(2)),
        nn.Sequential(nn.Conv2d(4, 6, 1, stride=2), nn.AvgPool2d(2)),
        nn.Sequential(nn.Conv2d(4, 6, 1), nn.MaxPool2d(2)),
        nn.Sequential(nn.GELU(), nn.MaxPool2d(2)),  # GELU is not monotone
        nn.Sequential(nn.LeakyReLU(-0.1), nn.MaxPool2d(2)),
        nn.Sequential(nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 1, 1)),  # pooling does not reduce the number of elements
        nn.Sequential(nn.MaxPool2d(3, 2), nn.MaxPool2d(2)),  # windows overlap
        nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2)),
        PooledTwice(),
    ],
)
def test_unprofitable_pooling_is_unchanged(model):
    result, _, _ = optimize_model(model)
    assert result.reason == "no pooling can be swapped with the op before it"
