"""Rules for ops whose kernels do not check shapes or numbers, such as distances, transforms and polynomials."""

from __future__ import annotations

import math
from typing import Any

import torch

from djinn_core.wire import limits
from djinn_core.wire.tensors import extent
from djinn_server.checks.arguments import Arguments, Rule

_SOBOL_DIMENSIONS, _SOBOL_BITS = 21201, 30


def alike(*names: str) -> Rule:
    """Return a rule: the tensors with these names must have the same shape."""
    return lambda a: a.same_shape(*names)


def cdist_backward(a: Arguments) -> None:
    """Check that distances and their gradients have the shape that the rows of `x1` and `x2` imply."""
    x1, x2, grad = a.x1, a.x2, a.grad if "grad" in a else a.grad_output  # renamed in PyTorch 2.14
    a.require(x1.dim() >= 2 and x2.dim() >= 2 and x1.shape[-1] == x2.shape[-1], "x1 and x2 must have as many columns")
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    expected = (*batch, x1.shape[-2], x2.shape[-2])
    a.require(tuple(grad.shape) == tuple(a.cdist.shape) == expected, f"grad and cdist must have shape {expected}")
    a.require(grad.dtype == a.cdist.dtype == x1.dtype == x2.dtype, "x1, x2, cdist and grad must have one dtype")


