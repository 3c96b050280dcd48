"""Calibration error: how far stated confidence is from the share that is right.

Shape letters: N predictions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def calibration_error(confidence_N: NDArray[np.float64], right_N: NDArray[np.bool_], *, num_bins: int = 15) -> float:
    r"""Expected calibration error over bins of equal width (eq. T3).

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{n} \left| \mathrm{acc}_b - \mathrm{conf}_b \right|

    ``confidence_N`` are the stated probabilities of the predicted classes, ``right_N`` whether they were right.

    Example:
        >>> calibration_error(np.array([0.9, 0.9]), np.array([True, False]))
        0.4
    """
    if len(confidence_N) != len(right_N) or not len(right_N) or num_bins < 1:
        raise ValueError(f"got {len(confidence_N)} confidences, {len(right_N)} answers and {num_bins} bins")
    if confidence_N.min() < 0 or confidence_N.max() > 1 + 1e-6:
        raise ValueError(f"confidences lie in [0, 1], got {confidence_N.min():g} to {confidence_N.max():g}")
    bin_N = np.minimum((confidence_N * num_bins).astype(np.int64), num_bins - 1)
    gap = np.bincount(bin_N, weights=right_N.astype(np.float64) - confidence_N, minlength=num_bins)
    return float(np.abs(gap).sum() / len(right_N))
