"""Which sets of open groups calibrate shared mode: anchors, random ones, and such as budgets open."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from apportion.methods.adapt.groups import Groups
from apportion.methods.adapt.shared_clock import SharedClock


def anchor_opens(groups: Groups) -> list[Tensor]:
    """Every kind of module alone: its first groups, half, and all; then nothing, and everything."""
    rank_G, module_G = groups.rank_G(), groups.module_G()
    kinds = [module.kind for module in groups.partition]
    size_G = torch.tensor([groups.size(module) for module in groups.partition])[module_G]
    found = []
    for kind in dict.fromkeys(kinds):
        own_G = torch.tensor([other == kind for other in kinds])[module_G]
        found += [own_G & (rank_G == 0), own_G & (rank_G < size_G / 2), own_G]
    return [*found, torch.zeros_like(own_G), torch.ones_like(own_G)]


def draw_opens(groups: Groups, count: int, seed: int) -> list[Tensor]:
    """Random sets of open groups: a level for all, and a lean of every module, so that some sleep and some are full."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        level, parts = rng.random(), []
        for module in groups.partition:
            size = groups.size(module)
            some = rng.sample(range(size), round(size * min(1.0, level * rng.lognormvariate(0.0, 1.0))))
            parts.append(torch.zeros(size, dtype=torch.bool).index_fill_(0, torch.tensor(some, dtype=torch.long), True))
        drawn.append(torch.cat(parts))
    return drawn


def draw_picks(clock: SharedClock, count: int, seed: int) -> list[Tensor]:
    """What budgets open for random values: budgets from the backbone's to the whole's, evenly.

    A clock that is wrong makes its errors where ``choose`` finds them, so its bound is calibrated there. Some modules
    are worth more than others, and in a module a few groups or most are worth something.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    floor_ms, whole_ms = clock.floor_ms(), clock.upper_ms(torch.ones(len(clock.module_G), dtype=torch.bool))
    picks = []
    for _ in range(count):
        lean_L = torch.tensor([rng.lognormvariate(0.0, 0.5) for _ in clock.parts])
        value_G = torch.rand(len(clock.module_G), generator=generator) ** rng.uniform(0.5, 4.0)
        picks.append(clock.choose(value_G * lean_L[clock.module_G], rng.uniform(floor_ms, whole_ms)).open_G)
    return picks
