"""Which modules to switch on within a budget: exactly, relaxed, and rounded without ever exceeding it.

Shape letter: L modules, each with a value and a cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from apportion.numerics.highs import silenced

Array = NDArray[np.float64]
GAP = 1e-6  # of the value, at which the search for a better choice ends
_TOLERANCE = 1e-6  # of the room, that HiGHS allows itself
_MAX_CUTS = 5


@dataclass(frozen=True)
class Knapsack:
    r"""Modules to choose from (eq. D7; the paper's eq. 27 to 29).

    .. math:: \max_{x \in \{0, 1\}^L} \sum_\ell v_\ell x_\ell \quad \text{s.t.} \quad \sum_\ell c_\ell x_\ell \le W

    ``value_L`` is :math:`v`, ``cost_L`` is :math:`c`, ``room`` is :math:`W`, what the budget leaves above the frozen
    backbone.
    """

    value_L: Array
    cost_L: Array
    room: float

    def __post_init__(self) -> None:
        if len(self.value_L) != len(self.cost_L) or np.min(self.value_L) < 0 or np.min(self.cost_L) <= 0:
            raise ValueError("a knapsack takes as many values >= 0 as costs > 0")
        if not self.room > 0:
            raise ValueError(f"the budget leaves {self.room:g} above the backbone; it must leave something")

    def value(self, chosen_L: Array) -> float:
        return float(self.value_L @ chosen_L)

    def fits(self, chosen_L: Array) -> bool:
        return float(self.cost_L @ chosen_L) <= self.room

    def exact(self) -> Array:
        """The optimum within ``GAP``, by HiGHS; it fits, although the solver allows itself to exceed the room a little.

        A choice that does is cut off and it is solved again; after a few of them the room is taken that much smaller.
        """
        cuts: list[tuple[Array, float]] = []
        for attempt in range(_MAX_CUTS + 1):
            chosen_L = np.round(self._solve(1, cuts, 1.0 if attempt < _MAX_CUTS else 1.0 - 2 * _TOLERANCE))
            if self.fits(chosen_L):
                break
            cuts.append((chosen_L, chosen_L.sum() - 1))  # these do not fit together
        return chosen_L

    def relaxed(self) -> Array:
        """The optimum over shares in [0, 1]: an upper bound; a module that does not fit alone has none."""
        return self._solve(0, [], 1.0)

    def _solve(self, integrality: int, cuts: Sequence[tuple[Array, float]], share: float) -> Array:
        rows = [LinearConstraint(self.cost_L / self.room, ub=share)]
        rows += [LinearConstraint(row, ub=most) for row, most in cuts]
        with silenced():
            result = milp(
                -self.value_L,
                constraints=rows,
                bounds=Bounds(0.0, (self.cost_L <= self.room).astype(float)),
                integrality=integrality,
                options={"mip_rel_gap": GAP},
            )
        assert result.x is not None, result.message
        chosen_L: Array = np.clip(result.x, 0.0, 1.0)
        return chosen_L


def round_within(problem: Knapsack, share_L: Array) -> Array:
    """Whole modules in the order of their shares, then of value per cost, as long as each fits; or the best one alone.

    Never exceeds the room. From the relaxed optimum it reaches at least half of the exact value, because the optimum is
    at most the whole shares plus the one split module, and either of these alone is a candidate.
    """
    order = np.lexsort((-problem.value_L / problem.cost_L, -np.floor(share_L + 1e-9)))
    filled_L = np.zeros(len(share_L))
    for place in order:
        filled_L[place] = 1.0
        if not problem.fits(filled_L):
            filled_L[place] = 0.0
    single_L = np.zeros(len(share_L))
    fitting = np.where(problem.cost_L <= problem.room, problem.value_L, -1.0)
    if fitting.max() > problem.value(filled_L):
        single_L[int(fitting.argmax())] = 1.0
        return single_L
    return filled_L


def rounding_gap(problem: Knapsack) -> float:
    """The share of the exact value that relaxing and rounding loses."""
    best = problem.value(problem.exact())
    return 0.0 if best == 0 else 1 - problem.value(round_within(problem, problem.relaxed())) / best
