r"""What a composition costs to serve, and how it is kept within a budget (eq. C17; the paper's § 9).

.. math:: \sum_\ell c^{mix}_\ell \|w_\ell\|_0 + c^{res}_\ell 1\{\Delta_\ell \ne 0\}

Shape letters: L blocks, S sources, D parameters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from apportion.errors import InfeasibleError
from apportion.methods.compose.checkpoint import blocks
from apportion.methods.compose.losses import Loss
from apportion.methods.compose.oracle import OracleConfig, Solution, mix, refit
from apportion.methods.compose.source import Source


@dataclass(frozen=True)
class Prices:
    """Cost of every source that a block mixes, and of a residual on it."""

    mix_L: Tensor
    residual_L: Tensor

    def cost(self, weight_LS: Tensor, delta_D: Tensor, block_D: Tensor) -> float:
        """Eq. C17; a single weight vector serves every block."""
        return self.cost_of(weight_LS, edited(delta_D, block_D, len(self.mix_L)).nonzero()[:, 0].tolist())

    def cost_of(self, weight_LS: Tensor, edited_rows: Sequence[int]) -> float:
        """Eq. C17 where the blocks with a residual are given."""
        active_L = (weight_LS > 0).sum(-1).expand(len(self.mix_L))
        return float((self.mix_L * active_L).sum() + self.residual_L[list(edited_rows)].sum())

    def floor(self) -> float:
        """One source in every block and no residual: nothing is cheaper."""
        return float(self.mix_L.sum())

    def refuse_below_floor(self, budget: float) -> None:
        if not budget >= self.floor():
            raise InfeasibleError(
                f"the budget {budget:g} is below {self.floor():g}, what one source per block and no residual cost; "
                "raise it"
            )


def edited(delta_D: Tensor, block_D: Tensor, num_blocks: int) -> Tensor:
    """Whether each block's residual is not zero."""
    return torch.zeros(num_blocks, dtype=torch.bool).index_put_((block_D[delta_D != 0],), torch.tensor(True))


def within(
    loss: Loss, source_SD: Tensor, solution: Solution, prices: Prices, budget: float, config: OracleConfig
) -> Solution:
    """Projects a solution into a budget, and fits again what is left (eq. C18).

    Two ways are tried and the better is kept: dropping from the solution what loses least per cost saved, until it
    fits; and growing from one source what gains most, while it fits. Both are greedy; the exact choice is NP-hard.

    Raises:
        InfeasibleError: even one source per block without residual costs more.
    """
    prices.refuse_below_floor(budget)
    block_D = _blocks(source_SD, config, prices)
    grown = _grown(loss, source_SD, solution, prices, budget, config, block_D)
    while prices.cost(solution.weight_LS, solution.delta_D, block_D) > budget:
        drop = _cheapest_drop(loss, source_SD, solution, prices, config, block_D)
        assert drop is not None  # the floor fits, so something can still be dropped
        solution = drop[0]
    dropped = refit(loss, source_SD, solution, config)
    return min(dropped, grown, key=lambda found: found.value)


def priced(
    loss: Loss, source_SD: Tensor, solution: Solution, prices: Prices, budget: float, config: OracleConfig
) -> tuple[Solution, float]:
    r"""Fits loss plus multiplier times cost, with the least multiplier at which the budget holds (eq. C19).

    For a multiplier :math:`\lambda` the cheapest thing is dropped as long as that loses at most :math:`\lambda` per
    cost saved. The order of drops does not depend on :math:`\lambda`, so one pass finds the least that will do.
    Returns the solution and its multiplier.
    """
    prices.refuse_below_floor(budget)
    block_D = _blocks(source_SD, config, prices)
    current, multiplier = solution, 0.0
    while True:
        fits = prices.cost(current.weight_LS, current.delta_D, block_D) <= budget
        drop = _cheapest_drop(loss, source_SD, current, prices, config, block_D)
        if fits and (drop is None or drop[1] > multiplier):
            return refit(loss, source_SD, current, config), multiplier
        assert drop is not None  # the floor fits, so something can still be dropped
        current, multiplier = drop[0], max(multiplier, drop[1])


def _blocks(source_SD: Tensor, config: OracleConfig, prices: Prices) -> Tensor:
    if config.mix_block_D is not None:
        return config.mix_block_D
    if config.block_D is not None and int(config.block_D.max()) + 1 == len(prices.mix_L):
        return config.block_D
    return torch.zeros(source_SD.shape[1], dtype=torch.long)


