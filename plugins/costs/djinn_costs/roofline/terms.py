"""Terms of an op's predicted time, by family of the op.

A device's coefficient for each term is fitted to measurements.
"""

from __future__ import annotations

from collections.abc import Sequence

# Numbers of four-byte elements that fit into each cache level, and from which memory is allocated page by page.
KNOTS = (1 << 12, 1 << 16, 1 << 18, 1 << 20)


def product_terms(dims: Sequence[int]) -> tuple[float, ...]:
    """Return the terms of a matrix product: a constant, matrices, rows, arithmetic, and elements.

    The elements of left operand, right operand and result are separate terms.
    """
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
    """Return the terms of a recurrent layer: a constant, steps, products, elementwise work, and weights.

    The input is multiplied for all steps at once, and the state in each step. Each of the two products has half of the
    contracted size. The weights are a term because some kernels pack them in each call.

    Args:
        dims: steps, rows, columns and contracted size.
        product: coefficients of matrix products.
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
    """Return the terms of ops other than products and recurrent layers: piecewise linear in the number of elements.

    The terms are a constant, the number of elements, and for each number in `KNOTS` the elements above it.
    """
    return (1.0, elements, *(max(0.0, elements - knot) for knot in KNOTS))


def seconds(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    """Return the predicted time: the sum of the terms, each multiplied by its coefficient."""
    return sum(c * t for c, t in zip(coefficients, terms, strict=True))
