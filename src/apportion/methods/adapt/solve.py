r"""The test-time solver: routing and sizes for one support set and budget, without a gradient through the network.

Sizes come from the policy, where the bound of its path is the budget on the device at hand, with as many blocks as
training settled; on a device that was not trained for they are priced anew; and they are rounded so that the
bound keeps the budget:

.. math:: \max_s \sum_\ell v_\ell \bar s_\ell \log s_\ell \quad \text{s.t. } \widehat{\mathrm{Lat}}(s) \le B
    \quad \text{(eq. A10; the paper's eq. 7)}

:math:`v_\ell` is what a bit more of a module is worth, learned in training, and :math:`\bar s` the policy's fractions:
the objective's slope at :math:`\bar s` is :math:`v`, so on a device that prices modules as the trained ones did the
policy's answer stands, and elsewhere it leans towards what is cheap there. Shape letters: L modules, M experts, S
support rows, W classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apportion.errors import InfeasibleError
from apportion.methods.adapt.clock import Clock, Sizes
from apportion.methods.adapt.family import Family

NUM_STEPS = 12
RATE = 0.5
_CLOSE = 1e-4  # two places on the path of the policy that are one


@dataclass(frozen=True, eq=False)
class Solved:
    """The mixture and the sizes, with what the clock is predicted to show at these, and bounded by."""

    alpha_M: Tensor
    sizes: dict[str, int]
    predicted_ms: float
    upper_ms: float


def solve(
    family: Family,
    alpha_M: Tensor,
    budget_ms: float,
    clock: Clock,
    value_L: Tensor | None = None,
    *,
    num_steps: int = NUM_STEPS,
    only_better: bool = False,
    within: Sizes | None = None,
) -> Solved:
    """Sizes for a mixture and a budget.

    Args:
        clock: the device, which need not be one that was trained for.
        value_L: what a bit more of every module is worth; without it fractions are not priced anew.
        num_steps: of pricing them anew.
        only_better: leave the policy's fractions where these steps do not raise the objective of eq. A10.
        within: sizes of a larger budget, which none of these may exceed: then the smaller network is a part of the
            larger one.

    Raises:
        InfeasibleError: the budget is under the bound of the smallest network.
    """
    floor_ms = clock.floor_ms()
    if budget_ms < floor_ms:
        raise InfeasibleError(
            f"budget {budget_ms:.3g} ms is under the floor of {floor_ms:.3g} ms on {clock.name} (the bound of the "
            "smallest network); raise the budget"
        )
    rho = min(1.0, budget_ms / clock.whole_ms)
    depth = family.depth(rho)
    for at in (depth, None):
        sizes = sizes_at(family, alpha_M, budget_ms, clock, value_L, depth=at, num_steps=num_steps, within=within)
        if sizes is not None:
            break
    if sizes is None:  # no way down from the policy's sizes reaches the smallest network, which keeps the budget
        sizes = smallest(alpha_M, clock).sizes
    if only_better and num_steps and value_L is not None:
        plain = sizes_at(family, alpha_M, budget_ms, clock, value_L, depth=at, within=within)
        if plain is not None:
            sizes = max((plain, sizes), key=lambda one: objective(family, alpha_M, budget_ms, clock, value_L, one))
    return Solved(alpha_M, sizes, clock.predict_ms(sizes), clock.upper_ms(sizes))


def smallest(alpha_M: Tensor, clock: Clock) -> Solved:
    """The smallest network, which keeps a budget if any does."""
    sizes = {module.name: module.sizes()[0] for module in clock.parts.partition}
    return Solved(alpha_M, sizes, clock.predict_ms(sizes), clock.upper_ms(sizes))


def ladder(
    family: Family, alpha_M: Tensor, budgets_ms: Sequence[float], clock: Clock, value_L: Tensor | None = None
) -> list[Solved]:
    """Networks for several budgets, each a part of those for larger ones; in the order of the budgets."""
    found: dict[float, Solved] = {}
    within: Sizes | None = None
    for budget_ms in sorted(set(budgets_ms), reverse=True):
        found[budget_ms] = solve(family, alpha_M, budget_ms, clock, value_L, num_steps=0, within=within)
        within = found[budget_ms].sizes
    return [found[budget_ms] for budget_ms in budgets_ms]


def objective(family: Family, alpha_M: Tensor, budget_ms: float, clock: Clock, value_L: Tensor, sizes: Sizes) -> float:
    """Eq. A10 at real sizes, with the policy's fractions for the budget."""
    with torch.no_grad():
        path_L = along_path(family, alpha_M, clock, budget_ms, family.known(clock))
    return _objective(clock, sizes, (value_L * path_L).tolist(), path_L.tolist())


