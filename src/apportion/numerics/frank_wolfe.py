"""Frank-Wolfe on a simplex, or on several at once: vanilla, away and pairwise steps, with the gap as a certificate.

The linear oracle over a simplex is exact: the source whose gradient is least. Shape letters: L blocks with a mixture
each (one where a vector is given), S sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Variant: TypeAlias = Literal["vanilla", "away", "pairwise"]
Objective: TypeAlias = Callable[[Tensor], tuple[float, Tensor]]
Curvature: TypeAlias = Callable[[Tensor], float]
_SHRINK, _GROW, _MAX_TRIES, _ROUNDING = 0.9, 2.0, 60, 1e-14


@dataclass(frozen=True)
class Found:
    """Mixtures, the objective and the duality gap there, and both along the way.

    ``gap`` certifies the result: a convex objective is at most ``gap`` above its minimum (eq. C7).
    """

    weight_LS: Tensor
    value: float
    gap: float
    values: tuple[float, ...]
    gaps: tuple[float, ...]

    @property
    def weight_S(self) -> Tensor:
        return self.weight_LS[0]

    @property
    def num_steps(self) -> int:
        return len(self.values) - 1

    @property
    def num_active(self) -> int:
        """Sources that some block uses."""
        return int((self.weight_LS > 0).any(0).sum())


def frank_wolfe(
    objective: Objective,
    start: Tensor,
    *,
    variant: Variant = "pairwise",
    max_steps: int = 1000,
    tolerance: float = 1e-6,
    max_active: int | None = None,
    curvature: Curvature | None = None,
) -> Found:
    r"""Minimises a smooth function over the simplex, or over one simplex per block (eq. C6; the paper's eq. 6).

    .. math::
        s^{(t)} = e_{\arg\min_s g_s}, \quad
        w^{(t+1)} = w^{(t)} + \gamma_t d^{(t)}, \quad
        d^{(t)} = \begin{cases} s^{(t)} - w^{(t)} & \text{vanilla} \\ w^{(t)} - v^{(t)} & \text{away} \\
                  s^{(t)} - v^{(t)} & \text{pairwise} \end{cases}

    with :math:`g = \nabla f(w^{(t)})` and :math:`v^{(t)} = e_{\arg\max_{s : w_s > 0} g_s}`; an away step is taken where
    it promises more than a forward step. The search stops when the duality gap

    .. math:: \langle g, w^{(t)} - s^{(t)} \rangle \ge f(w^{(t)}) - \min f

    is at most ``tolerance``. Started at a vertex, :math:`w^{(t)}` has at most :math:`t + 1` active sources. The step is
    exact where ``curvature`` gives :math:`d^\top \nabla^2 f\, d` of a quadratic; otherwise a backtracking search keeps
    a local estimate of it (Pedregosa et al., 2020), so every step is a descent. With several blocks all of them step at
    once, each no farther than its simplex allows.

    Args:
        objective: value and gradient at a mixture, of the shape of ``start``.
        start: mixtures to start from, shape ``(S,)`` or ``(L, S)``; vertices keep the number of active sources low.
        max_active: no step that would activate more sources in a block is taken; the search goes on among the active
            ones. ``gap`` then still bounds the distance to the best of *all* mixtures.
        curvature: :math:`d^\top H d` of a quadratic objective, for exact steps.
    """
    vector = start.dim() == 1
    weight_LS = (start[None] if vector else start).clone()
    if float(weight_LS.min()) < 0 or float((weight_LS.sum(-1) - 1).abs().max()) > 1e-6:
        raise ValueError(f"the start is no mixture: its weights sum to {weight_LS.sum(-1).tolist()}")

    def evaluate(point_LS: Tensor) -> tuple[float, Tensor]:
        value, gradient = objective(point_LS[0] if vector else point_LS)
        return value, gradient[None] if vector else gradient

    value, gradient_LS = evaluate(weight_LS)
    local = 1.0
    values, gaps = [value], []
    while True:
        gaps.append(float((gradient_LS * weight_LS).sum() - gradient_LS.amin(-1).sum()))
        if gaps[-1] <= tolerance or len(gaps) > max_steps or not math.isfinite(gaps[-1]):
            break
        direction_LS, longest_L = _direction(weight_LS, gradient_LS, variant, max_active)
        slope = -float((gradient_LS * direction_LS).sum())
        if slope <= tolerance * 1e-3:  # nothing is left to gain among the sources that may be active
            break
        if curvature is not None and len(weight_LS) == 1:
            bend = curvature(direction_LS[0])
            longest = float(longest_L[0])
            point_LS = _moved(weight_LS, direction_LS, longest if bend <= 0 else min(longest, slope / bend), longest_L)
            new_value, new_gradient_LS = evaluate(point_LS)
        else:
            found = _search(evaluate, weight_LS, value, gradient_LS, direction_LS, longest_L, slope, local)
            if found is None:
                break
            point_LS, new_value, new_gradient_LS, local = found
        if new_value > value + _ROUNDING * max(1.0, abs(value)):  # no step decreases any further
            break
        stuck = torch.equal(point_LS, weight_LS)
        weight_LS, value, gradient_LS = point_LS, new_value, new_gradient_LS
        values.append(value)
        if stuck:
            gaps.append(gaps[-1])
            break
    return Found(weight_LS, value, gaps[-1], tuple(values), tuple(gaps))


def _direction(
    weight_LS: Tensor, gradient_LS: Tensor, variant: Variant, max_active: int | None
) -> tuple[Tensor, Tensor]:
    """Where every block goes, and how far it may."""
    infinite = gradient_LS.new_tensor(math.inf)
    allowed_LS = torch.ones_like(weight_LS, dtype=torch.bool)
    if max_active is not None:
        full_L = (weight_LS > 0).sum(-1, keepdim=True) >= max_active
        allowed_LS = ~full_L | (weight_LS > 0)
    toward_L = gradient_LS.where(allowed_LS, infinite).argmin(-1, keepdim=True)
    vertex_LS = torch.zeros_like(weight_LS).scatter_(-1, toward_L, 1.0)
    forward_LS = vertex_LS - weight_LS
    one_L = weight_LS.new_ones(len(weight_LS))
    if variant == "vanilla":
        return forward_LS, one_L
    away_L = gradient_LS.where(weight_LS > 0, -infinite).argmax(-1, keepdim=True)
    leave_LS = torch.zeros_like(weight_LS).scatter_(-1, away_L, 1.0)
    share_L = weight_LS.gather(-1, away_L)[:, 0]
    if variant == "pairwise":
        return vertex_LS - leave_LS, share_L
    backward_LS = weight_LS - leave_LS
    forward_L = ((gradient_LS * forward_LS).sum(-1) <= (gradient_LS * backward_LS).sum(-1)) | (share_L >= 1)
    longest_L = torch.where(forward_L, one_L, share_L / (1 - share_L).clamp_min(1e-300))
    return torch.where(forward_L[:, None], forward_LS, backward_LS), longest_L


def _moved(weight_LS: Tensor, direction_LS: Tensor, step: float, longest_L: Tensor) -> Tensor:
    """The mixtures after a step, exactly on their simplices; a full step drops the source it leaves."""
    step_L = longest_L.clamp_max(step)[:, None]
    point_LS = (weight_LS + step_L * direction_LS).clamp_min(0)
    leaving_LS = direction_LS < 0
    spent_LS = leaving_LS & (weight_LS + step_L * direction_LS <= 1e-15)
    point_LS = point_LS.masked_fill(spent_LS & (step_L >= longest_L[:, None]), 0.0)
    return point_LS / point_LS.sum(-1, keepdim=True)


def _search(
    evaluate: Objective,
    weight_LS: Tensor,
    value: float,
    gradient_LS: Tensor,
    direction_LS: Tensor,
    longest_L: Tensor,
    slope: float,
    local: float,
) -> tuple[Tensor, float, Tensor, float] | None:
    """The first step that decreases as much as the local quadratic bound promises."""
    length = float(direction_LS.square().sum())
    bend = local * _SHRINK
    for _ in range(_MAX_TRIES):
        point_LS = _moved(weight_LS, direction_LS, slope / (bend * length), longest_L)
        new_value, new_gradient_LS = evaluate(point_LS)
        moved_LS = point_LS - weight_LS
        promised = float((gradient_LS * moved_LS).sum()) + 0.5 * bend * float(moved_LS.square().sum())
        if new_value <= value + promised + _ROUNDING * max(1.0, abs(value)):
            return point_LS, new_value, new_gradient_LS, bend
        bend *= _GROW
    return None
