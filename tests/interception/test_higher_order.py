"""Higher-order ops on remote tensors, with and without gradients: the same as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_over
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

# PyTorch's own, on the CPU as well: of what tracing imports, and of flex_attention without torch.compile.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning"
)


def random_input(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def use_cond(x):
    taken = torch.cond(x.sum() > 100, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))
    return taken, torch.cond(x.sum() < 100, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))


def use_while_loop(x):
    return while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0, device=x.device), x))


def use_scan(x):
    return scan(lambda carry, x: (carry + x, carry * x), torch.zeros(3, device=x.device), x)


def use_associative_scan(x):
    return (associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic"),)


def use_map(x):
    return (map_over(lambda row, y: (row * y).sin(), x, torch.full((3,), 2.0, device=x.device)),)


def use_flex_attention(x):
    query = x.view(1, 2, 2, 3)
    causal = create_block_mask(lambda _b, _h, i, j: i >= j, 1, 1, 2, 2, device=str(x.device))
    moved = flex_attention(query, query, query, score_mod=lambda score, _b, _h, i, j: score + (i - j))
    return moved, flex_attention(query, query, query, block_mask=causal)


@pytest.mark.parametrize(
    "function", [use_cond, use_while_loop, use_scan, use_associative_scan, use_map, use_flex_attention]
)
def test_higher_order_values_equal_cpu(embedded, function):
    x = random_input(4, 3)
    for ours, theirs in zip(function(x.to(embedded)), function(x), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("function", [use_cond, use_scan, use_map])
def test_higher_order_gradients_equal_cpu(embedded, function):
    x = random_input(4, 3).requires_grad_()
    remote = x.detach().to(embedded).requires_grad_()
    for tensor in (x, remote):
        sum(result.sum() for result in function(tensor)).backward()
    torch.testing.assert_close(remote.grad.cpu(), x.grad)


def test_attention_gradients_missing_on_cpu(embedded):
    x = random_input(1, 2, 4, 3).requires_grad_()
    remote = x.detach().to(embedded).requires_grad_()
    torch.nn.functional.scaled_dot_product_attention(x, x, x).square().sum().backward()
    flex_attention(remote, remote, remote).square().sum().backward()
    torch.testing.assert_close(remote.grad.cpu(), x.grad)


class Branches(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def test_export_keeps_higher_order_op(embedded):
    x = random_input(4, 3)
    exported = torch.export.export(Branches(), (x.to(embedded),))
    assert "cond" in str(exported.graph)
    torch.testing.assert_close(exported.module()(x.to(embedded)).cpu(), Branches()(x))
