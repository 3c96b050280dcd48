"""Stochastic primal-dual steps on a convex problem under constraints, and how far from optimal their average is.

A point is a mixture followed by levels: the first numbers lie on a simplex, the others in [0, 1]. Shape letters: D
numbers of a point, K constraints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from apportion.numerics.multipliers import Multipliers
from apportion.numerics.simplex import project_simplex

Array = NDArray[np.float64]


class Convex(Protocol):
    """An expected loss known by its gradients, and constraints ``g <= 0`` known by values and slopes."""

    num_weights: int
    """Leading numbers of a point that are a mixture."""
    num_levels: int
    """Numbers after them, each in [0, 1]."""

    def gradient(self, point_D: Array) -> Array:
        """Of the expected loss."""
        ...

    def sampled_gradient(self, point_D: Array, rng: np.random.Generator) -> Array:
        """An unbiased draw of it."""
        ...

    def constraints(self, point_D: Array) -> Array:
        """Shape ``(K,)``; feasible where none is positive."""
        ...

    def slopes(self, point_D: Array) -> Array:
        """Of the constraints, shape ``(K, D)``."""
        ...


@dataclass(frozen=True)
class Residuals:
    """How far a point and its multipliers are from the conditions of Karush, Kuhn and Tucker (eq. D3)."""

    stationarity: float
    feasibility: float
    complementarity: float

    @property
    def worst(self) -> float:
        """The least epsilon at which the point is epsilon-KKT."""
        return max(self.stationarity, self.feasibility, self.complementarity)


@dataclass(frozen=True)
class Found:
    """The average of all iterates and of their multipliers, and the residuals there."""

    point_D: Array
    multiplier_K: Array
    residuals: Residuals


def project(point_D: Array, num_weights: int) -> Array:
    """The nearest point with a mixture in front and levels in [0, 1] behind."""
    mixture = project_simplex(torch.from_numpy(point_D[:num_weights])).numpy()
    return np.concatenate([mixture, np.clip(point_D[num_weights:], 0.0, 1.0)])


def kkt(problem: Convex, point_D: Array, multiplier_K: Array) -> Residuals:
    r"""Residuals of the optimality conditions (eq. D3; below the paper's eq. 24).

    .. math:: \|x - \Pi(x - \nabla_x L(x, \lambda))\|_2, \qquad \max_k g_k(x)_+, \qquad \max_k \lambda_k |g_k(x)|
    """
    value_K = problem.constraints(point_D)
    slope_D = problem.gradient(point_D) + multiplier_K @ problem.slopes(point_D)
    moved_D = point_D - project(point_D - slope_D, problem.num_weights)
    return Residuals(
        stationarity=float(np.linalg.norm(moved_D)),
        feasibility=float(np.maximum(value_K, 0.0).max(initial=0.0)),
        complementarity=float(np.abs(multiplier_K * value_K).max(initial=0.0)),
    )


def primal_dual(
    problem: Convex,
    num_steps: int,
    rng: np.random.Generator,
    *,
    step: float = 1.0,
    multipliers: Multipliers | None = None,
) -> Found:
    r"""Descent on sampled gradients, ascent on the constraints, and the average of the iterates (eq. D2; eq. 25).

    .. math:: x_{t+1} = \Pi(x_t - \eta\,\hat\nabla_x L(x_t, \lambda_t)), \qquad
        \lambda_{t+1} = [\lambda_t + \eta\, g(x_t)]_+, \qquad \eta = c / \sqrt T

    ``step`` is :math:`c`, ``num_steps`` is :math:`T`. ``multipliers`` replaces the plain ascent. Starts from the
    uniform mixture and half levels.
    """
    if num_steps < 1:
        raise ValueError(f"an average needs at least one step, asked for {num_steps}")
    rate = step / math.sqrt(num_steps)
    point_D = np.concatenate([np.full(problem.num_weights, 1 / problem.num_weights), np.full(problem.num_levels, 0.5)])
    prices = multipliers or Multipliers(problem.constraints(point_D).shape, rate, math.inf)
    total_D, total_K = np.zeros_like(point_D), np.zeros_like(prices.values)
    for _ in range(num_steps):
        multiplier_K = prices.values
        total_D += point_D
        total_K += multiplier_K
        slope_D = problem.sampled_gradient(point_D, rng) + multiplier_K @ problem.slopes(point_D)
        prices.update(problem.constraints(point_D))
        point_D = project(point_D - rate * slope_D, problem.num_weights)
    mean_D, mean_K = total_D / num_steps, total_K / num_steps
    return Found(mean_D, mean_K, kkt(problem, mean_D, mean_K))
