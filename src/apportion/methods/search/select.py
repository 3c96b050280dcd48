"""Selection among candidates of equal cost: uniform, successive elimination, LUCB, and a greedy climb without claims.

A rule says which arms to sample next; when to stop is the same for all: the incumbent is safe, or some candidate is
better for certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from apportion.core.knob import Setting
from apportion.errors import ApportionError
from apportion.methods.search.evidence import Evidence, Interval

Rule: TypeAlias = Literal["lucb", "elimination", "uniform"]
RULES: tuple[Rule, ...] = ("lucb", "elimination", "uniform")
Draw: TypeAlias = Callable[[Sequence[Setting]], bool]
"""Evaluates each architecture once more and adds it to the evidence; False when the evaluations have run out."""


@dataclass(frozen=True)
class Decision:
    """What was chosen among an incumbent and its rivals, why, and within which epsilon that is the best of them.

    ``epsilon`` is what holds at the confidence of the evidence, whether or not it is as small as was asked.
    """

    choice: Setting
    moved: bool
    reason: str
    epsilon: float
    intervals: Mapping[Setting, Interval]

    def to_json(self) -> dict[str, Any]:
        return {
            "moved": self.moved,
            "reason": self.reason,
            "epsilon": round(self.epsilon, 6) if math.isfinite(self.epsilon) else None,
            "arms": [
                {"arch": dict(arch), **interval.to_json(), "chosen": arch == self.choice}
                for arch, interval in self.intervals.items()
            ],
        }


def select(
    incumbent: Setting,
    rivals: Sequence[Setting],
    evidence: Evidence,
    draw: Draw,
    *,
    epsilon: float,
    rule: Rule = "lucb",
    initial: int = 1,
    settle: Literal["better", "best"] = "better",
) -> Decision:
    r"""Samples until the incumbent is safe or a rival is better for certain (eq. I16).

    .. math:: \text{stay: } \mathrm{LCB}(x) \ge \max_z \mathrm{UCB}(z) - \varepsilon, \qquad
        \text{move to } z: \mathrm{LCB}(z) > \mathrm{UCB}(x)

    Unlike the paper's rule, which may leave an incumbent for one that is worse by less than epsilon and so can walk in
    circles, every move is an improvement on the event that the intervals hold; sweeps therefore end. One of the two
    conditions is met in finite time whatever the gap.

    Args:
        initial: samples that every arm gets first; an estimated sigma needs two.
        settle: with ``best``, a move must also be within epsilon of the best rival (eq. 2 of the paper).
    """
    if rule not in RULES:
        raise ApportionError(f"unknown selection rule {rule!r}; possible are {', '.join(RULES)}")
    if not epsilon > 0.0:
        raise ApportionError(f"epsilon is {epsilon!r}; give a difference in utility above 0 that matters")
    arms = [incumbent, *rivals]
    out: set[Setting] = set()
    while True:
        short = [arch for arch in arms if evidence.num_pulls(arch) < initial]
        if short:
            if not draw(short):
                return _stop(incumbent, arms, evidence, "out of evaluations")
            continue
        seen = {arch: evidence.interval(arch) for arch in arms}
        here = seen[incumbent]
        if all(seen[arch].high - epsilon <= here.low for arch in rivals):
            return _stop(incumbent, arms, evidence, "incumbent safe")
        better = [arch for arch in rivals if seen[arch].low > here.high]
        if better:
            best = max(better, key=lambda arch: seen[arch].mean)
            if settle == "better" or all(seen[arch].high - epsilon <= seen[best].low for arch in arms if arch != best):
                others = max(interval.high for arch, interval in seen.items() if arch != best)
                return Decision(best, True, "better for certain", max(0.0, others - seen[best].low), seen)
        out |= _eliminated(arms, seen, incumbent)
        batch = _next(rule, incumbent, arms, out, seen, epsilon)
        if not draw(batch):
            return _stop(incumbent, arms, evidence, "out of evaluations")


def climb(
    incumbent: Setting,
    rivals: Sequence[Setting],
    evidence: Evidence,
    draw: Draw,
    *,
    visited: set[Setting],
    first: int = 1,
    final: int = 3,
) -> Decision:
    """The rival with the highest mean, never one visited before; no claim is made, so few samples do.

    Every arm gets ``first`` samples; then whichever leads, and the incumbent, get ``final`` before it is believed.
    """
    arms = [incumbent, *(arch for arch in rivals if arch not in visited)]
    while True:
        short = [arch for arch in arms if evidence.num_pulls(arch) < first]
        if not short:
            leader = max(arms, key=lambda arch: (evidence.mean(arch), arch == incumbent))
            short = [arch for arch in dict.fromkeys((leader, incumbent)) if evidence.num_pulls(arch) < final]
            if leader == incumbent or not short:
                break
        if not draw(short):
            return _stop(incumbent, arms, evidence, "out of evaluations")
    if leader == incumbent:
        return _stop(incumbent, arms, evidence, "no higher mean")
    return Decision(leader, True, "higher mean", math.inf, {arch: evidence.interval(arch) for arch in arms})


def certified_epsilon(incumbent: Setting, rivals: Sequence[Setting], evidence: Evidence) -> float:
    r"""The smallest epsilon for which the incumbent is safe now (eq. I17).

    .. math:: \hat\varepsilon = \max\big(0, \max_z \mathrm{UCB}(z) - \mathrm{LCB}(x)\big)
    """
    low = evidence.interval(incumbent).low
    return max([0.0, *(evidence.interval(arch).high - low for arch in rivals)])


def _stop(incumbent: Setting, arms: Sequence[Setting], evidence: Evidence, reason: str) -> Decision:
    seen = {arch: evidence.interval(arch) for arch in arms}
    return Decision(incumbent, False, reason, certified_epsilon(incumbent, arms[1:], evidence), seen)


def _eliminated(arms: Sequence[Setting], seen: Mapping[Setting, Interval], incumbent: Setting) -> set[Setting]:
    best_low = max(seen[arch].low for arch in arms)
    return {arch for arch in arms if arch != incumbent and seen[arch].high < best_low}


def _next(
    rule: Rule,
    incumbent: Setting,
    arms: Sequence[Setting],
    out: set[Setting],
    seen: Mapping[Setting, Interval],
    epsilon: float,
) -> list[Setting]:
    if rule == "uniform":
        return list(arms)
    here = seen[incumbent]
    open_arms = [
        arch for arch in arms if arch != incumbent and arch not in out and seen[arch].high - epsilon > here.low
    ]
    if not open_arms:  # all that is unresolved was eliminated by a rival: only it and the incumbent can settle this
        open_arms = [max((arch for arch in arms if arch != incumbent), key=lambda arch: seen[arch].high)]
    if rule == "elimination":
        return [incumbent, *open_arms]
    challenger = max(open_arms, key=lambda arch: seen[arch].high)
    batch = [challenger]
    if here.num_pulls <= seen[challenger].num_pulls * math.sqrt(len(arms) - 1):  # it takes part in every comparison
        batch.append(incumbent)
    return batch
