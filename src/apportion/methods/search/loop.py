"""The search: sweeps of cost-neutral micro-changes until a whole sweep changes nothing, and the claim that follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from apportion.core.knob import Setting
from apportion.errors import ApportionError
from apportion.methods.search.band import Costs
from apportion.methods.search.evidence import Evidence, Interval, Radius
from apportion.methods.search.neighbours import Around, Neighbours
from apportion.methods.search.proxy import FULL, Journal, Sampler
from apportion.methods.search.race import Fidelity, race
from apportion.methods.search.select import RULES, Decision, Rule, certified_epsilon, climb, select
from apportion.methods.search.space import Space

Schedule = Literal["pooled", "per-layer"]


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How decisions are made.

    ``epsilon`` is the difference in utility that matters, ``confidence`` that of the final claim. ``schedule``:
    ``pooled`` keeps all samples of an architecture for good and spends delta over architectures (every decision at the
    full epsilon); ``per-layer`` is the paper's: fresh samples at every layer, epsilon / L and delta / L each, delta
    over sweeps ``s`` by 1 / (s (s + 1)). ``scope``: arms of one layer at a time, or of the whole neighbourhood.
    ``climb`` first follows means from the ``num_climbs`` most promising starts, which costs few samples and at most
    ``climb_share`` of the evaluations; the best goes on, and the claim comes from the sweeps afterwards.
    """

    epsilon: float
    confidence: float = 0.95
    rule: Rule = "lucb"
    schedule: Schedule = "pooled"
    scope: Literal["layer", "neighbourhood"] = "layer"
    settle: Literal["better", "best"] = "better"
    initial: int = 1
    climb: bool = True
    climb_samples: tuple[int, int] = (1, 2)
    climb_share: float = 0.5
    num_climbs: int = 2
    max_sweeps: int = 100

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0.0):
            raise ApportionError(f"epsilon is {self.epsilon!r}; give a difference in utility above 0 that matters")
        if not 0.0 < self.confidence < 1.0:
            raise ApportionError(f"confidence is {self.confidence!r}; give a share above 0 and below 1, such as 95%")
        if self.rule not in RULES:
            raise ApportionError(f"unknown selection rule {self.rule!r}; possible are {', '.join(RULES)}")
        if min(self.initial, self.max_sweeps, self.num_climbs, *self.climb_samples) < 1:
            raise ApportionError("initial samples, climbs and sweeps must be at least 1")

    @property
    def delta(self) -> float:
        return 1.0 - self.confidence


@dataclass(frozen=True)
class Claim:
    """What holds at the stated confidence: no neighbour of the architecture is better by more than ``epsilon``.

    ``epsilon`` is infinite where some neighbour was never evaluated. ``as_asked`` says whether it is as small as asked;
    where evaluations ran out it is what the evidence supports, no more.
    """

    epsilon: float
    asked: float
    confidence: float
    num_neighbours: int

    @property
    def as_asked(self) -> bool:
        return self.epsilon <= self.asked * (1.0 + 1e-9)

    def to_json(self) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "asked": self.asked,
            "as_asked": self.as_asked,
            "confidence": self.confidence,
            "num_neighbours": self.num_neighbours,
        }


@dataclass(frozen=True)
class Found:
    """Where a search ended, what is claimed of it, and what it took."""

    arch: Setting
    start: Setting
    costs: Costs
    utility: Interval
    claim: Claim
    num_evaluations: int
    spent: float
    num_moves: int
    num_sweeps: int
    outcome: str
    drift: float = 0.0
    path: tuple[Setting, ...] = field(default=(), repr=False)


