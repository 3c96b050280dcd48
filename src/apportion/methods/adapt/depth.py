"""How many blocks a budget keeps: the depths that it allows, and the nested path through choices that loses least.

Shape letters: K budgets, T choices, J sequences of blocks, L modules, E episodes, S support rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from apportion.methods.adapt.clock import Clock, Sizes, spread_start
from apportion.methods.adapt.family import Family
from apportion.methods.adapt.solve import left_out, sizes_at
from apportion.models.partition import Module

LEAST_USE = 0.85  # of a budget; depths that leave more of it are too shallow for it
_TRIFLE = 1e-7  # decides among equals only
Depth = tuple[int, ...]
Array = NDArray[np.float64]


def every_depth(family: Family) -> list[Depth]:
    """All depths, the shallowest first; several sequences of blocks are as deep as each other, in proportion."""
    modules = list(family.partition)
    blocks = [modules[place] for place in family.block_places]
    longest = max(blocks, key=lambda module: module.num_units, default=None)
    shares = [] if longest is None else [size / longest.num_units for size in longest.sizes()]
    return list(dict.fromkeys(tuple(_nearest(module, share) for module in blocks) for share in shares))


def near_depths(family: Family, rho: float) -> list[Depth]:
    """Those a step shallower and deeper than what was settled for a budget, or than the whole; none if nothing was."""
    depths = every_depth(family)
    settled = depths[-1] if rho >= 1 and family.settled else family.depth(rho)
    if settled is None or settled not in depths:
        return []
    place = depths.index(settled)
    return [depths[at] for at in (place - 1, place + 1) if 0 <= at < len(depths)]


def sizes_by_depth(
    family: Family,
    alpha_M: Tensor,
    rho: float,
    clock: Clock,
    value_L: Tensor | None,
) -> dict[Depth, dict[str, int]]:
    """Sizes that keep a budget and use it, by their depth."""
    budget_ms, found = rho * clock.whole_ms, {}
    for depth in every_depth(family):
        sizes = sizes_at(family, alpha_M, budget_ms, clock, value_L, depth=depth)
        if sizes is not None and clock.upper_ms(sizes) >= LEAST_USE * budget_ms:
            found[depth] = sizes
    return found


def near_sizes(
    family: Family, alpha_M: Tensor, rho: float, clock: Clock, value_L: Tensor | None, *, num_steps: int = 0
) -> list[dict[str, int]]:
    """Sizes at the depths near a budget's, for a support set to choose among: those that use it, or all there is."""
    budget_ms, found = rho * clock.whole_ms, []
    for depth in near_depths(family, rho):
        sizes = sizes_at(family, alpha_M, budget_ms, clock, value_L, depth=depth, num_steps=num_steps)
        if sizes is not None and (clock.upper_ms(sizes) >= LEAST_USE * budget_ms or as_wide_as_can_be(clock, sizes)):
            found.append(sizes)
    return found


def as_wide_as_can_be(clock: Clock, sizes: Sizes) -> bool:
    """Whether nothing is cut in the blocks that stay."""
    gone = set(left_out(clock, sizes))
    return all(
        sizes[module.name] == module.num_units
        for module in clock.parts.partition
        if not module.blocks and module.name not in gone
    )


def balanced_depths(family: Family) -> list[tuple[float, ...]]:
    """How many blocks the balanced start keeps at every knot (eq. A13), not rounded."""
    modules = list(family.partition)
    start_KL = spread_start([*family.clocks.values()], family.knots)
    return [tuple(float(start_L[p]) * modules[p].num_units for p in family.block_places) for start_L in start_KL]


def nested_depths(
    depths: Sequence[Depth], judged: Sequence[Mapping[Depth, Array]], usual: Sequence[Sequence[float]]
) -> list[Depth | None]:
    """A depth for every budget, never less for a larger one, that loses least in all; None where none was judged.

    A depth whose loss is within one standard error of the best one's, on the same episodes, is its equal, and of equal
    ones that nearest to the usual is taken: what training tasks can't tell apart, tasks unlike them may.

    Args:
        judged: for every budget the loss of each episode by the depths that it allows.
        usual: for every budget the depth to take where nothing speaks for another.
    """
    loss_KT = np.array([_lost(depths, row, near) for row, near in zip(judged, usual, strict=True)])
    path = nested_path(np.array(depths), loss_KT)
    return [depths[place] if depths[place] in row else None for place, row in zip(path, judged, strict=True)]


def surely_least(loss_TS: Sequence[Tensor]) -> int:
    r"""The choice of least loss on a support set, or the first if that is luck (eq. A25).

    .. math:: t^* = \arg\min_t \bar\ell_t \quad \text{if } \bar\ell_0 - \bar\ell_{t^*} > \sigma(\ell_0 - \ell_{t^*}),
        \text{ else } 0

    :math:`\ell_t` are the losses of the examples by choice t and :math:`\sigma` is the standard error of the mean.

    Example:
        >>> import torch
        >>> first, second = torch.tensor([1.0, 2.0, 1.5]), torch.tensor([0.5, 1.4, 1.0])
        >>> surely_least([first, second]), surely_least([first, first - torch.tensor([0.9, -0.8, 0.0])])
        (1, 0)
    """
    best = min(range(len(loss_TS)), key=lambda place: float(loss_TS[place].mean()))
    less_S = loss_TS[0] - loss_TS[best]
    error = float(less_S.std()) / len(less_S) ** 0.5 if len(less_S) > 1 else math.inf
    return best if float(less_S.mean()) > error else 0


def nested_path(depth_TJ: NDArray[np.int64], loss_KT: Array) -> list[int]:
    """One choice for every budget, none with less than the one before, of least loss in all."""
    inside_TT = (depth_TJ[:, None] <= depth_TJ[None]).all(-1)
    total_T, came = loss_KT[0], []
    for loss_T in loss_KT[1:]:
        reached_TT = np.where(inside_TT, total_T[:, None], np.inf)
        came.append(reached_TT.argmin(0))
        total_T = reached_TT.min(0) + loss_T
    path = [int(total_T.argmin())]
    for before_T in reversed(came):
        path.append(int(before_T[path[-1]]))
    return path[::-1]


def _lost(depths: Sequence[Depth], row: Mapping[Depth, Array], usual: Sequence[float]) -> list[float]:
    """What every depth loses against the best of a budget, nothing within the error, plus a trifle for its distance."""
    if not row:
        return [0.0] * len(depths)
    best = min(row, key=lambda depth: float(row[depth].mean()))
    found = []
    for depth in depths:
        if depth not in row:
            found.append(np.inf)
            continue
        worse_E = row[depth] - row[best]
        worse = float(worse_E.mean())
        error = float(worse_E.std(ddof=1)) / len(worse_E) ** 0.5 if len(worse_E) > 1 else 0.0
        away = sum(abs(count - near) for count, near in zip(depth, usual, strict=True))
        found.append((worse if worse > error else 0.0) + _TRIFLE * away)
    return found


def _nearest(module: Module, fraction: float) -> int:
    return min(module.sizes(), key=lambda size: abs(size - fraction * module.num_units))
