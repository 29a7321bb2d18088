"""Convolution blocks are matched in each recorded form: with their norm and activation, and no other nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import djinn
from djinn.planning import fx_graph
from djinn_cnn.convolution import Convolution

DEVICE = "remote_accelerator:0"


def match_graph(graph):
    pattern = Convolution()
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


def record_graph(model, shape, *, train=False):
    """Return the graph that Djinn records on meta tensors, without an executor."""
    model = model.train(train).to(DEVICE)
    with djinn.capture() as captured, torch.set_grad_enabled(train):
        result = model(torch.zeros(shape, device=DEVICE))
        if train:
            result.sum().backward()
    return captured.graph


def match_model(model, shape, *, train=False):
    return match_graph(record_graph(model, shape, train=train))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 8, 3), (1, 4, 9, 9)),
        (nn.Conv2d(4, 8, 1), (1, 4, 9, 9)),
        (nn.Conv2d(4, 4, 3, groups=4), (1, 4, 9, 9)),
        (nn.Conv1d(4, 8, 3, groups=2), (1, 4, 9)),
        (nn.ConvTranspose2d(4, 8, 2, 2), (1, 4, 9, 9)),
        (nn.Conv3d(4, 8, 3), (1, 4, 5, 5, 5)),
    ],
)
def test_convolution_kinds_match_once(layer, shape):
    for train in (False, True):
        (match,) = match_model(layer, shape, train=train)
        assert match.confidence == 1.0


def test_block_ends_at_value_with_second_user():
    (match,) = match_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (1, 3, 9, 9))
    assert len(match.nodes) == 3

    class TwoUsers(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x):
            x = self.convolution(x)
            return self.norm(x) + x

    (match,) = match_model(TwoUsers(), (1, 3, 9, 9))
    assert len(match.nodes) == 1


def test_computed_kernel_lowers_confidence():
    class Correlation(nn.Module):
        def forward(self, x):
            return nn.functional.conv2d(x, (x[:, :, :3, :3] * 2))

    (match,) = match_model(Correlation(), (1, 3, 9, 9))
    assert match.confidence < 1.0


def test_exported_program_has_same_matches():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.SiLU()).eval()
    with torch.no_grad():
        (exported,) = match_graph(fx_graph(torch.export.export(model, (torch.zeros(1, 3, 9, 9),))))
    (remote,) = match_model(model, (1, 3, 9, 9))
    assert len(exported.nodes) == len(remote.nodes) == 3
