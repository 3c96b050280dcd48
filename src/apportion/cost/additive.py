"""An additive latency model: what one unit of each kind of work costs, from a few measured networks.

.. math:: \\hat c(s) = \\beta_0 + \\sum_k \\beta_k \\, w_k(s), \\qquad \\beta \\ge 0

``w_k`` is the work of kind ``k`` that a setting leaves (operations in attention, in MLPs, in convolutions, number of
blocks), so the prediction never falls when work is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

Work = Mapping[str, float]


@dataclass(frozen=True)
class AdditiveCost:
    """A fitted model: milliseconds per unit of each kind of work, plus what is always there.

    ``max_rel_error`` is its largest relative error on the networks it was fitted to.
    """

    intercept_ms: float
    ms_per_work: Mapping[str, float]
    max_rel_error: float

    @classmethod
    def fit(cls, works: Sequence[Work], latencies_ms: Sequence[float]) -> AdditiveCost:
        """Non-negative least squares on relative errors (eq. K1).

        .. math:: \\min_{\\beta \\ge 0} \\sum_i \\Big(\\frac{\\hat c(s_i) - c_i}{c_i}\\Big)^2
        """
        if len(works) != len(latencies_ms) or not works:
            raise ValueError(f"need one latency per work, got {len(works)} works and {len(latencies_ms)} latencies")
        kinds = sorted(works[0])
        scale = np.array([max(work[kind] for work in works) or 1.0 for kind in kinds])
        latency_N = np.asarray(latencies_ms, dtype=np.float64)
        design = np.array([[1.0, *(work[kind] for kind in kinds)] for work in works])
        design[:, 1:] /= scale
        weights, _ = nnls(design / latency_N[:, None], np.ones(len(works)))
        error_N = np.abs(design @ weights / latency_N - 1.0)
        per_work = {kind: float(w / s) for kind, w, s in zip(kinds, weights[1:], scale, strict=True)}
        return cls(float(weights[0]), per_work, float(error_N.max()))

    def predict(self, work: Work) -> float:
        """Predicted latency in milliseconds."""
        return math.fsum([self.intercept_ms, *(price * work[kind] for kind, price in self.ms_per_work.items())])
