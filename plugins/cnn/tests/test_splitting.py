"""Split batches: which ops can be split, and equal results. The code runs on local tensors."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch

import djinn
from djinn.planning import CostEstimate, Costs, Stream
from djinn.testing import optimization_context
from djinn_cnn.pipelining import SplitBatches
from djinn_cnn.pipelining.batches import region_of

REMOTE = "remote_accelerator:0"
SIZE = 6


class Block(torch.nn.Module):
    """A residual block with in-place writes."""

    def __init__(self, width, stride=1):
        super().__init__()
        self.first = torch.nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm = torch.nn.BatchNorm2d(width)
        self.second = torch.nn.Conv2d(width, width, 3, 1, 1, groups=width)
        self.past = torch.nn.Conv2d(width, width, 1, stride)
        self.act = torch.nn.ReLU(inplace=True)

    def forward(self, x):
        made = self.second(self.act(self.norm(self.first(x))))
        made += self.past(x)
        return self.act(made)


def convolution_model():
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1), Block(8), Block(8, 2)]
    head = [
        torch.nn.GroupNorm(2, 8),
        torch.nn.Hardswish(),
        torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 5),
    ]
    return torch.nn.Sequential(*layers, torch.nn.AvgPool2d(2), torch.nn.Upsample(scale_factor=2), *head), 3, 20, 20


class Patches(torch.nn.Module):
    """An encoder of image patches, with a class token in front."""

    def __init__(self):
        super().__init__()
        self.patch = torch.nn.Conv2d(3, 16, 5, 5)
        self.token, self.place = torch.nn.Parameter(torch.randn(1, 1, 16)), torch.nn.Parameter(torch.randn(1, 17, 16))
        self.norm, self.split, self.join = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        rows = self.patch(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(rows), -1, -1), rows], 1) + self.place
        heads = self.split(self.norm(rows)).view(len(rows), 17, 6, 8).permute(0, 2, 1, 3)
        seen = torch.nn.functional.scaled_dot_product_attention(*heads.split(2, 1))
        rows = rows + self.join(seen.transpose(1, 2).reshape(len(rows), 17, 16))
        return rows[:, 0].softmax(-1)


MODELS = {"pictures": convolution_model, "patches": lambda: (Patches(), 3, 20, 20)}


def capture_context(model, data, **evolved):
    """Return the optimization context of a captured run of `model`, and the program's input tensors by value id."""
    ours = copy.deepcopy(model)
    with torch.no_grad(), djinn.capture() as found:
        ours, given = ours.to(REMOTE), data.to(REMOTE)
        result = ours(given)
    pairs = [
        *zip(ours.parameters(), model.parameters(), strict=True),
        *zip(ours.buffers(), model.buffers(), strict=True),
    ]
    here = {remote.remote.handle: local.detach() for remote, local in [*pairs, (given, data)]}
    context = attrs.evolve(optimization_context(found.graph, 2), profile=found.profile, **evolved)
    row = tuple(CostEstimate(0, 0, 0, 1e-2) for _ in found.graph.nodes)
    costs = Costs(dict.fromkeys([d.id for d in context.topology.devices], row))
    return attrs.evolve(context, costs=costs), here, result


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("parts", [2, 4])
def test_split_batch_equals_whole_batch(name, parts):
    model, *sizes = MODELS[name]()
    model, data = model.eval(), torch.randn(SIZE, *sizes)
    context, here, result = capture_context(model, data)
    region = region_of(context)
    assert len(region.nodes) + len(region.shared) >= len(context.graph.nodes) - 1  # once where the token is expanded
    assert region.outputs == (result.remote.handle,)
    with torch.no_grad():
        (made,) = region.substitution(context.graph, parts).compute([here[v] for v in region.inputs])
        torch.testing.assert_close(made, model(data))


@pytest.mark.parametrize(
    "mixing",
    [
        lambda made: made - made.mean(0, keepdim=True),
        lambda made: made.cumsum(0),
        lambda made: made.flatten().cumsum(0) + made.sum(),
        lambda made: made.transpose(0, 1).softmax(1),
        lambda made: made.flip(0),
        lambda made: made.t() @ made,
        lambda made: torch.nn.functional.batch_norm(made, None, None, training=True),
    ],
)
def test_ops_across_batch_are_not_split(mixing):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 4)

    class Mixing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return mixing(torch.relu(self.layer(x)))

    context, here, _ = capture_context(Mixing(), data := torch.randn(SIZE, 8))
    region = region_of(context)
    assert [node.operation for node, _ in region.nodes] == ["linear", "relu"]
    with torch.no_grad():
        (made,) = region.substitution(context.graph, 2).compute([here[v] for v in region.inputs])
        torch.testing.assert_close(made, torch.relu(layer(data)))


def test_value_read_before_a_write_is_not_split():
    class ReadBeforeWrite(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, x):
            made = self.layer(x)
            before = made.flip(0)
            return before + made.relu_()

    context, _, _ = capture_context(ReadBeforeWrite(), torch.randn(SIZE, 8))
    assert region_of(context) is None


def test_splitting_refusal_names_reason():
    model, *sizes = convolution_model()
    context, _, _ = capture_context(model.eval(), torch.randn(SIZE, *sizes))
    applied = SplitBatches().optimize(context)
    assert applied.applied
    assert "ops over a batch of 6 take" in applied.reason
    following = attrs.evolve(context, stream=Stream(1, "server/cpu:1"))
    assert "already keep all devices busy" in SplitBatches().optimize(following).reason
    cheap = Costs({d: tuple(CostEstimate(0, 0, 0, 1e-6) for _ in row) for d, row in context.costs.by_device.items()})
    assert "with transfers" in SplitBatches().optimize(attrs.evolve(context, costs=cheap)).reason
    one, _, _ = capture_context(model, torch.randn(1, *sizes))
    assert SplitBatches().optimize(one).reason == "no ops process the inputs of a batch independently"
