"""Rules for normalizations, whose kernels assume that statistics and weights have an element for each channel or row."""

from __future__ import annotations

from djinn_core.server.checks.arguments import Arguments, product

_READ_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var")
_OF_CHANNELS = (*_READ_OF_CHANNELS, "save_mean", "save_invstd", "save_var")


def batch_norm(a: Arguments) -> None:
    """Every statistic that is read has an element for each channel of `input`."""
    _channels(a, needed=not a.training, read=_READ_OF_CHANNELS)


def batch_norm_with_running_statistics(a: Arguments) -> None:
    """The same of those that always read running statistics."""
    _channels(a, needed=True)


def batch_norm_statistics(a: Arguments) -> None:
    """Check that updated statistics, if any, have an element for each channel."""
    _channels(a, needed=False)


def _channels(a: Arguments, needed: bool, read: tuple[str, ...] = _OF_CHANNELS) -> None:
    given = a.input
    a.require(given.dim() >= 2 and given.shape[1] > 0, "input must have channels")
    a.require(
        not needed or (a.running_mean is not None and a.running_var is not None), "running statistics are missing"
    )
    channels, dtype = given.shape[1], given.dtype
    for name in read:
        a.count(name, channels)
    for name in _OF_CHANNELS:  # kernels resize those given by `out=` themselves
        a.computed_in(name, dtype)


def batch_norm_backward(a: Arguments) -> None:
    """Gradients are shaped like `input`, statistics have an element for each of its channels; those in use are there."""
    given, gradient = a.input, a.grad_out
    a.require(given.dim() >= 2 and given.shape[1] > 0, "input must have channels")
    a.require(gradient.shape == given.shape, "grad_out must be shaped like input")
    trains = a.train if a.train is not None else a.update
    saved = [name for name in ("save_mean", "save_invstd", "save_var") if name in a]
    used = saved if trains else ("running_mean", "running_var")
    for name in used:
        a.require(a.__getattr__(name) is not None, f"{name} is missing")
        a.count(name, given.shape[1])
    for name in ("weight", "running_mean", "running_var", *saved):
        tensor = a.__getattr__(name)
        if tensor is not None and (name in {"weight", *used} or tensor.numel()):
            a.count(name, given.shape[1])
            a.computed_in(name, given.dtype)


def layer_norm_backward(a: Arguments) -> None:
    """Gradients are shaped like `input`, statistics have an element for each of its rows."""
    given, inner = a.input, tuple(a.normalized_shape)
    a.require(a.grad_out.shape == given.shape, "grad_out must be shaped like input")
    a.require(bool(inner) and tuple(given.shape[-len(inner) :]) == inner, "normalized_shape does not fit the input")
    rows = product(given.shape[: given.dim() - len(inner)])
    a.count("mean", rows)
    a.count("rstd", rows)
    for name in ("weight", "bias"):
        a.count(name, product(inner))
    for name in ("grad_out", "mean", "rstd", "weight", "bias"):
        a.computed_in(name, given.dtype)


def weight_norm(a: Arguments) -> None:
    """`g` has an element for each slice of `v`, as have the norms."""
    v, g = (a.v, a.g) if a.v is not None else (a.saved_v, a.saved_g)
    dim = a.dim or 0
    a.require(
        v.dim() > 0 and v.numel() > 0 and dim in {0, v.dim() - 1}, "v must have elements, and dim be its first or last"
    )
    expected = tuple(size if i == dim else 1 for i, size in enumerate(v.shape))
    a.require(tuple(g.shape) == expected and g.dtype == v.dtype, f"g must have shape {expected} and be {v.dtype}")
    a.count("saved_norms", v.shape[dim])
    for name in ("grad_w", "saved_norms"):
        a.computed_in(name, v.dtype)
    a.require(a.grad_w is None or a.grad_w.shape == v.shape, "grad_w must be shaped like v")


def weight_norm_interface(a: Arguments) -> None:
    """The same of kernels that write norms into memory laid out as `g` is, and read everything without strides."""
    weight_norm(a)
    for name in ("v", "g", "saved_v", "saved_g", "saved_norms", "grad_w"):
        tensor = a.__getattr__(name)
        a.require(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")
