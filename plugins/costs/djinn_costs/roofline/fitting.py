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
    """The x >= 0 that minimises |matrix @ x - target|."""
    from scipy.optimize import nnls  # where a device is measured, and nowhere else

    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    found: Vector = nnls(matrix / scale, target)[0] / scale
    return found