def pdist(a: Arguments) -> None:
    """Check that each distance vector has n(n-1)/2 elements for a matrix of n rows."""
    a.require(a.self.dim() == 2, "self must have two dimensions")
    rows = a.self.shape[0]
    for name in ("grad", "grad_output", "pdist"):
        tensor = a.__getattr__(name)
        if tensor is not None:
            a.count(name, rows * (rows - 1) // 2)
            a.require(tensor.dim() == 1 and tensor.dtype == a.self.dtype, f"{name} must be a vector of {a.self.dtype}")


def roll(a: Arguments) -> None:
    """Check that there are not too many shifts, because the kernel recurses once for each shift."""
    a.require(len(a.shifts) <= limits.SHIFTS, f"there may be at most {limits.SHIFTS} shifts, not {len(a.shifts)}")


def fft(a: Arguments) -> None:
    """Check that `dim` lists different existing dimensions, counted from 0, and that `last_dim_size` fits the input."""
    dims, tensor = list(a.dim), a.self
    a.require(
        all(0 <= d < tensor.dim() for d in dims) and len(set(dims)) == len(dims),
        f"dim must list different dimensions from 0 to {tensor.dim() - 1}, not {dims}",
    )
    if a.last_dim_size is not None and dims:
        size = a.last_dim_size
        a.require(size > 0 and size // 2 + 1 <= tensor.shape[dims[-1]], "last_dim_size must fit the input")


def degree(a: Arguments) -> None:
    """Check that the degree of a polynomial is at most `limits.DEGREE`."""
    n = a.n
    if isinstance(n, torch.Tensor):
        if n.device.type != "cpu" or not n.numel():
            return
        a.require(not n.dtype.is_complex, "n must be real")
        n = float(n.double().max())  # unsigned integers have no `max`
    a.require(
        not isinstance(n, complex) and (math.isnan(n) or n <= limits.DEGREE), f"n must be at most {limits.DEGREE}"
    )


def no_smallest_integer(a: Arguments) -> None:
    """Refuse the smallest integer of a dtype: it has no absolute value, and its division by -1 ends the process."""
    for tensor in (a.self, a.other):
        signed = isinstance(tensor, torch.Tensor) and tensor.dtype in {torch.int64, torch.int32}
        if signed and tensor.device.type == "cpu" and tensor.numel():
            smallest = torch.iinfo(tensor.dtype).min
            a.require(int(tensor.min()) > smallest, f"elements must not be {smallest}, which has no absolute value")


def random_from(a: Arguments) -> None:
    """Check that the lower bound is representable in the dtype, if there is no upper bound."""
    start, dtype = a.__getattr__("from"), a.self.dtype
    if start is not None and a.to is None and dtype.is_floating_point:
        largest = int(2 / torch.finfo(dtype).eps)
        a.require(abs(start) <= largest, f"from must be from {-largest} to {largest} for {dtype}")


def floating(*names: str) -> Rule:
    """Return a rule: the tensors with these names must be floating-point, because the kernel divides them."""

    def rule(a: Arguments) -> None:
        for name in names:
            a.require(a.__getattr__(name).is_floating_point(), f"{name} must be floating-point")

    return rule


def piece_count(a: Arguments) -> None:
    """Check that a tensor is split into at most `limits.PIECES` pieces."""
    for name in ("chunks", "sections"):
        count = a.__getattr__(name)
        a.require(not isinstance(count, int) or count <= limits.PIECES, f"{name} must be at most {limits.PIECES}")


def power(a: Arguments) -> None:
    """Check that the exponent can be negated."""
    a.require(a.n > -(2**63), "n must be more than -2^63")


def cholesky_solve(a: Arguments) -> None:
    """Check that right-hand sides and factors have matching sizes."""
    sides, factor = a.self, a.A
    a.require(sides.dim() >= 2 and sides.dim() == factor.dim(), "self and A must have two or more dimensions")
    expected = (*sides.shape[:-2], sides.shape[-2], sides.shape[-2])
    a.require(tuple(factor.shape) == expected and factor.dtype == sides.dtype, f"A must have shape {expected}")


def unfold_backward(a: Arguments) -> None:
    """Check that gradients match the windows over a tensor of `input_sizes`."""
    sizes, dim = list(a.input_sizes), a.dim
    a.require(not sizes or -len(sizes) <= dim < len(sizes), "dim must be a dimension of the input")
    length = sizes[dim] if sizes else 1
    a.require(a.step > 0 and 0 <= a.size <= length and min(sizes, default=0) >= 0, "size and step do not fit the input")
    windows = [(length - a.size) // a.step + 1 if i == dim % len(sizes) else n for i, n in enumerate(sizes)]
    expected = (*windows, a.size)
    a.require(tuple(a.grad_in.shape) == expected, f"grad_in must have shape {expected}")


def antialiased(a: Arguments) -> None:
    """Check that output sizes are at most the input sizes times the scales."""
    sizes = a.self.shape if a.self is not None else a.input_size
    for dim, scale in ((-2, a.scales_h), (-1, a.scales_w)):
        if scale is not None and a.output_size is not None:
            fits = scale > 0 and a.output_size[dim] <= sizes[dim] * scale * (1 + 1e-6)
            a.require(fits, f"output size {a.output_size[dim]} is more than {scale} times the input size {sizes[dim]}")


def reshape_alias(a: Arguments) -> None:
    """Check that the new view is within the storage of `self`."""
    size, stride, base = list(a.size), list(a.stride), a.self
    fits = len(size) == len(stride) and min((*size, *stride, 0)) >= 0
    capacity = base.untyped_storage().nbytes() // base.element_size() if fits else 0
    a.require(
        fits and int(base.storage_offset()) + extent(size, stride) <= capacity,
        "size and stride exceed the storage of self",
    )


def zeros_like_feature(a: Arguments) -> None:
    """Check that `self` has at least `self_num_batch_dims` dimensions, and that `other` is contiguous."""
    batch = a.self_num_batch_dims or 0
    a.require(0 <= batch <= a.self.dim(), f"self_num_batch_dims must be from 0 to {a.self.dim()}")
    a.require(a.other.is_contiguous(), "other must be contiguous")


def attention_projection(a: Arguments) -> None:
    """Check that three times the number of heads divides the width of `qkv`."""
    heads, width = a.num_heads, a.qkv_bias.numel()
    a.require(
        a.qkv.dim() == 3 and a.qkv_bias.dim() == 1 and width == a.qkv.shape[2],
        "qkv_bias needs an element per column of qkv",
    )
    a.require(heads > 0 and width > 0 and width % (3 * heads) == 0, f"3 * {heads} heads must divide {width}")
    a.require(
        a.qkv.dtype == a.qkv_bias.dtype and a.qkv.is_floating_point(),
        "qkv and qkv_bias must have one float dtype",
    )


def sobol(a: Arguments) -> None:
    """Check that the states of a Sobol generator have the shapes that `dimension` dimensions need."""
    dimension = a.dimension
    a.require(0 < dimension <= _SOBOL_DIMENSIONS, f"dimension must be 1 to {_SOBOL_DIMENSIONS}")
    state = a.sobolstate if a.sobolstate is not None else a.self
    tensors: list[Any] = [(state, (dimension, _SOBOL_BITS))]
    if a.sobolstate is not None:
        tensors.append((a.quasi if a.quasi is not None else a.self, (dimension,)))
    if a.ltm is not None:
        tensors.append((a.ltm, (dimension, _SOBOL_BITS, _SOBOL_BITS)))
    for tensor, shape in tensors:
        a.require(
            tuple(tensor.shape) == shape and tensor.dtype == torch.int64, f"a state must be int64 of shape {shape}"
        )
    for name in ("n", "num_generated"):
        count = a.__getattr__(name)
        a.require(count is None or 0 <= count < 1 << _SOBOL_BITS, f"{name} must be less than 2^{_SOBOL_BITS}")


def fake_quantize(a: Arguments) -> None:
    """Check that the observed ranges and scales have one element, or one per channel."""
    channels = 1
    if a.per_row_fake_quant:
        a.require(-a.self.dim() <= a.ch_axis < a.self.dim(), "ch_axis must be a dimension of self")
        channels = a.self.shape[a.ch_axis]
    a.require(a.self.dtype == torch.float32 and a.self.numel() > 0, "self must be float32 and not empty")
    for name in ("running_min", "running_max", "scale", "zero_point"):
        tensor = a.__getattr__(name)
        dtype = torch.int32 if name == "zero_point" else torch.float32
        a.require(tensor.numel() == channels and tensor.dtype == dtype, f"{name} must be {channels} numbers of {dtype}")
    for name in ("observer_on", "fake_quant_on"):
        a.require(
            a.__getattr__(name).numel() == 1 and not a.__getattr__(name).dtype.is_complex,
            f"{name} must be one real number",
        )
