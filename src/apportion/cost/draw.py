"""Drawing configurations the way budgets are met: a random order of giving, down to a random share of the work."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from apportion.cost.parts import Parts

Sizes = Mapping[str, int]


def draw_sizes(parts: Parts, rng: random.Random, *, least: float = 0.1) -> dict[str, int]:
    """How many units every module keeps in one random configuration.

    A target share of the operations is drawn, and a willingness to give for every module; modules then give one step
    at a time, the most willing for its depth first, until the target is reached. So all degrees of pruning occur, even
    and uneven, and modules that a solver would favour or spare.
    """
    modules = list(parts.partition)
    target = rng.uniform(least, 1.0)
    willing = {module.name: rng.lognormvariate(0.0, 1.0) for module in modules}
    sizes = {module.name: module.num_units for module in modules}
    total = sum(part.flops for part in parts.parts)
    while sum(_work(parts, sizes)) > target * total:
        givers = [module for module in modules if sizes[module.name] > module.sizes()[0]]
        if not givers:
            break
        module = max(givers, key=lambda m: willing[m.name] * sizes[m.name] / m.num_units)
        below = [size for size in module.sizes() if size < sizes[module.name]]
        steps = max(1, len(module.sizes()) // 8)
        sizes[module.name] = below[-min(steps, len(below))]
    return sizes


def draw_many(parts: Parts, count: int, seed: int) -> list[dict[str, int]]:
    """Distinct configurations, the whole network never among them."""
    rng = random.Random(seed)
    whole = {module.name: module.num_units for module in parts.partition}
    drawn: list[dict[str, int]] = []
    for _ in range(50 * count):
        sizes = draw_sizes(parts, rng)
        if sizes != whole and sizes not in drawn:
            drawn.append(sizes)
        if len(drawn) == count:
            return drawn
    return drawn


def _work(parts: Parts, sizes: Sizes) -> Sequence[float]:
    shares = parts.shares(parts.partition.keep(sizes))
    return [part.flops * shares[part.name] for part in parts.parts]
