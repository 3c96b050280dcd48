"""Deployment modes: the router's weights as they are, refined without gradients, or refined by a few gradient steps.

Shape letters: L blocks, S sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from apportion.errors import KnobError

Mode: TypeAlias = Literal["no-adapt", "gradient-free", "gradient"]
Value: TypeAlias = Callable[[Tensor], float]
Objective: TypeAlias = Callable[[Tensor], tuple[float, Tensor]]
MODES: tuple[Mode, ...] = ("no-adapt", "gradient-free", "gradient")
STAY: dict[Mode, float] = {"no-adapt": 0.0, "gradient-free": 1.0, "gradient": 0.0}
"""The price of leaving the router's weights, as examples that have to gain a nat (benchmarks/compose_tasks)."""
_LEAST = 1e-6


def refine(
    mode: Mode,
    start_LS: Tensor,
    value: Value,
    objective: Objective,
    *,
    steps: int = 4,
    max_active: int | None = None,
    stay: float = 0.0,
) -> Tensor:
    r"""Weights after a deployment mode; the support loss never rises.

    A few examples say little, and the start was learned from many tasks: leaving it has a price (eq. C44).

    .. math:: \min_w f(w) + \frac{\nu}{L} \sum_\ell \mathrm{KL}(w_\ell \,\|\, w^{(0)}_\ell)

    Args:
        stay: the price :math:`\nu` of a nat; a constant over the number of examples, as in a PAC-Bayes bound.
    """
    if mode not in MODES:
        raise KnobError(f"mode {mode!r} is not known; possible are {', '.join(MODES)}")
    if mode == "no-adapt":
        return start_LS
    anchor_LS = start_LS.clamp_min(_LEAST).log()

    def anchored_value(weight_LS: Tensor) -> float:
        return value(weight_LS) + stay * float(_departure(weight_LS, anchor_LS).sum()) / len(weight_LS)

    def anchored_objective(weight_LS: Tensor) -> tuple[float, Tensor]:
        found, gradient_LS = objective(weight_LS)
        apart_LS = _departure(weight_LS, anchor_LS)
        slope_LS = weight_LS.clamp_min(_LEAST).log() - anchor_LS + 1
        price = stay / len(weight_LS)
        return found + price * float(apart_LS.sum()), gradient_LS + price * slope_LS

    if mode == "gradient-free":
        return refine_by_values(anchored_value, start_LS, steps=steps, max_active=max_active)
    return refine_by_gradient(anchored_objective, start_LS, steps=steps)


def refine_by_values(value: Value, start_LS: Tensor, *, steps: int = 4, max_active: int | None = None) -> Tensor:
    r"""Frank-Wolfe steps that only ever evaluate the loss (eq. C39).

    The linear oracle needs the slope towards every vertex, which a difference along that direction gives:

    .. math:: \langle \nabla f(w), e_s - w \rangle \approx \frac{f(w + h (e_s - w)) - f(w)}{h}

    One step costs a forward pass per source and a few along the chosen direction. All blocks move towards the same
    source. (The paper calls its own steps gradient-free although they need the gradient of the whole network.)
    """
    weight_LS, best = start_LS.clone(), value(start_LS)
    num_sources = start_LS.shape[-1]
    for _ in range(steps):
        active_S = (weight_LS > 0).any(0)
        allowed = [
            s for s in range(num_sources) if active_S[s] or max_active is None or int(active_S.sum()) < max_active
        ]
        width = 0.25
        trials = {s: value(_toward(weight_LS, s, width)) for s in allowed}
        chosen = min(trials, key=lambda s: trials[s])
        candidate, found = _toward(weight_LS, chosen, width), trials[chosen]
        for share in (1.0, 0.5, 0.1):
            other = value(_toward(weight_LS, chosen, share))
            if other < found:
                candidate, found = _toward(weight_LS, chosen, share), other
        if found >= best:
            break
        weight_LS, best = candidate, found
    return weight_LS


def refine_by_gradient(objective: Objective, start_LS: Tensor, *, steps: int = 4, rate: float = 0.5) -> Tensor:
    r"""Steps on the logits of the weights, halved until the loss falls (eq. C40).

    With :math:`w = \mathrm{softmax}(\rho)`: :math:`\partial f / \partial \rho_s = w_s (g_s - \langle g, w \rangle)`.
    """
    weight_LS = start_LS.clamp_min(_LEAST)
    weight_LS = weight_LS / weight_LS.sum(-1, keepdim=True)
    value, gradient_LS = objective(weight_LS)
    for _ in range(steps):
        slope_LS = weight_LS * (gradient_LS - (gradient_LS * weight_LS).sum(-1, keepdim=True))
        size = float(slope_LS.abs().max())
        if size < 1e-12:
            break
        for _ in range(6):
            trial_LS = (weight_LS.log() - rate * slope_LS / size).softmax(-1)
            new_value, new_gradient_LS = objective(trial_LS)
            if new_value < value:
                break
            rate /= 3
        else:
            break
        weight_LS, value, gradient_LS, rate = trial_LS, new_value, new_gradient_LS, 1.5 * rate
    return weight_LS


def _departure(weight_LS: Tensor, anchor_LS: Tensor) -> Tensor:
    """Terms of the divergence from weights whose logarithm is given."""
    return weight_LS * (weight_LS.clamp_min(_LEAST).log() - anchor_LS)


def _toward(weight_LS: Tensor, source: int, share: float) -> Tensor:
    moved_LS = (1 - share) * weight_LS
    moved_LS[:, source] += share
    return moved_LS / moved_LS.sum(-1, keepdim=True)


def truncate(weight_LS: Tensor, max_active: int) -> Tensor:
    """The largest weights of every block, scaled to sum to one."""
    kept = torch.zeros_like(weight_LS)
    top = weight_LS.topk(min(max_active, weight_LS.shape[-1]), dim=-1)
    kept.scatter_(-1, top.indices, top.values)
    return kept / kept.sum(-1, keepdim=True)
