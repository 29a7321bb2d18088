"""Results that a kernel leaves undefined are None, as on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from sameness import assert_same_as_cpu, numbers, waves
from torch import nn

aten = torch.ops.aten
MASKS = list(itertools.product([True, False], repeat=3))


def attention(weights, average=True, masked=False):
    def case(device):
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(8, 2, batch_first=True).eval().to(device)
        x = waves(device, 2, 3, 8)
        mask = torch.tensor([[False, False, True], [False, True, True]]).to(device) if masked else None
        with torch.no_grad():
            return layer(x, x, x, need_weights=weights, average_attn_weights=average, key_padding_mask=mask)

    return case


@pytest.mark.parametrize(
    "options",
    [
        {"weights": True},
        {"weights": False},
        {"weights": True, "average": False},
        {"weights": False, "masked": True},
        {"weights": True, "masked": True},
    ],
    ids=str,
)
def test_attention_returns_weights_only_on_request(embedded, options):
    assert_same_as_cpu(attention(**options))


def batch_norm(device, mask, training):
    x, w = numbers(device, 2, 4, 3), torch.ones(4, device=device)
    _, mean, rstd = aten.native_batch_norm(x, w, w, w.clone(), w.clone(), training, 0.1, 1e-5)
    return aten.native_batch_norm_backward(x, x, w, w, w, mean, rstd, training, 1e-5, mask)


def any_batch_norm(device, mask, training):
    x, w = numbers(device, 2, 4, 3), torch.ones(4, device=device)
    _, mean, rstd, reserve = aten._batch_norm_with_update(x, w, w, w.clone(), w.clone(), 0.1, 1e-5)
    return aten.batch_norm_backward(x, x, w, w, w, mean, rstd, training, 1e-5, mask, reserve)


def layer_norm(device, mask, training):
    del training
    x, w = numbers(device, 2, 3, 4), torch.ones(4, device=device)
    _, mean, rstd = aten.native_layer_norm(x, [4], w, w, 1e-5)
    return aten.native_layer_norm_backward(x, x, [4], mean, rstd, w, w, mask)


def group_norm(device, mask, training):
    del training
    x, w = numbers(device, 2, 4, 3), torch.ones(4, device=device)
    _, mean, rstd = aten.native_group_norm(x, w, w, 2, 4, 3, 2, 1e-5)
    return aten.native_group_norm_backward(x, x, mean, rstd, w, 2, 4, 3, 2, mask)


def convolution(device, mask, training):
    del training
    x, w = numbers(device, 1, 2, 5, 5), waves(device, 3, 2, 2, 2)
    upstream = numbers(device, 1, 3, 4, 4)
    return aten.convolution_backward(upstream, x, w, [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)


@pytest.mark.parametrize("backward", [batch_norm, any_batch_norm, layer_norm, group_norm, convolution])
def test_unrequested_gradients_are_none(embedded, backward):
    for mask, training in itertools.product(MASKS, (True, False)):

        def case(device, mask=mask, training=training):
            return backward(device, mask, training)

        assert_same_as_cpu(case)
