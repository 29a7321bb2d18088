"""Rules for backward passes of pooling, padding and sampling, which assume that gradients and indices fit the input."""

from __future__ import annotations

from djinn_core.server.checks.arguments import Arguments, Rule, product


def pooled(n: int) -> Rule:
    """`grad_output` over `n` dimensions of space is that of `self`; indices point into its planes."""

    def rule(a: Arguments) -> None:
        _same_planes(a, n)
        for name in ("kernel_size", "output_size"):
            sizes = a.__getattr__(name)
            a.require(sizes is None or len(sizes) in {1, n}, "there must be a size for each dimension of space")
        if a.indices is not None:
            a.require(tuple(a.indices.shape) == tuple(a.grad_output.shape), "indices must be shaped like grad_output")
            a.within("indices", product(a.self.shape[-n:]))

    return rule


def _same_planes(a: Arguments, n: int) -> None:
    gradient, given = a.grad_output, a.self
    a.require(given.dim() in {n + 1, n + 2}, "self must have dimensions of space, channels and perhaps a batch")
    a.require(0 not in given.shape[-n:], "self must have elements")
    if gradient.dim() != given.dim() or gradient.shape[:-n] != given.shape[:-n]:
        a.refuse(f"grad_output of shape {tuple(gradient.shape)} is not of an input of shape {tuple(given.shape)}")
    a.require(gradient.dtype == given.dtype, "grad_output and self must have one dtype")


def padded(n: int, reflected: bool) -> Rule:
    """`grad_output` is `self` with `padding` in `n` dimensions."""

    def rule(a: Arguments) -> None:
        _same_planes(a, n)
        a.require(len(a.padding) == 2 * n, f"padding must have {2 * n} numbers")
        for i in range(n):
            size, before, after = a.self.shape[-1 - i], a.padding[2 * i], a.padding[2 * i + 1]
            a.require(a.grad_output.shape[-1 - i] == size + before + after, "grad_output does not fit the padding")
            a.require(not reflected or max(before, after) < size, "padding must be less than the input's size")

    return rule


def sampled(n: int) -> Rule:
    """`grad_output` is what sampling `input` at `grid` gives."""

    def rule(a: Arguments) -> None:
        given, grid = a.input, a.grid
        a.require(given.dim() == grid.dim() == n + 2, f"input and grid must have {n + 2} dimensions")
        a.require(given.shape[0] == grid.shape[0] and grid.shape[-1] == n, "grid does not fit the input")
        a.require(0 not in given.shape[1:], "input must have elements")
        expected = (given.shape[0], given.shape[1], *grid.shape[1:-1])
        a.require(tuple(a.grad_output.shape) == expected, f"grad_output must have shape {expected}")
        a.require(given.dtype == grid.dtype == a.grad_output.dtype, "input, grid and grad_output must have one dtype")

    return rule
