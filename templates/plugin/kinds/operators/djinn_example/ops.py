"""The ops. For a C++ op, load the library here: `torch.ops.load_library(...)`."""

import torch
from torch import Tensor


@torch.library.custom_op("example::scaled_sum", mutates_args=())
def scaled_sum(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """Compute `x + factor * y`. The server runs this function; the client runs `_metadata`."""
    return x + factor * y


@scaled_sum.register_fake
def _metadata(x, y, factor):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.factor = inputs[2]


def _gradient(ctx, grad):
    return grad, grad * ctx.factor, None


scaled_sum.register_autograd(_gradient, setup_context=_save)
