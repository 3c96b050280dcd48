"""Anchors: a search at each of several costs, their front, and carrying a solution over to another target."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apportion.core.knob import Setting
from apportion.errors import InfeasibleError
from apportion.methods.search.band import Band, Costs
from apportion.methods.search.loop import Found
from apportion.methods.search.mutate import Infeasible, Method, Neighbour, Predict, mutate
from apportion.methods.search.pareto import nondominated
from apportion.methods.search.space import Proposal, Space


def recompensate(
    space: Space, arch: Setting, band: Band, predict: Predict, *, method: Method = "auto"
) -> Neighbour | Infeasible:
    """The same micro-choices brought into another band, such as another target's: M with an empty proposal.

    Where several layers can pay, the one with the least drift does.
    """
    here = predict(arch)
    nothing = Proposal(space.layers[0], {})
    if band.holds(here):
        return Neighbour(nothing, arch, here, 0.0, 1)
    best: Neighbour | None = None
    queries = 0
    for layer in space.layers:
        found = mutate(space, arch, Proposal(layer, {}), band, predict, method=method)
        if isinstance(found, Infeasible):
            queries += found.num_queries
            continue
        queries += found[0].num_queries
        if best is None or found[0].drift < best.drift:
            best = found[0]
    if best is not None:
        return best
    return Infeasible(nothing, f"no compensation reaches the band; as it is, {band.explain(here)}", queries)


def starts_in_band(
    space: Space, band: Band, predict: Predict, num: int, rng: random.Random, *, tries: int = 2000
) -> list[Setting]:
    """Architectures inside a band to start from: random ones, compensated where that is needed; the template first.

    Raises:
        InfeasibleError: none was found; says how near the nearest came.
    """
    found: dict[Setting, None] = {}
    nearest: tuple[float, Costs] | None = None
    for attempt in range(tries):
        if len(found) >= num:
            break
        arch = space.start() if attempt == 0 else space.random(rng)
        made = recompensate(space, arch, band, predict)
        if isinstance(made, Neighbour):
            found[made.arch] = None
        else:
            costs = predict(arch)
            if nearest is None or band.deviation(costs) < nearest[0]:
                nearest = band.deviation(costs), costs
    if not found:
        assert nearest is not None
        raise InfeasibleError(
            f"no architecture of {space.name} was found in the band: of {tries} tried the nearest has "
            f"{band.explain(nearest[1])}; choose another anchor or a wider tolerance"
        )
    return list(found)[:num]


@dataclass(frozen=True)
class Front:
    """What the searches at several anchors found, and which of it is worth having on measured cost."""

    points: tuple[Found, ...]
    costs: tuple[float, ...]
    kept: tuple[int, ...]


def pareto_anchors(
    anchors: Sequence[float],
    search_at: Callable[[float], Found],
    measured: Callable[[Setting], float],
) -> Front:
    """A search at every anchor B_1 < ... < B_K; points that another dominates on measured cost are removed."""
    if list(anchors) != sorted(set(anchors)) or not anchors or anchors[0] <= 0:
        raise InfeasibleError(f"anchors are {list(anchors)!r}; give costs above 0, each once, from small to large")
    points = tuple(search_at(anchor) for anchor in anchors)
    costs = tuple(measured(point.arch) for point in points)
    utilities = [point.utility.mean for point in points]
    return Front(points, costs, tuple(nondominated([((cost,), u) for cost, u in zip(costs, utilities, strict=True)])))
