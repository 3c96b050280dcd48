r"""The budget policy: how much of every module a budget allows, never less for a larger budget.

Shape letters: L modules, K knots, D devices.

.. math:: b_\ell(\rho) = \operatorname{clip}\big((1 + 2c)\,\sigma(x_\ell(\rho)) - c, \; \underline b_\ell, 1\big),
    \qquad x_\ell \text{ piecewise linear in } \rho \text{ with rises} \ge 0 \quad \text{(eq. A3)}

:math:`\rho` is the budget as a share of the whole network's latency on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

STRETCH = 0.1  # c: lets a squashed value reach 0 and 1
Allocation = Literal["learned", "uniform", "template", "unconditional", "fixed"]
ALLOCATIONS: tuple[str, ...] = get_args(Allocation)


class BudgetPolicy(nn.Module):
    """A monotone curve for every module.

    ``allocation`` says what is learned: a curve of its own for every module (``learned``), one curve for all
    (``uniform``), one factor that scales a learned template (``template``), one vector for all budgets
    (``unconditional``), or nothing (``fixed``: the curves it starts with).
    """

    least_L: Tensor
    knot_K: Tensor
    usual_L: Tensor

    def __init__(
        self,
        start_KL: Tensor,
        knots: Sequence[float],
        least_L: Tensor,
        price_DL: Tensor,
        allocation: str = "learned",
    ) -> None:
        """Starts at the fractions ``start_KL`` at the knots; ``price_DL`` are shares of the devices' time by module."""
        super().__init__()
        self.allocation = allocation
        self.register_buffer("least_L", least_L)
        self.register_buffer("knot_K", torch.tensor(list(knots)))
        self.register_buffer("usual_L", price_DL.clamp_min(1e-6).log().mean(0))
        self.start_L = nn.Parameter(torch.zeros_like(least_L))
        self.rise_KL = nn.Parameter(torch.zeros(len(start_KL) - 1, len(least_L)))
        self.put(unsquash(start_KL))
        self.template_L = nn.Parameter(torch.full_like(least_L, 2.0))
        self.lean = nn.Parameter(torch.zeros(()))
        if allocation == "fixed":
            self.requires_grad_(False)

    @torch.no_grad()
    def put(self, level_KL: Tensor) -> None:
        """Lays the curves through levels at the knots; where these fall, a curve hardly rises."""
        level_KL = level_KL.cummax(0).values
        self.start_L.copy_(level_KL[0])
        self.rise_KL.copy_(torch.log(torch.expm1(level_KL.diff(dim=0).clamp_min(1e-2))))

    def level(self, rho: float, price_L: Tensor) -> Tensor:
        """The curves before squashing, shape (L,)."""
        if self.allocation == "unconditional":
            rho = 0.5 * float(self.knot_K[0] + self.knot_K[-1])
        start_L: Tensor = self.start_L
        rise_KL = functional.softplus(self.rise_KL)
        if self.allocation in ("uniform", "template"):
            start_L, rise_KL = start_L.mean().expand_as(start_L), rise_KL.mean(1, keepdim=True).expand_as(rise_KL)
        part_K = ((rho - self.knot_K[:-1]) / self.knot_K.diff()).clamp(0, 1)
        level_L = start_L + part_K @ rise_KL
        if self.allocation == "learned":
            level_L = level_L - self.lean * (price_L.clamp_min(1e-6).log() - self.usual_L)
        return level_L

    def forward(self, rho: float, price_L: Tensor) -> Tensor:
        """The fraction of every module that a budget of ``rho`` allows on a device with these prices."""
        return self.squash(self.level(rho, price_L))

    def squash(self, level_L: Tensor) -> Tensor:
        fraction_L = squash(level_L)
        if self.allocation == "template":
            fraction_L = fraction_L * squash(self.template_L)
        return torch.maximum(fraction_L, self.least_L)


def squash(level: Tensor) -> Tensor:
    return ((1 + 2 * STRETCH) * level.sigmoid() - STRETCH).clamp(0, 1)


def unsquash(fraction: Tensor) -> Tensor:
    """The level whose squashed value is a fraction in [0, 1]."""
    return torch.logit((fraction.clamp(0, 1) + STRETCH) / (1 + 2 * STRETCH))
