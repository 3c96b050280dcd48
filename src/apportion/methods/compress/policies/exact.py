"""Exact: the best setting that additive sensitivities know of, by integer programming; the oracle of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array, hstack

from apportion.core.policy import Proposal, State
from apportion.methods.compress.policies.problem import Choice, Problem, follow
from apportion.numerics.highs import silenced

MAX_NODES = 100_000  # a limit on nodes, not on time, so that a slow machine plans as a fast one does


@dataclass(frozen=True)
class Solution:
    """A choice with the loss and the excess predicted for it, and a proven lower bound on the loss of any other."""

    choice: Choice
    loss: float
    excess: float
    bound: float

    @property
    def gap(self) -> float:
        """How much less any choice within the limits could lose; zero is proven optimal, NaN where none is within."""
        return max(0.0, self.loss - self.bound) if self.excess == 0.0 else math.nan


@dataclass(frozen=True)
class Exact:
    """Chooses one value per knob with the least total loss within all limits (eq. M3), by HiGHS.

    Optimal where losses and costs add up over knobs; where they don't, the plan is solved again after every move from
    what was read. Reads every value of every knob once before it moves.
    """

    max_nodes: int = MAX_NODES

    def propose(self, state: State) -> Proposal | None:
        return follow(state, self._choose)

    def solve(self, problem: Problem) -> Solution | None:
        """The choice of least loss within the limits; where none is, the one of least excess; None if nothing saves.

        Staying is no answer: a run that is asked to go on is over its budget.
        """
        found = _least_loss(problem, self.max_nodes)
        if found is not None:
            return found
        found = _least_excess(problem, self.max_nodes)
        return found if found is not None and found.excess < problem.excess(problem.stay) else None

    def _choose(self, problem: Problem) -> Choice | None:
        solution = self.solve(problem)
        return None if solution is None else solution.choice


def _least_loss(problem: Problem, max_nodes: int) -> Solution | None:
    program = _Program(problem)
    loss = np.array([option.loss for options in problem.options for option in options])
    scale = float(np.abs(loss).max(initial=0.0)) or 1.0
    result = _milp(
        loss / scale,
        integrality=np.ones(program.num_options),
        bounds=Bounds(0.0, 1.0),
        constraints=[*program.one_each, LinearConstraint(program.costs, -np.inf, problem.room)],
        max_nodes=max_nodes,
    )
    if result.x is None:
        return None
    choice = program.choice(result.x)
    bound = -math.inf if result.mip_dual_bound is None else result.mip_dual_bound * scale
    return Solution(choice, problem.loss(choice), problem.excess(choice), bound)


def _least_excess(problem: Problem, max_nodes: int) -> Solution | None:
    """Minimises the excess L1 by giving every limit a slack that is paid for."""
    program = _Program(problem)
    num_limits = len(problem.room)
    one_each = [
        LinearConstraint(hstack([rule.A, csr_array((rule.A.shape[0], num_limits))]), rule.lb, rule.ub)
        for rule in program.one_each
    ]
    costs = hstack([program.costs, csr_array(-np.eye(num_limits))])
    result = _milp(
        np.r_[np.zeros(program.num_options), np.ones(num_limits)],
        integrality=np.r_[np.ones(program.num_options), np.zeros(num_limits)],
        bounds=Bounds(0.0, np.r_[np.ones(program.num_options), np.full(num_limits, np.inf)]),
        constraints=[*one_each, LinearConstraint(costs, -np.inf, problem.room)],
        max_nodes=max_nodes,
    )
    if result.x is None:
        return None
    choice = program.choice(result.x)
    return Solution(choice, problem.loss(choice), problem.excess(choice), math.nan)


def _milp(*arguments: Any, max_nodes: int, **named: Any) -> OptimizeResult:
    with silenced():
        return milp(*arguments, **named, options={"node_limit": max_nodes, "mip_rel_gap": 0.0})


class _Program:
    """The parts of a problem as matrices: one column per option, knob after knob."""

    def __init__(self, problem: Problem) -> None:
        sizes = [len(options) for options in problem.options]
        self.num_options = sum(sizes)
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.sizes = sizes
        knob_of = np.repeat(np.arange(len(sizes)), sizes)
        columns = np.arange(self.num_options)
        takes = csr_array((np.ones(self.num_options), (knob_of, columns)), shape=(len(sizes), self.num_options))
        stays = csr_array(
            (np.ones(len(sizes)), (np.zeros(len(sizes), dtype=int), self.starts)), shape=(1, self.num_options)
        )
        self.one_each = [
            LinearConstraint(takes, 1.0, 1.0),
            LinearConstraint(stays, -np.inf, len(sizes) - 1.0),  # at least one knob moves
        ]
        costs = [option.costs for options in problem.options for option in options]
        self.costs = csr_array(np.array(costs).reshape(self.num_options, len(problem.room)).T)

    def choice(self, taken: np.ndarray) -> Choice:
        return tuple(
            int(np.argmax(taken[start : start + size])) for start, size in zip(self.starts, self.sizes, strict=True)
        )
