"""The mutation operator M: apply a micro-change, then compensate until the cost is back in the band, or say why not."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from apportion.core.knob import Setting
from apportion.errors import ApportionError
from apportion.methods.search.band import Band, Costs
from apportion.methods.search.space import Ladder, Proposal, Rung, Space

Predict: TypeAlias = Callable[[Setting], Costs]
Method: TypeAlias = Literal["auto", "bisect", "directed", "bracket", "finite"]
METHODS: tuple[Method, ...] = ("auto", "bisect", "directed", "bracket", "finite")


@dataclass(frozen=True)
class Neighbour:
    """A compensated candidate: what was proposed, what it became, at which estimated cost, after how many queries."""

    proposal: Proposal
    arch: Setting
    costs: Costs
    drift: float
    num_queries: int


@dataclass(frozen=True)
class Infeasible:
    """A proposal that no compensation brings into the band, and why."""

    proposal: Proposal
    reason: str
    num_queries: int


def mutate(
    space: Space,
    arch: Setting,
    proposal: Proposal,
    band: Band,
    predict: Predict,
    *,
    method: Method = "auto",
    span: int = 0,
    num: int = 1,
) -> list[Neighbour] | Infeasible:
    r"""M_{h,τ}(x; π): the candidates of a proposal inside the band, the preferred one first (eq. I14).

    .. math:: M_{h,\tau}(x; \pi) = x^\pi(s^*, p^*), \quad (s^*, p^*) \in \mathcal S \text{ with }
        \hat g(x^\pi(s, p)) \in \text{band}

    ``bisect``, ``directed`` and ``bracket`` return, per precision, the rung in the band with the least drift (the width
    factor closest to 1) and order the precisions by drift; ``finite`` looks at every rung and orders by the distance of
    the cost from the anchor, ties by drift. ``auto`` bisects ordered ladders (brackets them where ``span`` inversions
    were found) and looks at sets whole.

    Args:
        method: how ordered ladders are searched; sets are always looked at whole.
        span: K of K-quasi-monotonicity: how many rungs apart costs may be out of order.
        num: how many candidates to return at most; the paper's operator returns one.
    """
    if method not in METHODS:
        raise ApportionError(f"unknown compensation {method!r}; possible are {', '.join(METHODS)}")
    query = _Queries(predict)
    tentative = proposal.apply(arch)
    found: list[tuple[tuple[float, float], Rung]] = []
    for ladder in space.ladders(tentative, proposal.layer):
        if not ladder.rungs:
            continue
        if not ladder.ordered or method == "finite":
            inside = [rung for rung in ladder.rungs if band.holds(query(rung.arch))]
            found += [((band.deviation(query(rung.arch)), rung.drift), rung) for rung in inside]
        else:
            index = _search(ladder, band, query, method, span)
            if index is not None:
                rung = ladder.rungs[index]
                found.append(((rung.drift, band.deviation(query(rung.arch))), rung))
    found.sort(key=lambda pair: pair[0])  # stable: the space's own order breaks what ties are left
    chosen = {rung.arch: rung for _, rung in found if rung.arch != arch}
    if chosen:
        return [
            Neighbour(proposal, rung.arch, query(rung.arch), rung.drift, query.count)
            for rung in list(chosen.values())[:num]
        ]
    if found:
        return Infeasible(proposal, "compensation undoes the change", query.count)
    nearest = query.nearest(band)
    if nearest is None:
        return Infeasible(proposal, "the space offers no compensation", query.count)
    return Infeasible(proposal, f"at best {band.explain(nearest[1])}", query.count)


class _Queries:
    """Cost queries, each architecture once, counted."""

    def __init__(self, predict: Predict) -> None:
        self.predict = predict
        self.known: dict[Setting, Costs] = {}

    def __call__(self, arch: Setting) -> Costs:
        if arch not in self.known:
            self.known[arch] = self.predict(arch)
        return self.known[arch]

    @property
    def count(self) -> int:
        return len(self.known)

    def nearest(self, band: Band) -> tuple[float, Costs] | None:
        return min(((band.deviation(costs), costs) for costs in self.known.values()), key=lambda p: p[0], default=None)


def _search(ladder: Ladder, band: Band, query: _Queries, method: Method, span: int) -> int | None:
    rungs = ladder.rungs

    def position(index: int) -> int:
        return band.position(query(rungs[index].arch))

    if method == "directed":
        return _directed(ladder, position)
    if method == "bracket" or (method == "auto" and span > 0):
        inside = _bracket(ladder, position, span)
        return min(
            inside,
            key=lambda index: (rungs[index].drift, band.deviation(query(rungs[index].arch))),
            default=None,
        )
    return _bisect(ladder, position)


def _bisect(ladder: Ladder, position: Callable[[int], int]) -> int | None:
    """On costs that never fall along the ladder: the ends of the band by bisection, then the least drift between."""
    indices = range(len(ladder.rungs))
    first = bisect.bisect_left(indices, True, key=lambda index: not _too_low(position(index)))
    last = bisect.bisect_left(indices, True, key=lambda index: _too_high(position(index))) - 1
    return min(range(first, last + 1), key=lambda index: ladder.rungs[index].drift, default=None)


def _directed(ladder: Ladder, position: Callable[[int], int]) -> int | None:
    """From no compensation, one rung at a time towards the band; the first inside has the least drift on its side."""
    index = ladder.nearest
    here = position(index)
    step = {1: -1, -1: 1}.get(here, 0)
    while step and 0 <= index + step < len(ladder.rungs):
        index += step
        there = position(index)
        if there == 0 or there == 2 or there == -here:
            return index if there == 0 else None
    return index if here == 0 else None


def _bracket(ladder: Ladder, position: Callable[[int], int], span: int) -> list[int]:
    r"""All rungs in the band, on K-quasi-monotone costs: a probe rules out what is K rungs beyond it (eq. I15).

    .. math:: \hat g_m < \text{band} \Rightarrow \hat g_i < \text{band} \;\forall i < m - K, \qquad
        \hat g_m > \text{band} \Rightarrow \hat g_i > \text{band} \;\forall i > m + K
    """
    num = len(ladder.rungs)
    low, high = 0, num - 1  # all rungs below low are too cheap
    while high - low > 2 * span + 1:
        middle = (low + high) // 2
        if _too_low(position(middle)):
            low = middle - span
        else:
            high = middle
    first = low
    low, high = first, num - 1  # all rungs above high are too dear
    while high - low > 2 * span + 1:
        middle = (low + high + 1) // 2
        if _too_high(position(middle)):
            high = middle + span
        else:
            low = middle
    return [index for index in range(first, high + 1) if position(index) == 0]


def _too_high(position: int) -> bool:
    return position in (1, 2)


def _too_low(position: int) -> bool:
    return position in (-1, 2)
