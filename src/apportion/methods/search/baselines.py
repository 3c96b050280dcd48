"""What iso-cost search is compared with, in the same code path: the same evaluations, evidence and ledger.

Normalising by parameters or FLOPs is ``IsoCost`` on counted costs; rejecting above a budget is ``Uncompensated`` with a
one-sided band; the two below need more than another neighbourhood.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from apportion.core.knob import Setting
from apportion.errors import ApportionError
from apportion.methods.search.evidence import Evidence, Radius
from apportion.methods.search.loop import Found, Search, SearchConfig
from apportion.methods.search.neighbours import Neighbours, Uncompensated
from apportion.methods.search.proxy import Sampler
from apportion.methods.search.space import Space


def penalised(
    space: Space,
    sampler: Sampler,
    radius: Radius,
    config: SearchConfig,
    neighbours: Uncompensated,
    starts: Sequence[Setting],
    *,
    cost: Callable[[Setting], float],
    budget: float,
    num_penalties: int = 6,
) -> Found:
    r"""Maximises :math:`f - \lambda g / B` with :math:`\lambda` tuned to hit the budget (eq. I20).

    Bisection on a logarithmic scale; every penalty gets the same share of the evaluations and reuses those before it.
    The best result within the budget is returned, or the cheapest where none is.
    """
    low, high = 1e-2, 1e3
    found: list[tuple[float, Found]] = []
    limit = sampler.max_evaluations
    for number in range(num_penalties):
        penalty = (low * high) ** 0.5
        if limit is not None:
            sampler.max_evaluations = limit * (number + 1) / num_penalties
        sampler.rewind()
        search = Search(
            space,
            sampler,
            radius,
            config,
            utility=lambda arch, value, penalty=penalty: value - penalty * cost(arch) / budget,  # type: ignore[misc]
        )
        one = search.run(neighbours, starts)
        found.append((one.utility.mean + penalty * cost(one.arch) / budget, one))
        if cost(one.arch) > budget:
            low = penalty
        else:
            high = penalty
    within = [pair for pair in found if cost(pair[1].arch) <= budget]
    if not within:
        return min((one for _, one in found), key=lambda one: cost(one.arch))
    return max(within, key=lambda pair: pair[0])[1]


def random_local(
    sampler: Sampler, evidence: Evidence, neighbours: Neighbours, layers: Sequence[str], start: Setting, seed: int
) -> Setting:
    """Random local mutation: a random neighbour is evaluated once and kept when its value is higher."""
    if sampler.max_evaluations is None:
        raise ApportionError("random local search ends with its evaluations; give it a number of them")
    rng = random.Random(seed)
    here = start
    if sampler.journal.step == 0:
        sampler.journal.note("start", start, neighbours.costs(start), {"random local": seed})
    while True:
        around = neighbours.around(here, layers).archs
        if not around:
            return here
        rival = rng.choice(around)
        need = [arch for arch in (here, rival) if not evidence.num_pulls(arch)]
        values = sampler.draw(need or [rival])
        if values is None:
            return here
        for arch, value in zip(need or [rival], values, strict=True):
            evidence.add(arch, value)
        if evidence.mean(rival) > evidence.mean(here):
            here = rival
            neighbours = neighbours.rebased(here)
