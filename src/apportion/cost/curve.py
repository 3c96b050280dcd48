"""The cost curve of a part: nothing when it is gone, a jump when it wakes, then convex and never falling."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apportion.cost.sample import CostError, number, numbers
from apportion.numerics.hinge import hinge_basis, left_ends

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Curve:
    r"""Milliseconds that a part costs as a function of the share of its work that is left (eq. K2).

    .. math:: c(s) = J\,\mathbb 1\{s > 0\} + \sum_j d_j \max(0, s - k_{j-1}), \qquad J, d_j \ge 0

    ``jump_ms`` is :math:`J`; ``knots`` are the right ends :math:`k_1 < \dots < k_K = 1` of the pieces; ``slopes_ms``
    are the slopes :math:`m_j = d_1 + \dots + d_j` on them, in milliseconds per unit of share, never falling.

    Example:
        >>> curve = Curve(0.5, knots=(0.5, 1.0), slopes_ms=(1.0, 3.0))
        >>> curve(0.0), curve(0.5), curve(1.0)
        (0.0, 1.0, 2.5)
    """

    jump_ms: float
    knots: tuple[float, ...] = (1.0,)
    slopes_ms: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        check_knots(self.knots)
        if len(self.slopes_ms) != len(self.knots):
            raise CostError(f"a curve has {len(self.slopes_ms)} slopes on {len(self.knots)} pieces; give one per knot")
        steps = (self.jump_ms, *np.diff((0.0, *self.slopes_ms)).tolist())
        if not all(math.isfinite(step) and step >= 0.0 for step in steps):
            raise CostError(
                f"a curve has jump {self.jump_ms!r} and slopes {list(self.slopes_ms)!r}; "
                "both must be finite and at least 0 and the slopes may not fall, fit it again"
            )

    def __call__(self, share: float) -> float:
        """The cost at a share in [0, 1]."""
        if share <= 0.0:
            return 0.0
        total, left = self.jump_ms, 0.0
        for knot, slope in zip(self.knots, self.slopes_ms, strict=True):
            if share <= knot:
                break
            total, left = total + slope * (knot - left), knot
        else:
            slope = self.slopes_ms[-1]
        return total + slope * (share - left)

    def values(self, share_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """The cost at many shares at once."""
        weight_K = np.diff((0.0, *self.slopes_ms))
        jump_N = np.where(np.asarray(share_N) > 0.0, self.jump_ms, 0.0)
        result: NDArray[np.float64] = jump_N + hinge_basis(share_N, self.knots) @ weight_K
        return result

    def tensor(self, share: Tensor, ramp: float = 0.0) -> Tensor:
        """The cost of a tensor of shares, elementwise, with gradients.

        The gradient is the slope of the piece to the left and does not see the jump. With ``ramp`` above zero the
        jump is climbed linearly while the share goes from 0 to ``ramp``, so a relaxed gate feels it.
        """
        import torch

        woken = (share > 0).to(share.dtype) if ramp <= 0.0 else (share / ramp).clamp(max=1.0)
        total = self.jump_ms * woken + self.slopes_ms[0] * share
        for weight, left in zip(np.diff(self.slopes_ms).tolist(), left_ends(self.knots)[1:], strict=True):
            total = total + weight * torch.relu(share - left)
        return total

    def slope(self, share: float) -> float:
        """Milliseconds per unit of share for the last bit of work kept at ``share``; the jump is not in it."""
        return self.slopes_ms[min(bisect_left(self.knots, share), len(self.knots) - 1)]

    def scaled(self, factor: float) -> Curve:
        """The same curve with every price multiplied by a factor."""
        return Curve(factor * self.jump_ms, self.knots, tuple(factor * slope for slope in self.slopes_ms))

    def to_json(self) -> dict[str, Any]:
        return {"jump_ms": self.jump_ms, "knots": list(self.knots), "slopes_ms": list(self.slopes_ms)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Curve:
        return cls(
            number(fields["jump_ms"], "jump_ms"),
            numbers(fields["knots"], "knots"),
            numbers(fields["slopes_ms"], "slopes_ms"),
        )


def check_knots(knots: tuple[float, ...]) -> None:
    """Refuses knots that don't rise from above 0 to exactly 1."""
    rising = all(left < right for left, right in zip((0.0, *knots), knots, strict=False))
    if not knots or not rising or knots[-1] != 1.0:
        raise CostError(f"knots are {list(knots)!r}; give rising shares above 0 that end at 1, such as [0.5, 1.0]")
