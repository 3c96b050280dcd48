r"""The oracle: weights over the sources and a sparse residual that fit one support set, within a budget (eq. C4).

.. math:: \min_{w \in \Delta_S,\; \|\Delta\|_0 \le k} \hat\ell\Big(\sum_s w_s \theta^{(s)} + \Delta\Big)

Frank-Wolfe finds the weights for a fixed residual, a sparse update finds the residual for fixed weights, in turns until
nothing is gained. Exact for the weights (the gap certifies it), a heuristic for the residual, whose exact form is
NP-hard. Shape letters: S sources, D parameters, L blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from apportion.errors import KnobError
from apportion.methods.compose.losses import Loss, Objective
from apportion.numerics.frank_wolfe import Variant, frank_wolfe
from apportion.numerics.hard_concrete import open_probability, sample_gates
from apportion.numerics.thresholding import (
    block_norms,
    group_lasso,
    iterative_hard_thresholding,
    largest_penalty,
    support,
)

Residual: TypeAlias = Literal["none", "iht", "group-lasso", "hard-concrete"]
RESIDUALS: tuple[Residual, ...] = ("none", "iht", "group-lasso", "hard-concrete")


@dataclass(frozen=True, kw_only=True)
class OracleConfig:
    """How the oracle searches.

    ``k`` bounds the coordinates of the residual that are not zero, or its blocks where ``block_D`` numbers the block of
    every coordinate. ``mix_block_D`` gives blocks weights of their own. ``max_active`` bounds the sources of a block.
    """

    k: int = 0
    residual: Residual = "iht"
    block_D: Tensor | None = None
    mix_block_D: Tensor | None = None
    max_active: int | None = None
    variant: Variant = "pairwise"
    tolerance: float = 1e-8
    max_rounds: int = 50
    max_steps: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        if self.residual not in RESIDUALS:
            raise KnobError(f"residual {self.residual!r} is not known; possible are {', '.join(RESIDUALS)}")
        if self.k < 0 or (self.max_active is not None and self.max_active < 1):
            raise KnobError(f"k {self.k} and max_active {self.max_active} must be at least 0 and 1")
        if self.residual == "group-lasso" and self.k and self.block_D is None:
            raise KnobError("the group lasso needs blocks; number the block of every coordinate")


@dataclass(frozen=True)
class Solution:
    """Weights, residual and their objective; ``gap`` bounds what better weights could still gain for this residual."""

    weight_LS: Tensor
    delta_D: Tensor
    value: float
    gap: float
    values: tuple[float, ...]

    @property
    def weight_S(self) -> Tensor:
        return self.weight_LS[0]

    def theta(self, source_SD: Tensor, mix_block_D: Tensor | None = None) -> Tensor:
        return mix(self.weight_LS, source_SD, mix_block_D) + self.delta_D


def mix(weight_LS: Tensor, source_SD: Tensor, mix_block_D: Tensor | None = None) -> Tensor:
    """The mixture of the sources, with one weight vector for all or one per block."""
    if mix_block_D is None:
        return weight_LS[0] @ source_SD
    return (weight_LS[mix_block_D].T * source_SD).sum(0)


def solve(
    loss: Loss, source_SD: Tensor, config: OracleConfig | None = None, *, start_LS: Tensor | None = None
) -> Solution:
    """Fits weights and residual by turns.

    Args:
        start_LS: weights to begin with, of the router, say; where left out, the best single source.
    """
    config = config or OracleConfig()
    num_blocks = 1 if config.mix_block_D is None else int(config.mix_block_D.max()) + 1
    delta_D = torch.zeros_like(source_SD[0])
    weight_LS = start_LS if start_LS is not None else _best_single(loss, source_SD).expand(num_blocks, -1)
    weight_LS = torch.atleast_2d(weight_LS).clone()
    values: list[float] = []
    with_residual = config.k > 0 and config.residual != "none"
    gap = 0.0
    for _ in range(config.max_rounds if with_residual else 1):
        weight_LS, value, gap = _fit_weights(loss, source_SD, weight_LS, delta_D, config)
        if with_residual:
            delta_D, value = _fit_residual(loss, mix(weight_LS, source_SD, config.mix_block_D), delta_D, config)
        values.append(value)
        if len(values) > 1 and values[-2] - values[-1] <= config.tolerance * max(1.0, abs(values[-1])):
            break
    return Solution(weight_LS, delta_D, values[-1], gap, tuple(values))


def refit(loss: Loss, source_SD: Tensor, solution: Solution, config: OracleConfig) -> Solution:
    """Fits weights and residual again without letting a new source or coordinate in."""
    active_LS = solution.weight_LS > 0
    free_D = solution.delta_D != 0
    weight_LS, delta_D, values, gap = solution.weight_LS, solution.delta_D, [solution.value], 0.0
    for _ in range(config.max_rounds):
        weight_LS, value, gap = _fit_weights(loss, source_SD, weight_LS, delta_D, config, active_LS)
        if free_D.any():
            mixed_D = mix(weight_LS, source_SD, config.mix_block_D)
            delta_D = loss.minimise_on(mixed_D + delta_D, free_D) - mixed_D
            value = loss.evaluate(mixed_D + delta_D)[0]
        values.append(value)
        if values[-2] - values[-1] <= config.tolerance * max(1.0, abs(values[-1])):
            break
    return replace(solution, weight_LS=weight_LS, delta_D=delta_D, value=values[-1], gap=gap, values=tuple(values))


def _best_single(loss: Loss, source_SD: Tensor) -> Tensor:
    losses = [loss.evaluate(theta_D)[0] for theta_D in source_SD]
    weight_S = torch.zeros(len(source_SD), dtype=source_SD.dtype)
    weight_S[losses.index(min(losses))] = 1
    return weight_S


def _fit_weights(
    loss: Loss,
    source_SD: Tensor,
    start_LS: Tensor,
    delta_D: Tensor,
    config: OracleConfig,
    active_LS: Tensor | None = None,
) -> tuple[Tensor, float, float]:
    def closed(objective: Objective) -> Objective:
        """Sources that may not be active look infinitely bad to the linear oracle."""
        if active_LS is None:
            return objective

        def masked(weight: Tensor) -> tuple[float, Tensor]:
            value, gradient = objective(weight)
            return value, gradient.masked_fill(~active_LS.reshape(gradient.shape), torch.finfo(gradient.dtype).max)

        return masked

    if config.mix_block_D is None:
        mixing = loss.mixing(source_SD, delta_D)
        objective, curvature, start = mixing.objective, mixing.curvature, start_LS[0]
    else:
        blocks_D, curvature, start = config.mix_block_D, None, start_LS

        def objective(weight_LS: Tensor) -> tuple[float, Tensor]:
            value, gradient_D = loss.evaluate(mix(weight_LS, source_SD, blocks_D) + delta_D)
            inner_SL = torch.zeros(len(source_SD), len(weight_LS), dtype=source_SD.dtype)
            inner_SL.index_add_(1, blocks_D, gradient_D * source_SD)
            return value, inner_SL.T.contiguous()

    found = frank_wolfe(
        closed(objective),
        start,
        variant=config.variant,
        max_steps=config.max_steps,
        tolerance=config.tolerance,
        max_active=config.max_active,
        curvature=curvature,
    )
    return found.weight_LS, found.value, found.gap


def _fit_residual(loss: Loss, mixed_D: Tensor, start_D: Tensor, config: OracleConfig) -> tuple[Tensor, float]:
    def objective(delta_D: Tensor) -> tuple[float, Tensor]:
        return loss.evaluate(mixed_D + delta_D)

    if config.residual == "iht":
        delta_D, value = iterative_hard_thresholding(
            objective, start_D, config.k, block_D=config.block_D, max_steps=config.max_steps, tolerance=config.tolerance
        )
    elif config.residual == "group-lasso":
        assert config.block_D is not None
        delta_D, value = lasso_blocks(objective, start_D, config.block_D, config.k)
    else:
        delta_D, value = gated(objective, start_D, config)
    free_D = delta_D != 0
    if free_D.any():  # the best values on the support that was found
        exact_D = loss.minimise_on(mixed_D + delta_D, free_D) - mixed_D
        exact = objective(exact_D)[0]
        if exact < value:
            delta_D, value = exact_D, exact
    before = objective(start_D)[0]
    return (delta_D, value) if value <= before else (start_D, before)  # a turn never loses


def lasso_blocks(objective: Objective, start_D: Tensor, block_D: Tensor, k: int) -> tuple[Tensor, float]:
    """Group lasso at falling penalties until k blocks are active, then the k of largest norm (eq. C11)."""
    zero_D = torch.zeros_like(start_D)
    penalty = largest_penalty(objective(zero_D)[1], block_D)
    delta_D = zero_D
    for _ in range(40):
        penalty *= 0.7
        delta_D, _ = group_lasso(objective, delta_D, block_D, penalty)
        if int((block_norms(delta_D, block_D) > 0).sum()) >= k:
            break
    delta_D = delta_D * support(delta_D, k, block_D)
    return delta_D, objective(delta_D)[0]


def gated(objective: Objective, start_D: Tensor, config: OracleConfig) -> tuple[Tensor, float]:
    r"""Residual :math:`z \odot \delta` with hard-concrete gates, trained by Adam and then cut to k (eq. C16).

    The penalty per expected open gate is a multiplier: it rises while more than k are expected to be open and falls
    while fewer are. What remains after training is thresholded to exactly k, and refitted by the caller.
    """
    generator = torch.Generator().manual_seed(config.seed)
    block_D = config.block_D if config.block_D is not None else torch.arange(len(start_D))
    num_gates = int(block_D.max()) + 1
    value_D = torch.zeros_like(start_D)  # a fresh start in every turn may leave a support that was chosen too early
    logit_G = torch.zeros(num_gates, dtype=start_D.dtype)
    for parameter in (value_D, logit_G):
        parameter.requires_grad_(True)
    optimiser = torch.optim.Adam([{"params": [value_D], "lr": 0.05}, {"params": [logit_G], "lr": 0.1}])
    price = 0.0
    scale = max(abs(objective(start_D)[0]), 1e-12)
    for _ in range(config.max_steps):
        optimiser.zero_grad()
        gate_G = sample_gates(logit_G, generator)
        delta_D = gate_G[block_D] * value_D
        _, gradient_D = objective(delta_D.detach())
        expected = open_probability(logit_G).sum()
        price = max(0.0, price + 0.02 * float(expected.detach() - config.k) / num_gates)
        (delta_D @ gradient_D + price * scale * expected).backward()
        optimiser.step()
    norm_G = block_norms(value_D.detach(), block_D)
    keep_G = torch.zeros(num_gates, dtype=torch.bool)
    keep_G[(open_probability(logit_G.detach()) * norm_G).argsort(descending=True, stable=True)[: config.k]] = True
    delta_D = value_D.detach() * keep_G[block_D]
    return delta_D, objective(delta_D)[0]
