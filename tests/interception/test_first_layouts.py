"""Strides of results in the first call of an op with non-contiguous operands: equal to the CPU's."""

from __future__ import annotations

import itertools

import pytest
import torch
from configured import configured
from sameness import numbers, waves
from torch.nn import functional

aten = torch.ops.aten


def with_memory_order(t, order):
    """Return a copy of `t` whose dimensions lie in memory in this order, outermost first."""
    return t.permute(order).contiguous().permute([order.index(d) for d in range(t.dim())])


def all_memory_orders(*shape):
    """Return a function that makes the same tensor in each memory order of its dimensions."""

    def make(device):
        return [with_memory_order(waves(device, *shape), order) for order in itertools.permutations(range(len(shape)))]

    return make


def image_layouts(*shape):
    """Return a function that makes the same images contiguous and channels-last."""

    def make(device):
        given, dims = waves(device, *shape), len(shape)
        return [given, with_memory_order(given, (0, *range(2, dims), 1))]

    return make


def ones(t, *shape):
    return torch.ones(shape or t.shape, device=t.device)


def index_filled(t):
    return t.index_fill(0, torch.tensor([0], device=t.device), 1.0)


def convolution(dims, transposed=False, options=(1, 0)):
    stride, padding = options

    def call(t):
        weight = waves("cpu", 4, 4, *(3,) * dims).to(t.device)
        lasts = [weight, with_memory_order(weight, (0, *range(2, dims + 2), 1))]
        rest = ([stride] * dims, [0] * dims, [1] * dims, transposed, [padding] * dims, 1)
        made = [aten.convolution(t, w, None, *rest) for w in lasts]
        return [
            made,
            [aten.convolution_backward(m, t, w, [4], *rest, [True] * 3)[:2] for m, w in zip(made, lasts, strict=True)],
        ]

    return call


def batch_norm(training):
    def call(t):
        channels = t.shape[1]
        return functional.batch_norm(t, ones(t, channels), ones(t, channels), training=training)

    return call


def batch_norm_backward(t):
    channels = t.shape[1]
    out, mean, rstd = aten.native_batch_norm(t, None, None, None, None, True, 0.1, 1e-5)
    given = (out, ones(t, channels), None, None, mean, rstd, True, 1e-5, [True] * 3)
    return aten.native_batch_norm_backward(ones(t), *given), aten.native_batch_norm_backward(out, *given)


