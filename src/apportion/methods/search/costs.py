"""Costs for a search: several sources side by side, and estimates that follow what is measured during the search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from apportion.core.knob import Setting
from apportion.core.meter import Reading
from apportion.cost.distortion import RelativeError, relative_error
from apportion.cost.online import OnlineAffine
from apportion.errors import ApportionError
from apportion.methods.search.band import Band, Costs
from apportion.methods.search.mutate import Infeasible, Method, Neighbour, Predict, mutate
from apportion.methods.search.neighbours import Around, gather
from apportion.methods.search.space import Space

Measure: TypeAlias = Callable[[Sequence[Setting]], Mapping[Setting, Costs]]
"""Measures architectures side by side; one that could not be measured is missing from the answer."""


def combined(*sources: Predict) -> Predict:
    """All costs of several sources, such as devices, as one vector."""

    def predict(arch: Setting) -> Costs:
        joined: dict[str, Reading] = {}
        for source in sources:
            costs = source(arch)
            if joined.keys() & costs.keys():
                raise ApportionError(
                    f"two cost sources both give {min(joined.keys() & costs.keys())!r}; name each once"
                )
            joined |= costs
        return joined

    return predict


@dataclass
class Recalibrated:
    """Estimates corrected online by what was measured (eq. K20), one affine correction per key."""

    predict: Predict
    scale: Costs
    forgetting: float = 0.98
    _correction: dict[str, OnlineAffine] = field(default_factory=dict)
    _pairs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def __call__(self, arch: Setting) -> Costs:
        return {key: self._corrected(key, reading) for key, reading in self.predict(arch).items()}

    def update(self, arch: Setting, measured: Costs) -> None:
        """Learns from one measured architecture; remembers how wrong it was just before."""
        raw, before = self.predict(arch), self(arch)
        for key, reading in measured.items():
            self._pairs.setdefault(key, []).append((before[key].value, reading.value))
            state = self._correction.get(key) or OnlineAffine(self.scale[key].value, self.forgetting)
            self._correction[key] = state.update(raw[key].value, reading.value)

    def error(self, key: str, delta: float = 0.05) -> RelativeError | None:
        """How wrong the estimates were on what was measured since, each judged before it was learnt from (eq. K11)."""
        pairs = self._pairs.get(key)
        if not pairs:
            return None
        return relative_error([pair[0] for pair in pairs], [pair[1] for pair in pairs], delta)

    def _corrected(self, key: str, reading: Reading) -> Reading:
        state = self._correction.get(key)
        value = reading.value if state is None else state.correction()(reading.value)
        return Reading(value=value, unit=reading.unit, stderr=reading.stderr, count=reading.count)


@dataclass(frozen=True)
class MeasuredIsoCost:
    """The iso-cost neighbourhood whose members were all measured: estimates propose, the device decides.

    For every proposal the ``num`` best compensations by estimate, in a band wider by ``reach``, are measured side by
    side; those whose confidence interval lies in the band are candidates. The estimates learn from each measurement.
    """

    space: Space
    band: Band
    estimate: Recalibrated
    measure: Measure
    method: Method = "auto"
    span: int = 0
    num: int = 2
    reach: float = 2.0
    _known: dict[Setting, Costs | None] = field(default_factory=dict, repr=False, compare=False)
    _cache: dict[tuple[Setting, str], list[Neighbour | Infeasible]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def around(self, arch: Setting, layers: Sequence[str]) -> Around:
        found: list[Neighbour | Infeasible] = []
        for layer in layers:
            if (arch, layer) not in self._cache:
                self._cache[arch, layer] = self._make(arch, layer)
            found += self._cache[arch, layer]
        return gather(arch, found)

    def rebased(self, arch: Setting) -> MeasuredIsoCost:
        return self

    def excess(self, costs: Costs) -> float:
        return self.band.excess(costs)

    def costs(self, arch: Setting) -> Costs:
        self._read([arch])
        known = self._known[arch]
        if known is None:
            raise ApportionError(f"{dict(arch)} could not be measured; choose another start")
        return known

    def correct(self, arch: Setting, measured: Costs) -> None:
        """Takes a better measurement of an architecture; whether it is in the band is judged on it from now on."""
        self._known[arch] = measured
        self._cache.clear()

    def _make(self, arch: Setting, layer: str) -> list[Neighbour | Infeasible]:
        wide = Band(
            anchor={key: Reading(value=one.value, unit=one.unit) for key, one in self.band.anchor.items()},
            tolerance={key: min(0.99, self.reach * tau) for key, tau in self.band.tolerance.items()},
            kind=self.band.kind,
        )
        made: list[Neighbour | Infeasible] = []
        proposed: list[Neighbour] = []
        for proposal in self.space.proposals(arch, layer):
            mutated = mutate(
                self.space, arch, proposal, wide, self.estimate, method=self.method, span=self.span, num=self.num
            )
            if isinstance(mutated, Infeasible):
                made.append(mutated)
            else:
                proposed += mutated
        self._read([one.arch for one in proposed])
        settled: dict[str, list[Neighbour]] = {}
        for one in proposed:
            settled.setdefault(str(one.proposal), []).append(one)
        for tries in settled.values():
            inside = [one for one in tries if (costs := self._known[one.arch]) is not None and self.band.holds(costs)]
            if inside:
                best = min(inside, key=lambda one: (one.drift, self.band.deviation(self._known[one.arch] or {})))
                costs = self._known[best.arch]
                assert costs is not None
                made.append(Neighbour(best.proposal, best.arch, costs, best.drift, best.num_queries))
                continue
            nearest = [costs for one in tries if (costs := self._known[one.arch]) is not None]
            reason = f"measured, {self.band.explain(min(nearest, key=self.band.deviation))}" if nearest else "died"
            made.append(Infeasible(tries[0].proposal, reason, tries[0].num_queries))
        return made

    def _read(self, archs: Sequence[Setting]) -> None:
        new = [arch for arch in dict.fromkeys(archs) if arch not in self._known]
        if not new:
            return
        measured = self.measure(new)
        for arch in new:
            self._known[arch] = measured.get(arch)
            if arch in measured:
                self.estimate.update(arch, measured[arch])
