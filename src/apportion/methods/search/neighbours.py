"""Neighbourhoods: which candidates stand beside an architecture. Iso-cost, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from apportion.core.knob import Setting
from apportion.methods.search.band import Band, Costs
from apportion.methods.search.mutate import Infeasible, Method, Neighbour, Predict, mutate
from apportion.methods.search.space import Space


@dataclass(frozen=True)
class Around:
    """The candidates at some layers, each architecture once, and the proposals that came to nothing."""

    neighbours: tuple[Neighbour, ...]
    infeasible: tuple[Infeasible, ...]

    @property
    def archs(self) -> list[Setting]:
        return [neighbour.arch for neighbour in self.neighbours]


class Neighbours(Protocol):
    """Candidates beside an architecture, at some of its layers."""

    def around(self, arch: Setting, layers: Sequence[str]) -> Around: ...

    def rebased(self, arch: Setting) -> Neighbours:
        """The neighbourhood to use once ``arch`` is the incumbent; itself where it is anchored."""
        ...

    def excess(self, costs: Costs) -> float: ...

    def costs(self, arch: Setting) -> Costs: ...


@dataclass(frozen=True)
class IsoCost:
    """Compensated micro-changes inside the band; anchored, unless ``per_step`` moves the band with the incumbent.

    With costs that count parameters or FLOPs instead of reading a device, this is the baseline that normalises by them.
    """

    space: Space
    band: Band
    predict: Predict
    method: Method = "auto"
    span: int = 0
    num: int = 1
    per_step: bool = False
    _cache: dict[tuple[Setting, str], list[Neighbour | Infeasible]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def around(self, arch: Setting, layers: Sequence[str]) -> Around:
        found: list[Neighbour | Infeasible] = []
        for layer in layers:
            if (arch, layer) not in self._cache:
                made: list[Neighbour | Infeasible] = []
                for proposal in self.space.proposals(arch, layer):
                    mutated = mutate(
                        self.space,
                        arch,
                        proposal,
                        self.band,
                        self.predict,
                        method=self.method,
                        span=self.span,
                        num=self.num,
                    )
                    made += [mutated] if isinstance(mutated, Infeasible) else mutated
                self._cache[arch, layer] = made
            found += self._cache[arch, layer]
        return gather(arch, found)

    def rebased(self, arch: Setting) -> IsoCost:
        if not self.per_step:
            return self
        band = Band(
            anchor=self.costs(arch),
            tolerance=self.band.tolerance,
            kind=self.band.kind,
            z=self.band.z,
            eta=self.band.eta,
        )
        return IsoCost(self.space, band, self.predict, self.method, self.span, self.num, True)

    def excess(self, costs: Costs) -> float:
        return self.band.excess(costs)

    def costs(self, arch: Setting) -> Costs:
        return self.predict(arch)


@dataclass(frozen=True)
class Uncompensated:
    """Plain micro-changes. With a band they are rejected outside it: give a one-sided band to reject above a budget,
    None to allow all, as the cost penalty does."""

    space: Space
    band: Band | None
    predict: Predict

    def around(self, arch: Setting, layers: Sequence[str]) -> Around:
        found: list[Neighbour | Infeasible] = []
        for layer in layers:
            for proposal in self.space.proposals(arch, layer):
                tentative = proposal.apply(arch)
                costs = self.predict(tentative)
                if self.band is None or self.band.holds(costs):
                    found.append(Neighbour(proposal, tentative, costs, 0.0, 1))
                else:
                    found.append(Infeasible(proposal, self.band.explain(costs), 1))
        return gather(arch, found)

    def rebased(self, arch: Setting) -> Uncompensated:
        return self

    def excess(self, costs: Costs) -> float:
        return 0.0 if self.band is None else self.band.excess(costs)

    def costs(self, arch: Setting) -> Costs:
        return self.predict(arch)


def gather(arch: Setting, found: Sequence[Neighbour | Infeasible]) -> Around:
    """The candidates, each once and none of them the architecture itself, apart from what came to nothing."""
    first: dict[Setting, Neighbour] = {}
    for one in found:
        if isinstance(one, Neighbour) and one.arch != arch:
            first.setdefault(one.arch, one)
    return Around(tuple(first.values()), tuple(one for one in found if isinstance(one, Infeasible)))
