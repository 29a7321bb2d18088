"""Terms that the time of an op grows with, by the family of the op."""

from __future__ import annotations

from collections.abc import Sequence

# Elements of four bytes that fit into the first, second and last cache, and beyond which memory is given out page by page.
KNOTS = (1 << 12, 1 << 16, 1 << 18, 1 << 20)


def product_terms(dims: Sequence[int]) -> tuple[float, ...]:
    """Of a product of (batch, rows, columns, contracted): its start, its matrices, their rows, its arithmetic, its operands."""
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
    """Of recurrent layers of (steps, rows, columns, contracted): start, steps, products, what is done to their results, matrices.

    What comes in is multiplied for all steps at once, the state step by step: each has half of what is contracted. `product`
    are the coefficients of products. Some kernels lay out the matrices again each time.
    """
    steps, rows, columns, contracted = dims
    at_once = seconds(product, product_terms((1, steps * rows, columns, contracted // 2)))
    each = seconds(product, product_terms((1, rows, columns, contracted // 2)))
    return (1.0, float(steps), at_once + steps * each, float(steps * rows * columns), float(columns * contracted))


def size_terms(elements: float) -> tuple[float, ...]:
    """Of everything else: its start, its elements, and those beyond each of the knots."""
    return (1.0, elements, *(max(0.0, elements - knot) for knot in KNOTS))


def seconds(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    """The sum of the terms."""
    return sum(c * t for c, t in zip(coefficients, terms, strict=True))