class Search:
    """One search: holds the evidence, so that several starts, anchors or penalties share what was evaluated."""

    def __init__(
        self,
        space: Space,
        sampler: Sampler,
        radius: Radius,
        config: SearchConfig,
        *,
        utility: Callable[[Setting, float], float] | None = None,
        fidelities: Sequence[Fidelity] = (),
    ) -> None:
        """``utility`` turns a raw value into what is maximised (the penalty baseline); ``fidelities`` come before the
        full one, from the cheapest, and thin out rivals by racing."""
        self.space, self.sampler, self.radius, self.config = space, sampler, radius, config
        self.utility = utility or (lambda arch, value: value)
        self.fidelities = tuple(fidelities)
        share = config.delta / (1 + len(self.fidelities))  # every fidelity has intervals of its own
        self.evidence = Evidence(radius, share)
        self.low_evidence = {fidelity.name: Evidence(fidelity.radius, share) for fidelity in self.fidelities}

    @property
    def journal(self) -> Journal:
        return self.sampler.journal

    def run(self, neighbours: Neighbours, starts: Sequence[Setting]) -> Found:
        """Climbs from every start, then sweeps from the best until a whole sweep changes nothing."""
        if not starts:
            raise ApportionError("a search needs at least one start")
        for start in starts:
            self.space.check(start)
        state = _State(starts[0], neighbours, {starts[0]}, [starts[0]])
        begin = neighbours.costs(starts[0])
        if self.journal.step == 0:
            self.journal.note("start", starts[0], begin, {"starts": [dict(start) for start in starts]})
        if self.config.climb:
            ends = []
            climbs = self._promising(starts)
            for number, start in enumerate(climbs):
                here = _State(start, neighbours.rebased(start), {start}, [start])
                self._climb(here, self.config.climb_share * (number + 1) / len(climbs))
                ends.append(here)
            measured = [one for one in ends if self.evidence.num_pulls(one.arch)] or ends
            state = max(measured, key=lambda one: self.evidence.mean(one.arch))
        return self._certify(state, starts[0], begin)

    def _draw(self, evidence: Evidence, fidelity: str = FULL) -> Callable[[Sequence[Setting]], bool]:
        def draw(archs: Sequence[Setting]) -> bool:
            values = self.sampler.draw(archs, fidelity)
            for arch, value in zip(archs, values or (), strict=values is not None):
                evidence.add(arch, self.utility(arch, value))
            return values is not None

        return draw

    def _groups(self) -> list[list[str]]:
        layers = list(self.space.layers)
        return [layers] if self.config.scope == "neighbourhood" else [[layer] for layer in layers]

    def _promising(self, starts: Sequence[Setting]) -> list[Setting]:
        """The starts to climb from: the first, and the best of the others after one evaluation each."""
        first, *others = starts
        room = self.sampler.left if self.sampler.max_evaluations is None else 0.25 * self.sampler.max_evaluations
        others = others[: max(0, int(min(room, 10**6)) - 1)]
        if not others or not self._draw(self.evidence)(starts[: len(others) + 1]):
            return [first]
        best = sorted(others, key=self.evidence.mean, reverse=True)
        ranked = sorted([first, *best[: self.config.num_climbs - 1]], key=self.evidence.mean, reverse=True)
        return ranked[: self.config.num_climbs]

    def _climb(self, state: _State, share: float) -> None:
        """Follows means until a whole round changes nothing, or its share of the evaluations is used."""
        first, final = self.config.climb_samples
        limit = self.sampler.max_evaluations
        changed = True
        while changed:
            changed = False
            for layers in self._groups():
                if limit is not None and self.sampler.spent >= share * limit:
                    return
                around = state.neighbours.around(state.arch, layers)
                decision = climb(
                    state.arch,
                    self._raced(state.arch, around.archs),
                    self.evidence,
                    self._draw(self.evidence),
                    visited=state.visited,
                    first=first,
                    final=final,
                )
                self._note(state, layers, around, decision, "climb")
                changed |= state.follow(decision)

    def _certify(self, state: _State, start: Setting, begin: Costs) -> Found:
        """Sweeps with full confidence; the claim is about the whole neighbourhood of the point returned."""
        config, num_layers = self.config, len(self.space.layers)
        pooled = config.schedule == "pooled"
        outcome, sweeps = "out of sweeps", 0
        per_layer: list[float] = []
        while sweeps < config.max_sweeps:
            sweeps += 1
            moved, per_layer, out = False, [], False
            for layers in self._groups():
                around = state.neighbours.around(state.arch, layers)
                rivals = self._raced(state.arch, around.archs)
                if pooled:
                    evidence, epsilon = self.evidence, config.epsilon
                else:
                    delta = config.delta / (len(self._groups()) * sweeps * (sweeps + 1))
                    evidence = Evidence(self.radius, delta, num_arms=len(rivals) + 1)
                    epsilon = config.epsilon / num_layers
                decision = select(
                    state.arch,
                    rivals,
                    evidence,
                    self._draw(evidence),
                    epsilon=epsilon,
                    rule=config.rule,
                    initial=config.initial,
                    settle=config.settle,
                )
                self._note(state, layers, around, decision, "sweep")
                per_layer.append(decision.epsilon)
                moved |= state.follow(decision)
                out |= decision.reason == "out of evaluations"
            if out:
                outcome = "out of evaluations"
                break
            if not moved and (not pooled or self._epsilon(state) <= config.epsilon):
                outcome = "local optimum"  # all layers at once: later samples may have moved what earlier ones settled
                break
        whole = state.neighbours.around(state.arch, list(self.space.layers))
        if pooled:
            epsilon = self._epsilon(state)
            interval = self.evidence.interval(state.arch)
        else:
            epsilon = max(per_layer) if outcome == "local optimum" else math.inf
            interval = evidence.interval(state.arch)
        costs = state.neighbours.costs(state.arch)
        return Found(
            arch=state.arch,
            start=start,
            costs=costs,
            utility=interval,
            claim=Claim(epsilon, config.epsilon, config.confidence, len(whole.neighbours)),
            num_evaluations=self.sampler.num_evaluations,
            spent=self.sampler.spent,
            num_moves=len(state.path) - 1,
            num_sweeps=sweeps,
            outcome=outcome,
            drift=max(abs(costs[key].value / begin[key].value - 1.0) for key in begin),
            path=tuple(state.path),
        )

    def _epsilon(self, state: _State) -> float:
        """What the evidence supports for the whole neighbourhood (eq. I17)."""
        whole = state.neighbours.around(state.arch, list(self.space.layers))
        return certified_epsilon(state.arch, self._raced(state.arch, whole.archs), self.evidence)

    def _raced(self, incumbent: Setting, rivals: list[Setting]) -> list[Setting]:
        """The rivals that cheap fidelities could not rule out."""
        for fidelity in self.fidelities:
            evidence = self.low_evidence[fidelity.name]
            rivals = race(incumbent, rivals, evidence, self._draw(evidence, fidelity.name), fidelity)
        return rivals

    def _note(self, state: _State, layers: Sequence[str], around: Around, decision: Decision, phase: str) -> None:
        costs = state.neighbours.costs(decision.choice)
        told = {
            "phase": phase,
            "layers": list(layers),
            "from": dict(state.arch),
            **decision.to_json(),
            "infeasible": {str(one.proposal): one.reason for one in around.infeasible},
        }
        self.journal.note(
            "move",
            decision.choice,
            costs,
            told,
            excess=state.neighbours.excess(costs),
            accepted=decision.moved,
            knob=next(iter(decision.choice)),
        )


@dataclass
class _State:
    arch: Setting
    neighbours: Neighbours
    visited: set[Setting]
    path: list[Setting]

    def follow(self, decision: Decision) -> bool:
        """Goes where the decision says."""
        if decision.moved:
            self.arch = decision.choice
            self.neighbours = self.neighbours.rebased(self.arch)
            self.visited.add(self.arch)
            self.path.append(self.arch)
        return decision.moved