def sizes_at(
    family: Family,
    alpha_M: Tensor,
    budget_ms: float,
    clock: Clock,
    value_L: Tensor | None = None,
    *,
    depth: tuple[int, ...] | None = None,
    num_steps: int = 0,
    within: Sizes | None = None,
) -> dict[str, int] | None:
    """Sizes that keep a budget, at a depth, or as deep as the policy says; None if they can't at that depth."""
    with torch.no_grad():
        path_L = along_path(family, alpha_M, clock, budget_ms, family.known(clock), depth)
    held = () if depth is None else family.block_places
    fraction_L = path_L
    if value_L is not None and num_steps:
        fraction_L = reprice(clock, path_L, value_L, min(1.0, budget_ms / clock.whole_ms), num_steps)
        fraction_L[list(held)] = path_L[list(held)]
    worth_L = fraction_L if value_L is None else value_L * fraction_L
    sizes = round_to_budget(clock, fraction_L, worth_L, budget_ms, held, within)
    return sizes if clock.upper_ms(sizes) <= budget_ms else None


def along_path(
    family: Family,
    alpha_M: Tensor,
    clock: Clock,
    budget_ms: float,
    known: str,
    depth: tuple[int, ...] | None = None,
) -> Tensor:
    r"""The policy's fractions where their bound is the budget (eq. A16).

    .. math:: s(\rho') \quad \text{with} \quad \rho' = \max \{ x : \overline{\mathrm{Lat}}(s(x)) \le B \}

    What the policy says for a budget may cost more or less than it: training leaves a residual, and devices differ. Its
    fractions rise with the budget, so they are a path of nested networks, all of which training has visited; the place
    on it is found by bisection. A budget under the path's beginning gets the beginning. At a given depth the path's
    widths alone move.
    """
    modules, held = list(family.partition), () if depth is None else family.block_places

    def fractions(at: float) -> Tensor:
        fraction_L = family.plan_with(alpha_M, at, known).fraction_L.clone()
        for place, count in zip(held, depth or (), strict=True):
            fraction_L[place] = count / modules[place].num_units
        return fraction_L

    low, high = family.floor, 1.0
    with torch.no_grad():
        if clock.relaxed_upper_ms(fractions(high)) <= budget_ms:
            low = high
        while low < high * (1 - _CLOSE):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if clock.relaxed_upper_ms(fractions(middle)) <= budget_ms else (low, middle)
    return fractions(low)


def reprice(clock: Clock, fraction_L: Tensor, value_L: Tensor, rho: float, num_steps: int) -> Tensor:
    r"""Exponentiated steps on the fractions and the price of time towards the optimum of eq. A10.

    .. math:: s_\ell \leftarrow s_\ell \Big( \frac{v_\ell \bar s_\ell / s_\ell}{\mu\, \partial_\ell
        \widehat{\mathrm{Lat}}} \Big)^{\eta}, \qquad
        \mu \leftarrow \mu \Big( \frac{\widehat{\mathrm{Lat}}(s)}{B} \Big)^{2}
    """
    start_L = fraction_L.clamp_min(1e-3)
    worth_L = (value_L * start_L).clamp_min(1e-9)
    least_L = torch.tensor([module.sizes()[0] / module.num_units for module in clock.parts.partition])
    s_L, mu = start_L.clone(), None
    for _ in range(num_steps):
        at_L = s_L.clone().requires_grad_(True)
        cost = clock.ratio(at_L)
        (slope_L,) = torch.autograd.grad(cost, at_L)
        slope_L = slope_L.clamp_min(1e-6)
        if mu is None:
            mu = float((worth_L / s_L / slope_L).median())
        mu *= (float(cost.detach()) / rho) ** 2
        s_L = (s_L * (worth_L / (s_L * mu * slope_L)) ** RATE).clamp(max=1.0)
        s_L = torch.maximum(s_L, least_L)
    return s_L


def round_to_budget(
    clock: Clock,
    fraction_L: Tensor,
    worth_L: Tensor,
    budget_ms: float,
    held: Collection[int] = (),
    within: Sizes | None = None,
) -> dict[str, int]:
    """Sizes on the grid whose bound keeps the budget: rounded, then one step at a time down until it holds, then up.

    A step down is taken where it loses least worth for its time, a step up where it wins most; ``worth`` is the factor
    of the logarithm in eq. A10. Blocks are few and a step of them is large, so both roundings of theirs are tried.
    Modules at the places ``held`` stay; then the bound may be left over the budget. No size exceeds that in ``within``.
    """
    modules, grids = list(clock.parts.partition), _grids(clock, within)
    down, up = [], []
    for place, (module, fraction) in enumerate(zip(modules, fraction_L.tolist(), strict=True)):
        grid, wanted = grids[place], fraction * module.num_units
        down.append(max((i for i, size in enumerate(grid) if size <= wanted + 1e-3), default=0))
        up.append(min(down[-1] + 1, len(grid) - 1) if module.blocks and place not in held else down[-1])
    worth = worth_L.tolist()
    found = [_fit(clock, grids, start, worth, budget_ms, held) for start in ([down, up] if up != down else [down])]
    return max(found, key=lambda sizes: _objective(clock, sizes, worth, fraction_L.tolist()))


