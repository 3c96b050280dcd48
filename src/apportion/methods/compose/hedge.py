r"""Hedging: when to trust the weights, what to do when not, and weights that survive being a little wrong (§ 11).

Shape letter: S sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from apportion.errors import ModelError
from apportion.numerics.dirichlet import top_probability
from apportion.numerics.frank_wolfe import Found, frank_wolfe
from apportion.numerics.simplex import entropy

Objective: TypeAlias = Callable[[Tensor], tuple[float, Tensor]]


@dataclass(frozen=True)
class Verdict:
    """The weights to use, and whether they are those that were asked about."""

    weight_S: Tensor
    abstained: bool
    confidence: float
    entropy_ratio: float


def decide(
    weight_S: Tensor, precision: float, names: Sequence[str], *, safe: str, least_confidence: float = 0.5
) -> Verdict:
    """Keeps the weights where they are sure enough, and falls back to a named safe source where not.

    Confidence is the probability, under a Dirichlet law around the weights, that their largest source is the right one.
    """
    if safe not in names:
        raise ModelError(f"no source {safe!r} to fall back to; there are {', '.join(names)}")
    confidence = top_probability(weight_S, precision)
    spread = float(entropy(weight_S)) / math.log(len(weight_S)) if len(weight_S) > 1 else 0.0
    if confidence >= least_confidence:
        return Verdict(weight_S, False, confidence, spread)
    fallback_S = torch.zeros_like(weight_S)
    fallback_S[list(names).index(safe)] = 1
    return Verdict(fallback_S, True, confidence, spread)


def coverage(confidence_T: Sequence[float], right_T: Sequence[bool], least: float) -> tuple[float, float]:
    """Share of tasks answered at a confidence, and the share of those that were right; (0, 1) where none is."""
    answered = [right for confidence, right in zip(confidence_T, right_T, strict=True) if confidence >= least]
    return len(answered) / max(1, len(confidence_T)), sum(answered) / len(answered) if answered else 1.0


def worst_case(objective: Objective, weight_S: Tensor, radius: float) -> float:
    r"""The largest loss of mixtures within an :math:`\ell_1` distance of some weights (eq. C41).

    .. math:: \max_{u \in \Delta_S,\, \|u - w\|_1 \le \rho} f(u)

    A convex function is largest at a corner of that set: half the radius moved from some sources to one other. Corners
    that take from the sources of least gradient first are the ones tried, for every receiver.
    """
    return max(objective(corner_S)[0] for corner_S in _corners(objective, weight_S, radius))


def robust_weights(
    objective: Objective, start_S: Tensor, radius: float, *, sharpness: float = 50.0, max_steps: int = 300
) -> Found:
    r"""Weights whose loss is least when the worst shift of mass within the radius is made (eq. C42).

    .. math:: \min_w \max_{i, j} f\big(w + \tfrac\rho2 (e_j - e_i)\big)

    The maximum is smoothed by log-sum-exp, which is above it by at most log(S²)/sharpness of the loss's scale.
    """
    num_sources = len(start_S)
    shifts = [torch.zeros_like(start_S)]
    for giver in range(num_sources):
        for taker in range(num_sources):
            if giver != taker:
                shift_S = torch.zeros_like(start_S)
                shift_S[giver], shift_S[taker] = -radius / 2, radius / 2
                shifts.append(shift_S)
    scale = max(abs(objective(start_S)[0]), 1e-12) / sharpness

    def smoothed(weight_S: Tensor) -> tuple[float, Tensor]:
        pairs = [objective(weight_S + shift_S) for shift_S in shifts]
        value_K = torch.tensor([value for value, _ in pairs], dtype=weight_S.dtype)
        share_K = (value_K / scale).softmax(0)
        gradient_S = (share_K[:, None] * torch.stack([gradient for _, gradient in pairs])).sum(0)
        return float(scale * torch.logsumexp(value_K / scale, 0)), gradient_S

    return frank_wolfe(smoothed, start_S, max_steps=max_steps, tolerance=1e-6)


def _corners(objective: Objective, weight_S: Tensor, radius: float) -> list[Tensor]:
    _, gradient_S = objective(weight_S)
    corners = [weight_S]
    for taker in range(len(weight_S)):
        moved_S, left = weight_S.clone(), radius / 2
        for giver in gradient_S.argsort().tolist():
            if giver != taker and left > 0:
                taken = min(left, float(moved_S[giver]))
                moved_S[giver] -= taken
                moved_S[taker] += taken
                left -= taken
        corners.append(moved_S)
    for giver in weight_S.nonzero()[:, 0].tolist():
        for taker in range(len(weight_S)):
            if giver != taker:
                taken = min(radius / 2, float(weight_S[giver]))
                moved_S = weight_S.clone()
                moved_S[giver] -= taken
                moved_S[taker] += taken
                corners.append(moved_S)
    return corners
