"""Terms of an op's predicted time, by the family of the op."""

from __future__ import annotations

from collections.abc import Sequence

# Numbers of four-byte elements that fit into each cache level, and from which memory is allocated page by page.
KNOTS = (1 << 12, 1 << 16, 1 << 18, 1 << 20)


def product_terms(dims: Sequence[int]) -> tuple[float, ...]:
    """Return the terms of a matrix product: start, matrices, rows, arithmetic, operands."""
    batch, rows, columns, contracted = map(float, dims)
    return (
        1.0,
        batch,
        batch * rows,
        batch * rows * columns * contracted,
        batch * rows * contracted,
        batch * contracted * columns,
        batch * rows * columns,
    )


def recurrent_terms(dims: Sequence[int], product: Sequence[float]) -> tuple[float, ...]:
    """Return the terms of recurrent layers: start, steps, products, pointwise work, matrices.

    `dims`: (steps, rows, columns, contracted). The input is multiplied for all steps at once, and the state step by step.
    Each has half of the contracted size. `product`: coefficients of products. Some kernels pack the matrices each time.
    """
    steps, rows, columns, contracted = dims
    at_once = seconds(product, product_terms((1, steps * rows, columns, contracted // 2)))
    step_seconds = seconds(product, product_terms((1, rows, columns, contracted // 2)))
    return (
        1.0,
        float(steps),
        at_once + steps * step_seconds,
        float(steps * rows * columns),
        float(columns * contracted),
    )


def size_terms(elements: float) -> tuple[float, ...]:
    """Return the terms of any other op: start, number of elements, and their excess over each number in `KNOTS`."""
    return (1.0, elements, *(max(0.0, elements - knot) for knot in KNOTS))


def seconds(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    """Return the sum of the terms, weighted by their coefficients."""
    return sum(c * t for c, t in zip(coefficients, terms, strict=True))
