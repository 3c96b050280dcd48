"""The convex surrogate of adapt: frozen features, linear in mixture and levels, with answers known exactly.

Shape letters: T tasks, N queries of a task, M experts, L modules, D = M + L numbers of a point, J hinges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.errors import InfeasibleError
from apportion.numerics.convex import minimise, modeller

Array = NDArray[np.float64]


@dataclass(frozen=True)
class HingeCost:
    r"""What the level of a module costs: convex, non-decreasing, 0 at 0 (eq. D4; the paper's eq. 19).

    .. math:: \hat c(s) = \sum_j d_j\, \varphi_w(s - k_j), \qquad
        \varphi_w(x) = \begin{cases} 0 & x \le 0 \\ x^2 / 2w & x \le w \\ x - w/2 & x > w \end{cases}

    ``begins`` are :math:`k_j \ge 0`, ``rises`` are :math:`d_j \ge 0`, ``width`` is :math:`w`: 0 gives straight pieces,
    more rounds every kink off.
    """

    begins: tuple[float, ...]
    rises: tuple[float, ...]
    width: float = 0.0

    def __call__(self, level: float) -> float:
        over_J = np.maximum(level - np.asarray(self.begins), 0.0)
        if self.width == 0:
            return float(np.asarray(self.rises) @ over_J)
        bent_J = np.minimum(over_J, self.width) ** 2 / (2 * self.width)
        return float(np.asarray(self.rises) @ (bent_J + np.maximum(over_J - self.width, 0.0)))

    def slope(self, level: float) -> float:
        """Its derivative; at a kink the one to the right."""
        over_J = level - np.asarray(self.begins)
        share_J = (over_J >= 0).astype(float) if self.width == 0 else np.clip(over_J / self.width, 0.0, 1.0)
        return float(np.asarray(self.rises) @ share_J)

    def expression(self, level: Any) -> Any:
        """The same for the convex solver."""
        cp = modeller()
        over_J = [cp.pos(level - begin) for begin in self.begins]
        bent_J = over_J if self.width == 0 else [cp.huber(over, self.width) / (2 * self.width) for over in over_J]
        return sum(rise * bent for rise, bent in zip(self.rises, bent_J, strict=True))


@dataclass(frozen=True)
class Exact:
    """A point that the convex solver found, its loss and latency, and the prices of the modules and of the budget."""

    point_D: Array
    loss: float
    latency: float
    price_L: Array
    price: float


@dataclass(frozen=True)
class Surrogate:
    r"""Mean squared query loss of a linearised model under capacities and a latency budget (eq. D5; eq. 22 to 24).

    .. math:: \min_{\alpha \in \Delta, s \in [0,1]^L} \frac1T \sum_T \frac1{2N} \|y_T - A_T (\alpha, s)\|^2
        \quad \text{s.t.} \quad s_\ell \le b_\ell, \quad
        \widehat{\mathrm{Lat}}(s) = c_0 + \sum_\ell \hat c_\ell(s_\ell) \le B

    ``feature_TND`` is :math:`A`, ``target_TN`` is :math:`y`, ``capacity_L`` is :math:`b`, ``base`` is :math:`c_0`.
    """

    feature_TND: Array
    target_TN: Array
    costs: tuple[HingeCost, ...]
    capacity_L: Array
    base: float
    budget: float

    @property
    def num_levels(self) -> int:
        return len(self.costs)

    @property
    def num_weights(self) -> int:
        return int(self.feature_TND.shape[2]) - len(self.costs)

    def loss(self, point_D: Array) -> float:
        return float(0.5 * np.mean((self.feature_TND @ point_D - self.target_TN) ** 2))

    def latency(self, point_D: Array) -> float:
        levels = point_D[self.num_weights :].tolist()
        return self.base + sum(cost(level) for cost, level in zip(self.costs, levels, strict=True))

    def gradient(self, point_D: Array) -> Array:
        error_TN = self.feature_TND @ point_D - self.target_TN
        slope_D: Array = np.einsum("tn,tnd->d", error_TN, self.feature_TND) / error_TN.size
        return slope_D

    def sampled_gradient(self, point_D: Array, rng: np.random.Generator) -> Array:
        """Of one task drawn at random."""
        task = int(rng.integers(len(self.target_TN)))
        feature_ND = self.feature_TND[task]
        slope_D: Array = (feature_ND @ point_D - self.target_TN[task]) @ feature_ND / len(feature_ND)
        return slope_D

    def constraints(self, point_D: Array) -> Array:
        return np.append(point_D[self.num_weights :] - self.capacity_L, self.latency(point_D) - self.budget)

    def slopes(self, point_D: Array) -> Array:
        num_weights, num_levels = self.num_weights, self.num_levels
        slope_KD = np.zeros((num_levels + 1, num_weights + num_levels))
        slope_KD[:num_levels, num_weights:] = np.eye(num_levels)
        levels = point_D[num_weights:].tolist()
        slope_KD[-1, num_weights:] = [cost.slope(level) for cost, level in zip(self.costs, levels, strict=True)]
        return slope_KD

    def solve(self, price: float | None = None) -> Exact:
        """The optimum under the budget, or that of loss plus ``price`` times latency without one (eq. D6)."""
        cp = modeller()
        mixture, level = cp.Variable(self.num_weights), cp.Variable(self.num_levels)
        num_tasks, num_queries, size = self.feature_TND.shape
        rows = np.column_stack([self.feature_TND.reshape(-1, size), self.target_TN.reshape(-1)])
        root = np.linalg.qr(rows).R  # the same loss on far fewer rows
        error = root[:, :size] @ cp.hstack([mixture, level]) - root[:, size]
        loss = cp.sum_squares(error) / (2 * num_tasks * num_queries)
        latency = self.base + sum(cost.expression(level[place]) for place, cost in enumerate(self.costs))
        capacity, limit = level <= self.capacity_L, latency <= self.budget
        rules = [mixture >= 0, cp.sum(mixture) == 1, level >= 0, level <= 1, capacity]
        status = minimise(loss, [*rules, limit]) if price is None else minimise(loss + price * latency, rules)
        if mixture.value is None:
            raise InfeasibleError(
                f"the budget is {self.budget:g}, but the frozen backbone alone costs {self.base:g} ({status}); "
                "raise the budget"
            )
        point_D = np.concatenate([mixture.value, level.value])
        paid = float(limit.dual_value) if price is None else price
        return Exact(point_D, self.loss(point_D), self.latency(point_D), np.asarray(capacity.dual_value), paid)

    def trace(self, prices: Sequence[float]) -> list[Exact]:
        """Supported points of the frontier of loss and latency, one for each price of latency (eq. D6)."""
        return [self.solve(price) for price in prices]


def random_surrogate(
    rng: np.random.Generator, *, num_weights: int = 3, num_levels: int = 6, num_tasks: int = 64, width: float = 0.0
) -> Surrogate:
    """An instance whose budget binds: modules help and cost unequally, and tasks differ."""
    size, num_queries = num_weights + num_levels, 8
    worth_D = np.concatenate([np.ones(num_weights), rng.uniform(0.3, 1.5, num_levels)])
    feature_TND = rng.normal(size=(num_tasks, num_queries, size)) * worth_D
    ideal_D = np.concatenate([rng.dirichlet(np.ones(num_weights)), np.ones(num_levels)])
    target_TN = feature_TND @ ideal_D + 0.5 * rng.normal(size=(num_tasks, num_queries))
    costs = tuple(
        HingeCost((0.0, 0.25, 0.5, 0.75), tuple(rng.uniform(0.2, 1.0, 4).tolist()), width) for _ in range(num_levels)
    )
    full = sum(cost(1.0) for cost in costs)
    capacity_L = rng.uniform(0.6, 1.0, num_levels)
    return Surrogate(feature_TND, target_TN, costs, capacity_L, base=1.0, budget=1.0 + 0.3 * full)


@dataclass(frozen=True)
class Separation:
    r"""Modules with separable losses where one level for all is strictly worse (eq. D8; the paper's eq. 26).

    .. math:: \min_{s \in [0, 1]^L} \sum_\ell a_\ell (1 - s_\ell)^2
        \quad \text{s.t.} \quad \sum_\ell c_\ell s_\ell \le B

    ``worth`` is :math:`a`, ``cost`` is :math:`c`. With :math:`D = \sum c - B` and no level at 0 the optimum is
    :math:`D^2 / \sum (c^2 / a)`, one level for all gives :math:`D^2 \sum a / (\sum c)^2`, and the two are equal only
    where :math:`a_\ell / c_\ell` is the same for all.
    """

    worth: tuple[float, ...]
    cost: tuple[float, ...]
    budget: float

    def loss(self, level_L: Array) -> float:
        return float(np.asarray(self.worth) @ (1 - level_L) ** 2)

    def per_module(self) -> Array:
        """The best levels in closed form; modules whose level would be negative get none, others share the budget."""
        worth_L, cost_L = np.asarray(self.worth), np.asarray(self.cost)
        used_L = np.ones(len(worth_L), dtype=bool)
        while True:
            missing = max(0.0, float(cost_L[used_L].sum()) - self.budget)
            ratio_L = cost_L / worth_L
            short_L = missing * ratio_L / float((cost_L * ratio_L)[used_L].sum())
            level_L = np.where(used_L, 1 - short_L, 0.0)
            if level_L.min() >= 0:
                return level_L
            used_L &= level_L > 0

    def one_level(self) -> Array:
        """The best level that all modules share."""
        return np.full(len(self.cost), min(1.0, self.budget / sum(self.cost)))

    def gap(self) -> float:
        """What one level for all loses."""
        return self.loss(self.one_level()) - self.loss(self.per_module())

    def surrogate(self) -> Surrogate:
        """The same problem for the general solvers: one expert that does nothing, one query per module."""
        num_levels = len(self.worth)
        feature_TND = np.zeros((1, num_levels, 1 + num_levels))
        feature_TND[0, :, 1:] = np.diag(np.sqrt(2 * num_levels * np.asarray(self.worth)))
        costs = tuple(HingeCost((0.0,), (cost,)) for cost in self.cost)
        return Surrogate(feature_TND, feature_TND.sum(-1), costs, np.ones(num_levels), base=0.0, budget=self.budget)
