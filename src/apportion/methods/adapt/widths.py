r"""Widths of a budget, searched for once its depth is settled: others of the same bound, judged on training episodes.

.. math:: s' = \mathrm{round}_B\big(s_\ell\, e^{\sigma \epsilon_\ell z_\ell}\big), \quad z_\ell \sim \mathrm{Bern}(p),
    \; \epsilon_\ell \sim N(0, 1), \qquad s \leftarrow s' \text{ if } \hat{\mathbb E}\,\mathcal L(s') <
    \hat{\mathbb E}\,\mathcal L(s) \quad \text{(eq. A26)}

Slopes say what a bit more of a module is worth and not what a third less of it loses: a slice of few units is far from
its neighbours. Every candidate is filled to the budget, so the losses of two compare at equal cost. Shape letters: N
rows, E episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from apportion.methods.adapt.clock import Clock, Sizes
from apportion.methods.adapt.episodes import logits
from apportion.methods.adapt.family import Family
from apportion.methods.adapt.pool import Pool
from apportion.methods.adapt.solve import round_to_budget
from apportion.models.network import read_out
from apportion.tasks.episode import Episode

SPREAD = 0.6  # of the logarithm of a width that is changed
SHARE = 0.4  # of the widths that are changed in a candidate
ROWS = 512  # run at once
_TRIES = 20  # for a candidate that was not judged yet


def search_widths(
    clock: Clock,
    start: Sizes,
    budget_ms: float,
    loss: Callable[[Sizes], float],
    num_candidates: int,
    generator: np.random.Generator,
    within: Sizes | None = None,
) -> tuple[dict[str, int], float, float]:
    """The best sizes found with as many blocks as the start has, their loss, and the start's.

    Args:
        start: sizes that keep the budget.
        within: sizes that none may exceed.
    """
    modules = list(clock.parts.partition)
    held = [place for place, module in enumerate(modules) if module.blocks]
    best, least = dict(start), loss(start)
    first, seen = least, {tuple(best.values())}
    for _ in range(num_candidates):
        for _ in range(_TRIES):
            wanted_L = torch.tensor([best[module.name] / module.num_units for module in modules])
            factor_L = np.exp(SPREAD * generator.standard_normal(len(modules)))
            changed_L = generator.random(len(modules)) < SHARE
            changed_L[held] = False
            wanted_L = (wanted_L * torch.from_numpy(np.where(changed_L, factor_L, 1.0)).float()).clamp(1e-3, 1.0)
            sizes = round_to_budget(clock, wanted_L, wanted_L, budget_ms, held, within)
            if tuple(sizes.values()) not in seen and clock.upper_ms(sizes) <= budget_ms:
                break
        else:
            break  # there are hardly any others
        seen.add(tuple(sizes.values()))
        if (there := loss(sizes)) < least:
            best, least = sizes, there
    return best, least, first


class SliceLoss:
    """The mean loss of episodes' queries by a slice under one mixture, all episodes' rows run together."""

    def __init__(self, family: Family, alpha_M: Tensor, drawn: Sequence[tuple[Pool, Episode]]) -> None:
        self.family, self.alpha_M = family, alpha_M
        self.episodes = [episode for _, episode in drawn]
        rows = [pool.at(np.concatenate([one.support.row_N, one.query.row_N])) for pool, one in drawn]
        self.inputs = joined(rows)
        self.counts = [len(one.support) + len(one.query) for one in self.episodes]

    @torch.no_grad()
    def __call__(self, sizes: Sizes) -> float:
        family, lost = self.family, 0.0
        parts = zip(*(tensor.split(ROWS) for tensor in self.inputs.values()), strict=True)
        on_cpu = next(iter(self.inputs.values())).device.type == "cpu"
        sliced = family.sliced(self.alpha_M, sizes) if on_cpu else None  # on a GPU it takes longer than it saves
        gate_G, keep_G = family.gates(self.alpha_M), family.keep_of(sizes)
        found = []
        for part in parts:
            inputs = dict(zip(self.inputs, part, strict=True))
            found.append(family.embed(inputs, gate_G, keep_G) if sliced is None else read_out(sliced, inputs))
        features = torch.cat(found).float().split(self.counts)
        for episode, feature_NF in zip(self.episodes, features, strict=True):
            label_Q = torch.from_numpy(episode.query.label_N).to(feature_NF.device)
            lost += float(functional.cross_entropy(logits(family, episode, feature_NF), label_Q))
        return lost / len(self.episodes)


def joined(some: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Inputs one after the other; texts are filled up to the longest with zeros, which their masks leave out.

    Example:
        >>> joined([{"ids": torch.ones(1, 2)}, {"ids": torch.ones(1, 3)}])["ids"].tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    found = {}
    for name in some[0]:
        tensors = [inputs[name] for inputs in some]
        if tensors[0].dim() == 2:
            longest = max(tensor.shape[1] for tensor in tensors)
            tensors = [functional.pad(tensor, (0, longest - tensor.shape[1])) for tensor in tensors]
        found[name] = torch.cat(tensors)
    return found
