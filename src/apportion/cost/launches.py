"""The floor of launches: where little work is left in each part, the clock counts parts and not their work.

Shape letters: ``N`` samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apportion.cost.fit import Design, FitOptions, fit_law
from apportion.cost.law import AdditiveLaw
from apportion.cost.sample import CostError, Sample, Shares, number
from apportion.numerics.convex import minimise, modeller

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.float64]
STARTS = (0.25, 0.5, 0.75)  # shares of the samples, the quickest ones, first taken to be bound by launches
MAX_ROUNDS = 8
MIN_BOUND = 3  # samples: a line takes two, and one to spare


@dataclass(frozen=True)
class Launches:
    r"""The least that the clock shows while every part that is there has to be launched (eq. K28).

    .. math:: f(s) = f_0 + f_1 \sum_p \mathbb 1\{s_p > 0\}, \qquad f_0, f_1 \ge 0

    ``always_ms`` is :math:`f_0`, ``each_ms`` is :math:`f_1`. A cost model is the larger of this and of its law: while
    the floor holds, narrower parts save nothing, and only parts that go do. It never falls when work is added.

    Example:
        >>> Launches(1.0, 0.5)({"a": 0.1, "b": 1.0, "c": 0.0})
        2.0
    """

    always_ms: float
    each_ms: float

    def __post_init__(self) -> None:
        values = (self.always_ms, self.each_ms)
        if not all(math.isfinite(value) and value >= 0.0 for value in values):
            raise CostError(f"a floor of launches is {values!r} ms; both must be finite and at least 0, fit it again")

    def __call__(self, shares: Shares) -> float:
        """The floor in milliseconds."""
        return self.always_ms + self.each_ms * num_there(shares)

    def tensor(self, share_P: Tensor, ramp: float = 0.0) -> Tensor:
        """The floor of shares of shape ``(..., P)``; with ``ramp`` above zero parts count as a curve's jump does."""
        there = (share_P > 0).to(share_P.dtype) if ramp <= 0.0 else (share_P / ramp).clamp(max=1.0)
        return self.always_ms + self.each_ms * there.sum(-1)

    def scaled(self, factor: float) -> Launches:
        return Launches(factor * self.always_ms, factor * self.each_ms)

    def to_json(self) -> dict[str, Any]:
        return {"always_ms": self.always_ms, "each_ms": self.each_ms}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Launches:
        return cls(number(fields["always_ms"], "always_ms"), number(fields["each_ms"], "each_ms"))


def num_there(shares: Shares) -> int:
    """How many parts still run."""
    return sum(share > 0.0 for share in shares.values())


def fit_launches(
    samples: Sequence[Sample], signature_of: Mapping[str, str], options: FitOptions
) -> tuple[AdditiveLaw, Launches | None]:
    r"""A law and a floor whose larger one is near the samples (eq. K29); no floor unless asked for, or of no use.

    .. math:: \min_{c, f} \sum_i \big(\max(c(s_i), f(s_i)) / y_i - 1\big)^2

    Errors are relative ones, whatever noise is stated: what is bound by launches runs at the speed of the process that
    launches, which moves all of it together and tells no sample from another.

    The program is not convex, but it is once every sample says which of the two has to reach it from below: neither may
    lie above. Samples then go to the larger of the two and the program is solved again, which never raises the misfit,
    until none moves. First the quickest samples are taken to be bound by launches; of several starts the best counts.
    """
    if not options.launches:
        return fit_law(samples, signature_of, options), None
    samples = [replace(sample, stderr_ms=0.0) for sample in samples]
    design = Design.of(samples, signature_of, options)
    count_N = np.array([num_there(sample.shares) for sample in samples], dtype=np.float64)
    law = fit_law(samples, signature_of, options)
    best: tuple[AdditiveLaw, Launches | None] = (law, None)
    law_N = np.array([law.predict(sample.shares) for sample in samples])
    least = float(np.sum((design.weight_N * (law_N - design.latency_N)) ** 2))
    for start in STARTS:
        bound_N = design.latency_N <= np.quantile(design.latency_N, start)
        for _ in range(MAX_ROUNDS):
            if bound_N.sum() < MIN_BOUND or bound_N.all():
                break
            x_C, launches = _solve_larger(design, count_N, bound_N, options.ridge)
            law_N, floor_N = design.moved_NC @ x_C, launches.always_ms + launches.each_ms * count_N
            misfit = float(np.sum((design.weight_N * (np.maximum(law_N, floor_N) - design.latency_N)) ** 2))
            if misfit < least:
                least, best = misfit, (design.law(x_C), launches)
            again_N = floor_N > law_N
            if (again_N == bound_N).all():
                break
            bound_N = again_N
    return best


def _solve_larger(design: Design, count_N: Array, bound_N: NDArray[np.bool_], ridge: float) -> tuple[Array, Launches]:
    """The convex program: the larger of law and floor must not lie above, and each not below its own samples."""
    cp = modeller()
    middle = float(np.median(design.latency_N))
    rows_NC = np.hstack([design.moved_NC, np.ones((len(count_N), 1)), count_N[:, None] * bool(np.ptp(count_N) > 0.0)])
    size_C = np.where((peak_C := rows_NC.max(0)) > 0.0, peak_C, 1.0)
    scaled_NC = rows_NC / size_C * (design.weight_N * middle)[:, None]
    goal_N = design.weight_N * design.latency_N
    x_C = cp.Variable(rows_NC.shape[1], nonneg=True)
    law_N, floor_N = scaled_NC[:, :-2] @ x_C[:-2], scaled_NC[:, -2:] @ x_C[-2:]
    own_N = cp.multiply(~bound_N, law_N) + cp.multiply(bound_N, floor_N)
    other_N = cp.multiply(bound_N, law_N) + cp.multiply(~bound_N, floor_N)
    misfit = cp.sum_squares(cp.maximum(cp.abs(own_N - goal_N), other_N - goal_N))
    status = minimise(misfit + ridge * cp.sum_squares(x_C[1:-2]), [], tolerance=1e-10)
    if x_C.value is None:
        raise CostError(f"the fit of a floor to {len(count_N)} samples ended {status}; check them for extreme values")
    found_C = np.maximum(np.asarray(x_C.value, dtype=np.float64), 0.0) * middle / size_C
    return found_C[:-2], Launches(float(found_C[-2]), float(found_C[-1]))
