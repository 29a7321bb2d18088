"""Time as a sum of terms that may only add to it: least squares with non-negative coefficients, on relative errors.

Non-negative coefficients of terms that grow with the work make predictions that never fall when there is more to do, and
that go on sensibly beyond what was measured.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
_ROUNDS = 12  # of reweighting, so that a few disturbed measurements do not decide
_TOLERANCE = 0.1  # relative error below which a measurement counts as met


def fit_seconds(terms: Matrix, seconds: Vector) -> Vector:
    """Coefficients c >= 0 so that `terms @ c` is near `seconds`, relatively; the median counts more than the worst.

    Args:
        terms: a row for each measurement, a column for each term.
        seconds: positive times.
    """
    weights = np.ones(len(seconds))
    relative = terms / seconds[:, None]
    found = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        found = non_negative(relative * weights[:, None], weights)
        error = np.abs(np.log(np.maximum(relative @ found, 1e-9)))
        weights = np.sqrt(1.0 / np.maximum(error, _TOLERANCE))
    return found


def non_negative(matrix: Matrix, target: Vector) -> Vector:
    """The x >= 0 that minimises |matrix @ x - target| (Lawson and Hanson, "Solving Least Squares Problems", 1974)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    columns = matrix.shape[1]
    x, active = np.zeros(columns), np.zeros(columns, dtype=bool)
    for _ in range(3 * columns):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[active] = -np.inf
        best = int(np.argmax(gradient))
        if active.all() or gradient[best] <= 1e-10:
            break
        active[best] = True
        x = _feasible(matrix, target, x, active)
    unscaled: Vector = x / scale
    return unscaled


def _feasible(matrix: Matrix, target: Vector, x: Vector, active: NDArray[np.bool_]) -> Vector:
    """The least-squares solution over the active columns, leaving out those that would become negative."""
    while True:
        solved = np.zeros_like(x)
        solved[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        negative = active & (solved <= 0)
        if not negative.any():
            return solved
        step = np.min(x[negative] / np.maximum(x[negative] - solved[negative], 1e-300))
        x = x + step * (solved - x)
        active &= x > 1e-15
        if not active.any():
            return np.zeros_like(x)