def _grids(clock: Clock, within: Sizes | None) -> list[list[int]]:
    """The sizes that every module may have."""
    return [
        [size for size in module.sizes() if within is None or size <= within[module.name]]
        for module in clock.parts.partition
    ]


def _fit(
    clock: Clock,
    grids: list[list[int]],
    place: list[int],
    worth: list[float],
    budget_ms: float,
    held: Collection[int],
) -> dict[str, int]:
    modules = list(clock.parts.partition)

    def at(places: list[int]) -> dict[str, int]:
        return {m.name: grid[i] for m, grid, i in zip(modules, grids, places, strict=True)}

    def steps(by: int) -> list[tuple[float, float, list[int]]]:
        """Every step in one direction: its worth for its time, the bound after it, and the places after it.

        Sizes that a kernel rounds up cost the same: up, such a step is free; down, it goes on to one that saves time.
        """
        found, gone = [], set(left_out(clock, at(place)))  # modules whose size is worth nothing
        for index, grid in enumerate(grids):
            if index in held or modules[index].name in gone:
                continue
            for after in range(place[index] + 1, len(grid)) if by > 0 else range(place[index] - 1, -1, -1):
                moved = [*place[:index], after, *place[index + 1 :]]
                then = clock.upper_ms(at(moved))
                if then != upper or by > 0:
                    gain = worth[index] * abs(math.log(max(grid[after], 0.5) / max(grid[place[index]], 0.5)))
                    found.append((gain / abs(then - upper) if then != upper else math.inf, then, moved))
                    break
        return found

    upper = clock.upper_ms(at(place))
    while upper > budget_ms and (options := steps(-1)):
        _, upper, place = min(options)
    while options := [step for step in steps(1) if step[1] <= budget_ms]:
        _, upper, place = max(options)
    return at(place)


def _objective(clock: Clock, sizes: Mapping[str, int], worth: list[float], wanted: list[float]) -> float:
    """Eq. A10 at sizes; a module of a block that is left out counts as the policy had it."""
    gone, total = set(left_out(clock, sizes)), 0.0
    for module, each, fraction in zip(clock.parts.partition, worth, wanted, strict=True):
        share = fraction if module.name in gone else sizes[module.name] / module.num_units
        total += each * math.log(max(share, 1e-3))
    return total


def left_out(clock: Clock, sizes: Sizes) -> list[str]:
    """Modules inside blocks that sizes leave out."""
    partition = clock.parts.partition
    gone = [
        name
        for module in partition
        for unit, (name, _) in enumerate(module.blocks)
        if unit not in module.kept(sizes[module.name])
    ]
    return [module.name for module in partition if any(module.name.startswith(f"{block}.") for block in gone)]


def refine_mixture(
    loss: Callable[[Tensor], float], alpha_M: Tensor, *, num_steps: int = 1, reach: float = 0.3, rate: float = 2.0
) -> tuple[Tensor, int]:
    r"""Exponentiated steps on the mixture by values of the support loss alone (eq. A11).

    .. math:: g_m = \frac{\ell\big((1 - t)\alpha + t e_m\big) - \ell(\alpha)}{t}, \qquad
        \alpha_m \leftarrow \alpha_m e^{-\eta g_m} \big/ \textstyle\sum_n \alpha_n e^{-\eta g_n}

    ``reach`` is :math:`t`, ``rate`` :math:`\eta`. A step is taken only where it lowers the loss; the first that
    does not is the last.

    Returns:
        The mixture, and how many times the loss was asked for.
    """
    num_experts = len(alpha_M)
    if num_experts == 1:
        return alpha_M, 0
    here, asked, corners_MM = loss(alpha_M), 1, torch.eye(num_experts)
    for _ in range(num_steps):
        slope_M = torch.tensor([(loss((1 - reach) * alpha_M + reach * e_M) - here) / reach for e_M in corners_MM])
        moved_M = (alpha_M.clamp_min(1e-6).log() - rate * slope_M).softmax(-1)
        there, asked = loss(moved_M), asked + num_experts + 1
        if there >= here:
            break
        alpha_M, here = moved_M, there
    return alpha_M, asked
