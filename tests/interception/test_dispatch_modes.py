"""Modes that look at ops see of remote tensors what they see of others."""

from __future__ import annotations

import pytest
import torch
import torch._refs
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.composite_compliance import generate_cct_and_mode
from torch.utils.flop_counter import FlopCounterMode


class AttentionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        x = self.project(x).view(2, 4, 2, 4).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


MODELS = {
    "linear": lambda: (nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (3, 8)),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 2, 6, 6)),
    "attention": lambda: (AttentionLayer(), (2, 4, 8)),
}


def first_output(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_flop_counter_equals_cpu(embedded, name, training):
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    model, x = model.train(training), torch.randn(shape)
    counts, outputs = [], []
    for device in ("cpu", embedded):
        model.to(device)
        with torch.set_grad_enabled(training), FlopCounterMode(display=False) as flops:
            output = first_output(model(x.to(device)))
            if training:
                output.sum().backward()
        counts.append(flops.get_total_flops())
        outputs.append(output.detach().cpu())
    assert counts[0] == counts[1] > 0
    torch.testing.assert_close(outputs[1], outputs[0])


def test_dispatch_mode_sees_ops_of_layers(embedded):
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).to(embedded)
    x = torch.ones(2, 3, device=embedded)
    with torch.no_grad():
        traced = make_fx(model)(x)
        assert {"addmm", "native_layer_norm"} <= {node.name for node in traced.graph.nodes}
        assert torch.equal(traced(x * 2).cpu(), model(x * 2).cpu())


@pytest.mark.parametrize("op", ["_native_batch_norm_legit_no_training", "_batch_norm_no_update"])
def test_eval_batch_norm_statistics_are_empty(embedded, op):
    x, ones = torch.randn(2, 3, 4, 4), torch.ones(3)
    func = getattr(torch.ops.aten, op)
    ours = func(*(t.to(embedded) for t in (x, ones, ones, ones, ones)), 0.1, 1e-5)
    theirs = func(x, ones, ones, ones, ones, 0.1, 1e-5)
    assert [tuple(t.shape) for t in ours] == [tuple(t.shape) for t in theirs]
    torch.testing.assert_close(ours[0].cpu(), theirs[0])


def test_wrapper_subclass_view_shares_base_storage(embedded):
    """PyTorch's composite checks make such views with Python dispatch disabled."""
    wrapper, mode = generate_cct_and_mode()
    x = wrapper(torch.tensor([2.0, 3.0], device=embedded), mode).requires_grad_()
    y = torch.tensor([3.0, 2.0], device=embedded).requires_grad_()
    for view in (
        lambda t: t.view(2, 1),
        lambda t: t.expand(3, 2),
        lambda t: t.unfold(0, 1, 1),
        lambda t: t.unsqueeze(0),
    ):
        assert view(x).untyped_storage()._cdata == x.untyped_storage()._cdata
    grads = torch.autograd.grad(
        [torch.float_power(x, y)], [x, y], [torch.ones(2, device=embedded, dtype=torch.float64)]
    )
    assert grads[0].elem.tolist() == [12.0, 6.0]


def test_views_from_torch_refs_are_views(embedded):
    for device in ("cpu", embedded):
        made = torch._refs.meshgrid([torch.ones(2, device=device), torch.ones(3, device=device)], indexing="ij")
        assert [m._is_view() for m in made] == [True, True]
