"""How many blocks a budget keeps: the depths that it allows, and the nested path through choices that loses least.

Shape letters: K budgets, T choices, L modules.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.family import Family
from apportion.methods.adapt.solve import sizes_at
from apportion.models.partition import Module

LEAST_USE = 0.85  # of a budget; depths that leave more of it are too shallow for it
Depth = tuple[int, ...]


def every_depth(family: Family) -> list[Depth]:
    """All depths, the shallowest first; several sequences of blocks are as deep as each other, in proportion."""
    modules = list(family.partition)
    blocks = [modules[place] for place in family.block_places]
    longest = max(blocks, key=lambda module: module.num_units, default=None)
    shares = [] if longest is None else [size / longest.num_units for size in longest.sizes()]
    return list(dict.fromkeys(tuple(_nearest(module, share) for module in blocks) for share in shares))


def sizes_by_depth(
    family: Family, alpha_M: Tensor, rho: float, clock: Clock, value_L: Tensor | None
) -> dict[Depth, dict[str, int]]:
    """Sizes that keep a budget and use it, by their depth."""
    budget_ms, found = rho * clock.whole_ms, {}
    for depth in every_depth(family):
        sizes = sizes_at(family, alpha_M, budget_ms, clock, value_L, depth=depth)
        if sizes is not None and clock.upper_ms(sizes) >= LEAST_USE * budget_ms:
            found[depth] = sizes
    return found


def nested_path(start_KTL: NDArray[np.float32], loss_KT: NDArray[np.float64]) -> list[int]:
    """One choice for every budget, none with less of a module than the one before, of least loss in all."""
    total_T, came = loss_KT[0], []
    for knot in range(1, len(loss_KT)):
        inside_TT = (start_KTL[knot - 1][:, None] <= start_KTL[knot][None] + 1e-5).all(-1)
        reached_TT = np.where(inside_TT, total_T[:, None], np.inf)
        came.append(reached_TT.argmin(0))
        total_T = reached_TT.min(0) + loss_KT[knot]
    path = [int(total_T.argmin())]
    for before_T in reversed(came):
        path.append(int(before_T[path[-1]]))
    return path[::-1]


def nested_depths(depths: list[Depth], judged: list[dict[Depth, float]]) -> list[Depth | None]:
    """A depth for every budget, never less for a larger one, that loses least in all; None where none was judged."""
    loss_KT = np.array([[row.get(depth, np.inf if row else 0.0) for depth in depths] for row in judged])
    depth_KTL = np.broadcast_to(np.array(depths, dtype=np.float32), (len(judged), *np.shape(depths)))
    path = nested_path(depth_KTL, loss_KT)
    return [depths[place] if depths[place] in row else None for place, row in zip(path, judged, strict=True)]


def _nearest(module: Module, fraction: float) -> int:
    return min(module.sizes(), key=lambda size: abs(size - fraction * module.num_units))