MATRICES, ROWS, IMAGES, VOLUMES = (
    all_memory_orders(3, 2),
    all_memory_orders(2, 3, 4),
    image_layouts(2, 4, 6, 6),
    image_layouts(2, 4, 5, 5, 5),
)
CASES = {
    "isin": (ROWS, lambda t: torch.isin(t, ones(t, 3))),
    "isin of a matrix": (MATRICES, lambda t: torch.isin(t, ones(t, 3))),
    "isin a number": (ROWS, lambda t: torch.isin(t, 1.0)),
    "isin of integers": (ROWS, lambda t: torch.isin(t.long(), ones(t, 300).long())),
    "batch_norm that trains": (ROWS, batch_norm(True)),
    "batch_norm in evaluation": (ROWS, batch_norm(False)),
    "batch_norm of images": (IMAGES, batch_norm(True)),
    "batch_norm of images in evaluation": (IMAGES, batch_norm(False)),
    "batch_norm backward": (IMAGES, batch_norm_backward),
    "batch_norm backward of rows": (ROWS, batch_norm_backward),
    "conv1d": (image_layouts(2, 4, 6), convolution(1)),
    "conv_transpose1d": (image_layouts(2, 4, 6), convolution(1, True, (2, 1))),
    "conv2d": (IMAGES, convolution(2)),
    "conv3d": (VOLUMES, convolution(3)),
    "conv3d of one": (image_layouts(1, 4, 5, 5, 5), convolution(3)),
    "conv_transpose3d": (VOLUMES, convolution(3, True, (2, 1))),
    "conv_transpose3d of one": (image_layouts(1, 4, 5, 5, 5), convolution(3, True)),
    "replication_pad2d": (IMAGES, lambda t: functional.pad(t, (1, -1, 1, 0), "replicate")),
    "reflection_pad2d": (IMAGES, lambda t: functional.pad(t, (1, 1, 1, 0), "reflect")),
    "replication_pad3d": (VOLUMES, lambda t: functional.pad(t, (1, 1, 1, 0, 1, 1), "replicate")),
    "reflection_pad3d": (VOLUMES, lambda t: functional.pad(t, (1, 1, 1, 0, 1, 1), "reflect")),
    "replication_pad2d backward": (IMAGES, lambda t: aten.replication_pad2d_backward(ones(t, 2, 4, 8, 8), t, [1] * 4)),
    "reflection_pad2d backward": (IMAGES, lambda t: aten.reflection_pad2d_backward(ones(t, 2, 4, 8, 8), t, [1] * 4)),
    "pixel_shuffle": (IMAGES, lambda t: functional.pixel_shuffle(t, 2)),
    "channel_shuffle": (IMAGES, lambda t: functional.channel_shuffle(t, 2)),
    "normal": (ROWS, lambda t: [torch.normal(t, t.abs()), torch.normal(0.0, t.abs()), torch.normal(t, 1.0)]),
    "poisson": (ROWS, lambda t: torch.poisson(t.abs())),
    "copysign": (ROWS, lambda t: [torch.copysign(t, ones(t)[0, 0, 0]), torch.copysign(t, 2.0), torch.copysign(ones(t), t)]),
    "floor_divide": (ROWS, lambda t: [t // ones(t)[0, 0, 0], t // 2, ones(t) // t]),
    "div": (ROWS, lambda t: [torch.div(t, 2, rounding_mode="floor"), torch.div(t, ones(t), rounding_mode="trunc")]),
    "xlogy": (ROWS, lambda t: [torch.xlogy(t, ones(t)), torch.xlogy(ones(t), t), torch.special.xlog1py(t, ones(t)[0])]),
    "pow of a number": (ROWS, lambda t: [2**t, 3.0**t, torch.pow(1, t), 2**t.long()]),
    "logsigmoid": (ROWS, functional.logsigmoid),
    "rrelu": (ROWS, lambda t: [functional.rrelu(t), functional.rrelu(t, training=True)]),
    "index_fill": (ROWS, lambda t: [index_filled(t), index_filled(t[..., ::2]), index_filled(t[:, 1:])]),
    "attention": (all_memory_orders(1, 2, 3, 4), lambda t: functional.scaled_dot_product_attention(t, t, t)),
    "one_hot": (ROWS, lambda t: [functional.one_hot(t.abs().long()), functional.one_hot(t.abs().long(), 3)]),
    "dropout backward": (ROWS, lambda t: aten.native_dropout_backward(t, t > 0, 2.0)),
    "hardtanh backward": (ROWS, lambda t: [aten.hardtanh_backward(ones(t), t, -1, 1), aten.hardtanh_backward(t, ones(t), -1, 1)]),
    "elu backward": (ROWS, lambda t: aten.elu_backward(ones(t), 1.0, 1.0, 1.0, False, t)),
    "softplus backward": (ROWS, lambda t: aten.softplus_backward(ones(t), t, 1.0, 20.0)),
    "logit backward": (ROWS, lambda t: aten.logit_backward(ones(t), t.sigmoid())),
    "log_softmax backward": (ROWS, lambda t: aten._log_softmax_backward_data(t, ones(t), 1, torch.float32)),
    "mse_loss backward": (ROWS, lambda t: aten.mse_loss_backward(t, t, ones(t), 0)),
    "smooth_l1_loss backward": (ROWS, lambda t: aten.smooth_l1_loss_backward(t, t, ones(t), 0, 1.0)),
    "layer_norm backward": (ROWS, lambda t: aten.native_layer_norm_backward(t, t, [4], ones(t, 2, 3, 1), ones(t, 2, 3, 1), None, None, [True, False, False])),
    "binary_cross_entropy": (ROWS, lambda t: functional.binary_cross_entropy(t.sigmoid(), ones(t), reduction="none")),
}  # fmt: skip


@pytest.fixture(scope="module")
def first_session():
    """Yield the device with a new session that has learned no layout."""
    with configured(threads=1):
        yield "remote_accelerator:0"


def strides(results):
    if isinstance(results, torch.Tensor):
        return results.stride()
    return None if results is None else [strides(result) for result in results]


@pytest.mark.parametrize("name", CASES)
def test_first_call_returns_cpu_strides(first_session, name):
    make, call = CASES[name]
    expected, *found = [[strides(call(t)) for t in make(device)] for device in ("cpu", first_session, first_session)]
    assert found == [expected, expected]


def test_predicted_layout_of_isin_is_confirmed(first_session):
    """`contiguous()` returns the tensor itself if the layout is right, so that a write changes both."""
    given = numbers(first_session, 3, 2).t().bool().nonzero()
    found = torch.isin(given, torch.arange(3.0, device=first_session))
    again = found.contiguous()
    found.index_put_((torch.tensor([0], device=first_session),), torch.tensor(False, device=first_session))
    assert again is found
    assert again[0].tolist() == [False, False]
    assert torch.isin(numbers(first_session, 2, 3).t(), numbers(first_session, 2)).view(-1).sum().item() == 2


def test_eval_dropout_returns_new_tensor(first_session):
    given = numbers(first_session, 4)
    kept, _ = torch.ops.aten.native_dropout(given, 0.5, False)
    kept.add_(1)
    assert given.tolist() == numbers("cpu", 4).tolist()
