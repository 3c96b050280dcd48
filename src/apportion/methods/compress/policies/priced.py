"""Priced: every limit gets a price, every knob takes the value that is cheapest at those prices.

Shape letters: O options of all knobs, K knobs, L limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack

from apportion.core.budget import Budget
from apportion.core.policy import Proposal, State
from apportion.methods.compress.policies.problem import ROUNDING, Choice, Problem, follow

TIE = 1e-7  # prices come from a solver with this tolerance, so values this close at them are equally good


@dataclass(frozen=True)
class Prices:
    """The multiplier of every limit, per share of that limit, and the loss that no choice can undercut (eq. M4)."""

    keys: tuple[str, ...]
    per_share: tuple[float, ...]
    dual: float

    def worth(self, budget: Budget) -> dict[str, float]:
        """Quality that one more unit of each limit would buy back, in the unit of its readings."""
        return {
            limit.key: price / limit.value
            for limit in budget.limits
            for key, price in zip(self.keys, self.per_share, strict=True)
            if key == limit.key
        }


@dataclass(frozen=True)
class Priced:
    """Primal-dual: prices that maximise the dual, the best value of every knob at them, then repair and refill.

    Each knob ends on the lower convex hull of its loss over cost, except for the few that are moved to use up what is
    left of the limits. Reads what Exact reads, and plans in a fraction of its time.
    """

    def propose(self, state: State) -> Proposal | None:
        return follow(state, self.solve)

    def solve(self, problem: Problem) -> Choice | None:
        """A choice within the limits where it finds one, else one of less excess; None if nothing saves."""
        prices = shadow_prices(problem)
        descent = _Descent(problem, problem.stay if prices is None else _cheapest_at(problem, prices))
        descent.repair()
        descent.refill()
        choice = descent.choice
        return choice if choice != problem.stay and problem.excess(choice) <= problem.excess(problem.stay) else None


def shadow_prices(problem: Problem) -> Prices | None:
    r"""Prices that maximise the Lagrangian dual (eq. M4); None where no mix of values meets the limits.

    .. math:: g(\lambda) = \sum_k \min_v \Bigl( \ell_{kv} + \sum_i \lambda_i c_{ikv} \Bigr) - \sum_i \lambda_i r_i,
              \qquad \lambda \ge 0

    :math:`g` is concave and piecewise linear, so its maximum is a linear program in :math:`\lambda` and the minima
    :math:`\mu_k`; its value is a lower bound on the loss of every choice within the limits (weak duality).
    """
    options = [option for of_knob in problem.options for option in of_knob]
    num_knobs, num_limits = len(problem.options), len(problem.room)
    loss = np.array([option.loss for option in options])
    scale = float(np.abs(loss).max(initial=0.0)) or 1.0
    knob_of = np.repeat(np.arange(num_knobs), [len(of_knob) for of_knob in problem.options])
    takes = csr_array((np.ones(len(options)), (np.arange(len(options)), knob_of)), shape=(len(options), num_knobs))
    costs = csr_array(-np.array([option.costs for option in options]).reshape(len(options), num_limits))
    result = linprog(
        np.r_[-np.ones(num_knobs), problem.room],
        A_ub=hstack([takes, costs]),
        b_ub=loss / scale,
        bounds=[(None, None)] * num_knobs + [(0.0, None)] * num_limits,
        method="highs",
    )
    if result.x is None:
        return None
    per_share = tuple(max(0.0, float(price)) * scale for price in result.x[num_knobs:])
    return Prices(problem.keys, per_share, dual_value(problem, per_share))


def dual_value(problem: Problem, per_share: tuple[float, ...]) -> float:
    """The Lagrangian dual at any prices (eq. M4): never above the loss of a choice within the limits."""
    least = (min(_priced(option.loss, option.costs, per_share) for option in options) for options in problem.options)
    return math.fsum((*least, *(-price * room for price, room in zip(per_share, problem.room, strict=True))))


def _priced(loss: float, costs: tuple[float, ...], per_share: tuple[float, ...]) -> float:
    return math.fsum((loss, *(price * cost for price, cost in zip(per_share, costs, strict=True))))


def _cheapest_at(problem: Problem, prices: Prices) -> Choice:
    """Each knob's best value at the prices; of values that are equally good, the one that costs least."""
    scale = max((abs(option.loss) for options in problem.options for option in options), default=0.0)
    choice = []
    for options in problem.options:
        priced = [_priced(option.loss, option.costs, prices.per_share) for option in options]
        good = [number for number, value in enumerate(priced) if value <= min(priced) + TIE * scale]
        choice.append(min(good, key=lambda number: sum(options[number].costs)))
    return tuple(choice)


class _Descent:
    """Changes one knob at a time, weighing all values of all knobs at once: one row per option, knob after knob."""

    def __init__(self, problem: Problem, choice: Choice) -> None:
        options = [option for of_knob in problem.options for option in of_knob]
        sizes = [len(of_knob) for of_knob in problem.options]
        self.loss_O = np.array([option.loss for option in options])
        self.cost_OL = np.array([option.costs for option in options]).reshape(len(options), len(problem.room))
        self.room_L = np.array(problem.room)
        self.knob_O = np.repeat(np.arange(len(sizes)), sizes)
        self.start_K = np.cumsum([0, *sizes[:-1]])
        self.taken_K = self.start_K + np.array(choice, dtype=int)

    @property
    def choice(self) -> Choice:
        return tuple(int(taken) for taken in self.taken_K - self.start_K)

    def repair(self) -> None:
        """While over a limit: the change that adds least loss per excess saved."""
        while True:
            lost_O, excess_O, excess = self._weigh()
            saved_O = excess - excess_O
            if excess == 0.0 or not (saved_O > ROUNDING).any():
                return
            ratio_O = np.divide(lost_O, saved_O, out=np.full(len(lost_O), np.inf), where=saved_O > ROUNDING)
            self._take(int(np.argmin(ratio_O)))

    def refill(self) -> None:
        """While within the limits: the change that wins back most quality and stays within them."""
        while True:
            lost_O, excess_O, excess = self._weigh()
            lost_O[excess_O > 0.0] = np.inf
            best = int(np.argmin(lost_O))
            if excess > 0.0 or not lost_O[best] < -TIE * np.abs(self.loss_O).max():
                return
            self._take(best)

    def _weigh(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Loss added and excess left by every change of one knob, and the excess now."""
        now_L = self.cost_OL[self.taken_K].sum(axis=0) - self.room_L
        instead_O = self.taken_K[self.knob_O]
        over_OL = now_L + self.cost_OL - self.cost_OL[instead_O]
        return self.loss_O - self.loss_O[instead_O], _excess(over_OL), float(_excess(now_L))

    def _take(self, option: int) -> None:
        self.taken_K[self.knob_O[option]] = option


def _excess(over_L: np.ndarray) -> np.ndarray:
    return np.asarray(np.where(over_L > ROUNDING, over_L, 0.0).sum(axis=-1))
