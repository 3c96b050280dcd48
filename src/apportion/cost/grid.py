"""Grid audit: on which multiples of a width the cost only rises, and which widths are dearer than the next multiple."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from apportion.cost.sample import CostError
from apportion.numerics.multiple import holm, one_sided_p

STEPS = (1, 2, 4, 8, 16, 32, 64, 128)
_MIN_POINTS = 3


@dataclass(frozen=True)
class Inversion:
    """A smaller width that costs more than a larger one, beyond noise; ``span`` counts grid points between them."""

    width: int
    larger: int
    excess_ratio: float
    span: int


def find_inversions(
    widths: Sequence[int],
    latencies_ms: Sequence[float],
    stderrs_ms: Sequence[float],
    level: float = 0.05,
    tolerance: float = 0.01,
) -> list[Inversion]:
    r"""Pairs out of order beyond noise, over all pairs of widths (eq. K23).

    .. math:: H_{ij}: y_i \le (1 + t)\, y_j \text{ for } w_i < w_j, \qquad
        z_{ij} = \frac{y_i - (1 + t) y_j}{\sqrt{\sigma_i^2 + (1 + t)^2 \sigma_j^2}}

    One-sided tests, Holm's correction: a wrong inversion anywhere has probability at most ``level``. ``tolerance`` is
    :math:`t`, the excess that does not matter. The largest ``span`` is the K of K-quasi-monotonicity (eq. K24).
    """
    order = sorted(range(len(widths)), key=lambda index: widths[index])
    pairs = list(combinations(range(len(order)), 2))
    scale = 1.0 + tolerance
    p_values = []
    for a, b in pairs:
        i, j = order[a], order[b]
        gap = latencies_ms[i] - scale * latencies_ms[j]
        p_values.append(one_sided_p(gap, math.hypot(stderrs_ms[i], scale * stderrs_ms[j])))
    return [
        Inversion(widths[order[a]], widths[order[b]], latencies_ms[order[a]] / latencies_ms[order[b]] - 1.0, span=b - a)
        for (a, b), rejected in zip(pairs, holm(p_values, level), strict=True)
        if rejected
    ]


@dataclass(frozen=True)
class GridStep:
    """What the readings say about the multiples of one step.

    ``num_inversions`` and ``span`` are about the multiples among themselves. Of the ``num_off`` widths that are not
    multiples but whose next multiple was read, ``free_ratio`` is the share that costs no less than that multiple, and
    ``free`` says that rounding all of them up costs nothing beyond noise (eq. K25). ``premium_ratio`` is the median
    excess of widths off the grid over the line between their neighbours on it.
    """

    step: int
    num_on: int
    num_off: int
    num_inversions: int
    span: int
    free_ratio: float
    free: bool
    premium_ratio: float


@dataclass(frozen=True)
class GridAudit:
    """Which multiple to use, why, and the evidence for each step that was looked at."""

    step: int | None
    reason: str
    rows: tuple[GridStep, ...]

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "reason": self.reason, "rows": [asdict(row) for row in self.rows]}

    def table(self) -> str:
        """Plain text of at most 80 columns."""
        lines = ["step   on  off  inversions  span  round up free  premium off grid"]
        for row in self.rows:
            free = f"{row.free_ratio:.0%}" if row.num_off else "-"
            premium = f"{row.premium_ratio:+.1%}" if row.num_off else "-"
            mark = " <- use" if row.step == self.step else ""
            lines.append(
                f"{row.step:>4} {row.num_on:>4} {row.num_off:>4} {row.num_inversions:>11} {row.span:>5} "
                f"{free:>14} {premium:>17}{mark}"
            )
        return "\n".join([*lines, *textwrap.wrap(self.reason, 80)])


def audit_grid(
    widths: Sequence[int],
    latencies_ms: Sequence[float],
    stderrs_ms: Sequence[float] | None = None,
    *,
    steps: Sequence[int] = STEPS,
    level: float = 0.05,
    tolerance: float = 0.01,
) -> GridAudit:
    """From readings of one part along widths: the step to use, and what happens off it.

    The coarsest step whose multiples only rise and to which rounding up is free; failing that, the finest step whose
    multiples only rise; failing that, none. Steps finer than all the widths read are not judged.
    """
    stderrs = list(stderrs_ms) if stderrs_ms is not None else [0.0] * len(widths)
    if not len(widths) == len(latencies_ms) == len(stderrs) or len(set(widths)) < _MIN_POINTS:
        raise CostError(
            f"a grid audit got {len(widths)} widths, {len(latencies_ms)} latencies and {len(stderrs)} standard errors; "
            f"give one of each for at least {_MIN_POINTS} different widths"
        )
    if len(set(widths)) != len(widths) or min(widths) < 1 or min(latencies_ms) <= 0.0:
        raise CostError("a grid audit needs each width once, at least 1, and latencies above 0; merge repeated widths")
    common = math.gcd(*widths)
    judged = sorted({common} | {step for step in steps if step > common})
    rows = [_judge(step, widths, latencies_ms, stderrs, level, tolerance) for step in judged]
    rows = [row for row in rows if row.num_on >= _MIN_POINTS]
    rising = [row for row in rows if row.num_inversions == 0]
    free = [row for row in rising if row.free]
    if free:
        row = free[-1]
        reason = (
            f"use multiples of {row.step}: cost only rises on them, and rounding {row.num_off} other widths up "
            f"costs nothing (they are {row.premium_ratio:+.1%} off the line)"
        )
        return GridAudit(row.step, reason, tuple(rows))
    if rising:
        row = rising[0]
        reason = f"use multiples of {row.step}: the finest step on which cost only rises, {row.num_on} widths read"
        return GridAudit(row.step, reason, tuple(rows))
    worst = min(rows, key=lambda row: (row.span, row.num_inversions))
    reason = (
        f"no step from {judged[0]} to {judged[-1]} makes cost only rise; least bad is {worst.step} with "
        f"{worst.num_inversions} inversions spanning up to {worst.span} of its points: measure each width used"
    )
    return GridAudit(None, reason, tuple(rows))


def _judge(
    step: int,
    widths: Sequence[int],
    latencies_ms: Sequence[float],
    stderrs_ms: Sequence[float],
    level: float,
    tolerance: float,
) -> GridStep:
    latency, stderr = dict(zip(widths, latencies_ms, strict=True)), dict(zip(widths, stderrs_ms, strict=True))
    on = sorted(width for width in widths if width % step == 0)
    inversions = find_inversions(on, [latency[w] for w in on], [stderr[w] for w in on], level, tolerance)
    rounded = {width: -(-width // step) * step for width in sorted(widths) if width % step}
    off = [width for width, multiple in rounded.items() if multiple in latency]
    ratios = [latency[rounded[width]] / latency[width] for width in off]
    scale = 1.0 + tolerance
    dearer = holm(
        [
            one_sided_p(
                latency[rounded[width]] - scale * latency[width],
                math.hypot(stderr[rounded[width]], scale * stderr[width]),
            )
            for width in off
        ],
        level,
    )
    between = [width for width in off if on[0] <= width <= on[-1]] if on else []
    line = np.interp(between, on, [latency[width] for width in on]) if between else np.array([])
    premiums = [latency[width] / float(value) - 1.0 for width, value in zip(between, line, strict=True)]
    return GridStep(
        step=step,
        num_on=len(on),
        num_off=len(off),
        num_inversions=len(inversions),
        span=max((inversion.span for inversion in inversions), default=0),
        free_ratio=sum(ratio <= scale for ratio in ratios) / len(ratios) if ratios else 0.0,
        free=bool(ratios) and not any(dearer) and float(np.median(ratios)) <= scale,
        premium_ratio=float(np.median(premiums)) if premiums else 0.0,
    )
