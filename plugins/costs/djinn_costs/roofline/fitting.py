"""Fit measured times by a sum of non-negative terms, with non-negative least squares on relative errors.

With non-negative coefficients, predictions never fall when work grows, and they extrapolate sensibly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
_ROUNDS = 12  # reweighting rounds, so that a few disturbed measurements do not dominate
_TOLERANCE = 0.1  # relative error below which the fit of a measurement is good enough
_MIN_SECONDS = 1e-9
_STEPS = 10  # steps per term, after which only rounding errors choose the active set
_ZERO = 1e-14
_ZERO_GRADIENT = 1e-10


def fit_seconds(terms: Matrix, seconds: Vector) -> Vector:
    """Return coefficients c >= 0 so that `terms @ c` fits `seconds` by relative error. Outliers have less weight.

    Args:
        terms: one row for each measurement, one column for each term.
        seconds: measured times. A time below a nanosecond counts as a nanosecond.
    """
    seconds = np.maximum(seconds, _MIN_SECONDS)
    weights = np.ones(len(seconds))
    relative = terms / seconds[:, None]
    coefficients = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        coefficients = non_negative(relative * weights[:, None], weights)
        error = np.abs(np.log(np.maximum(relative @ coefficients, 1e-9)))
        weights = np.sqrt(1.0 / np.maximum(error, _TOLERANCE))
    return coefficients


def non_negative(matrix: Matrix, target: Vector) -> Vector:
    """Return the x >= 0 that minimises |matrix @ x - target|, by the active sets of Lawson and Hanson (1974)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    columns, coefficients, free = matrix / scale, np.zeros(len(scale)), np.zeros(len(scale), dtype=bool)
    for _ in range(_STEPS * len(scale)):
        trial = np.zeros(len(scale))
        trial[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
        if (bad := free & (trial < 0)).any():  # move towards it until a coefficient is zero
            coefficients = coefficients + (coefficients[bad] / (coefficients[bad] - trial[bad])).min() * (
                trial - coefficients
            )
            free &= coefficients > _ZERO
            continue
        coefficients, gradient = trial, np.where(free, 0.0, columns.T @ (target - columns @ trial))
        if gradient.max() <= _ZERO_GRADIENT * np.linalg.norm(target):
            break
        free[gradient.argmax()] = True
    solution: Vector = np.where(free, coefficients, 0.0) / scale
    return solution