def _grown(
    loss: Loss,
    source_SD: Tensor,
    solution: Solution,
    prices: Prices,
    budget: float,
    config: OracleConfig,
    block_D: Tensor,
) -> Solution:
    """One source in every block, and then whatever sources and edits of the solution gain most while they fit."""
    num_rows = len(solution.weight_LS)
    zero_D = torch.zeros_like(solution.delta_D)

    def fitted(weight_LS: Tensor, delta_D: Tensor) -> Solution:
        value = loss.evaluate(mix(weight_LS, source_SD, config.mix_block_D) + delta_D)[0]
        return refit(loss, source_SD, Solution(weight_LS, delta_D, value, 0.0, (value,)), config)

    vertices = torch.eye(len(source_SD), dtype=source_SD.dtype)
    current = min((fitted(v.expand(num_rows, -1).clone(), zero_D) for v in vertices), key=lambda found: found.value)
    while True:
        trials = []
        for row in range(num_rows):
            for place in (current.weight_LS[row] == 0).nonzero()[:, 0].tolist():
                weight_LS = current.weight_LS.clone()
                weight_LS[row] *= 0.9
                weight_LS[row, place] = 0.1
                trials.append((weight_LS, current.delta_D))
        now = edited(current.delta_D, block_D, len(prices.mix_L))
        for block in edited(solution.delta_D, block_D, len(prices.mix_L)).nonzero()[:, 0].tolist():
            if not now[block]:
                more_D = torch.where(block_D == block, solution.delta_D, current.delta_D)
                trials.append((current.weight_LS, more_D))
        fitting = [fitted(w, d) for w, d in trials if prices.cost(w, d, block_D) <= budget]
        best = min(fitting, key=lambda found: found.value, default=current)
        if best.value >= current.value - config.tolerance:
            return current
        current = best


def _cheapest_drop(
    loss: Loss, source_SD: Tensor, solution: Solution, prices: Prices, config: OracleConfig, block_D: Tensor
) -> tuple[Solution, float] | None:
    """The removal of a source from a block, or of a block's residual, that loses least per cost saved."""
    num_blocks = len(prices.mix_L)
    options: list[tuple[Tensor, Tensor, float]] = []
    shared = len(solution.weight_LS) == 1
    for row, weight_S in enumerate(solution.weight_LS):
        saved = float(prices.mix_L.sum()) if shared else float(prices.mix_L[row])
        for place in weight_S.nonzero()[:, 0].tolist():
            if int((weight_S > 0).sum()) > 1:
                weight_LS = solution.weight_LS.clone()
                weight_LS[row, place] = 0
                weight_LS[row] /= weight_LS[row].sum()
                options.append((weight_LS, solution.delta_D, saved))
    for block in edited(solution.delta_D, block_D, num_blocks).nonzero()[:, 0].tolist():
        delta_D = solution.delta_D.masked_fill(block_D == block, 0.0)
        options.append((solution.weight_LS, delta_D, float(prices.residual_L[block])))
    best: tuple[Solution, float] | None = None
    for weight_LS, delta_D, saved in options:
        value = loss.evaluate(mix(weight_LS, source_SD, config.mix_block_D) + delta_D)[0]
        trial = refit(loss, source_SD, replace(solution, weight_LS=weight_LS, delta_D=delta_D, value=value), config)
        rate = (trial.value - solution.value) / max(saved, 1e-300)
        if best is None or rate < best[1]:
            best = (trial, rate)
    return best


def measure_prices(sources: Sequence[Source], groups: Mapping[str, Sequence[str]], *, repeats: int = 3) -> Prices:
    """Measures both costs on this machine, in milliseconds: reading and adding one more source, adding a residual."""
    mix_ms, residual_ms = [], []
    for names in groups.values():
        samples: dict[str, list[float]] = {"mix": [], "residual": []}
        for turn in range(repeats):
            source = sources[turn % len(sources)]
            spent = {"mix": 0.0, "residual": 0.0}
            for name in names:
                for start, stop in blocks(source.tensors[name].size):
                    sum_N = np.zeros(stop - start, np.float32)
                    residual_N = np.ones(stop - start, np.float32)
                    began = time.perf_counter()
                    sum_N += source.read(name, start, stop) * np.float32(0.5)
                    middle = time.perf_counter()
                    sum_N += residual_N
                    spent["mix"] += middle - began
                    spent["residual"] += time.perf_counter() - middle
            for kind, seconds in spent.items():
                samples[kind].append(1000 * seconds)
        mix_ms.append(statistics.median(samples["mix"]))
        residual_ms.append(statistics.median(samples["residual"]))
    return Prices(torch.tensor(mix_ms, dtype=torch.float64), torch.tensor(residual_ms, dtype=torch.float64))
