"""Several objectives: a local Pareto set when utilities are several, and a front of anchors when costs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apportion.core.knob import Setting
from apportion.methods.search.evidence import Evidence, Interval, Radius
from apportion.methods.search.proxy import FULL, Sampler
from apportion.methods.search.select import Draw


@dataclass(frozen=True)
class LocalSet:
    """The architectures that stay, the intervals of all by utility, and whether evaluations sufficed to settle it."""

    archs: tuple[Setting, ...]
    intervals: Mapping[str, Mapping[Setting, Interval]]
    settled: bool


def local_set(
    archs: Sequence[Setting],
    sampler: Sampler,
    radii: Mapping[str, Radius],
    *,
    epsilon: float,
    confidence: float,
) -> LocalSet:
    """The local Pareto set of an architecture, which comes first, and its neighbours.

    One evaluation is a sample of every utility; what was evaluated before counts, free of charge. Every utility's
    intervals may fail with an equal share of ``1 - confidence``. Where evaluations run out, those are returned that no
    other beats by its means.
    """
    first, *others = radii
    delta = (1.0 - confidence) / len(radii)
    evidence = {name: Evidence(radius, delta) for name, radius in radii.items()}
    sampler.rewind()

    def add(archs: Sequence[Setting], drawn: Sequence[Mapping[str, float]]) -> None:
        for arch, values in zip(archs, drawn, strict=True):
            evidence[first].add(arch, values[FULL])
            for name in others:
                evidence[name].add(arch, values[name])

    def draw(short: Sequence[Setting]) -> bool:
        drawn = sampler.draw_all(short)
        if drawn is not None:
            add(short, drawn)
            return True
        for arch in short:  # the evaluations don't hold all of them: as many as they do
            drawn = sampler.draw_all([arch])
            if drawn is None:
                return False
            add([arch], drawn)
        return True

    kept, settled = pareto_select(archs, evidence, draw, epsilon=dict.fromkeys(radii, epsilon))
    if not settled:
        kept = _by_means([arch for arch in kept if evidence[first].num_pulls(arch)], evidence)
    told = {name: {arch: one.interval(arch) for arch in archs} for name, one in evidence.items()}
    return LocalSet(tuple(kept), told, settled)


def _by_means(archs: Sequence[Setting], evidence: Mapping[str, Evidence]) -> list[Setting]:
    def mean(arch: Setting) -> tuple[float, ...]:
        return tuple(one.mean(arch) for one in evidence.values())

    points = {arch: mean(arch) for arch in archs}
    return [
        arch
        for arch in archs
        if not any(
            all(a >= b for a, b in zip(other, points[arch], strict=True)) and other != points[arch]
            for other in points.values()
        )
    ]


def pareto_select(
    arms: Sequence[Setting],
    evidence: Mapping[str, Evidence],
    draw: Draw,
    *,
    epsilon: Mapping[str, float],
    initial: int = 1,
) -> tuple[list[Setting], bool]:
    r"""The arms that no other beats in every utility, by elimination with dominance checks (eq. I19).

    .. math:: i \text{ leaves if } \exists j\, \forall u: \mathrm{LCB}_u(j) > \mathrm{UCB}_u(i); \qquad
        \text{done when } \forall i, j\, \exists u: \mathrm{UCB}_u(j) - \varepsilon_u \le \mathrm{LCB}_u(i)

    Whoever leaves is dominated, and whoever stays is beaten by nobody by more than epsilon in every utility, on the
    event that all intervals hold; give every utility's evidence its share of delta. ``draw`` must add a sample of every
    utility. Returns the arms that stay and whether that was settled before evaluations ran out.
    """
    names = list(evidence)
    alive = list(arms)

    def pulls(arch: Setting) -> int:
        return min(evidence[name].num_pulls(arch) for name in names)

    def beats(better: Setting, worse: Setting) -> bool:
        return all(evidence[name].interval(better).low > evidence[name].interval(worse).high for name in names)

    def may_beat(better: Setting, worse: Setting) -> bool:
        return all(
            evidence[name].interval(better).high - epsilon[name] > evidence[name].interval(worse).low for name in names
        )

    while True:
        short = [arch for arch in alive if pulls(arch) < initial]
        if not short:
            alive = [arch for arch in alive if not any(beats(other, arch) for other in alive if other != arch)]
            open_pairs = [(a, b) for a in alive for b in alive if a != b and may_beat(a, b)]
            if not open_pairs:
                return alive, True
            short = list(dict.fromkeys(arch for pair in open_pairs for arch in pair))
        if not draw(short):
            return alive, False


def nondominated(points: Sequence[tuple[Sequence[float], float]]) -> list[int]:
    """The indices of (costs, utility) points that no other beats: none costs no more anywhere for as much utility.

    Of equal points the first stays.

    Example:
        >>> nondominated([((1.0,), 5.0), ((2.0,), 5.0), ((3.0,), 9.0), ((3.0,), 9.0)])
        [0, 2]
    """

    def beats(j: int, i: int) -> bool:
        (ours, gain), (theirs, other) = points[j], points[i]
        no_worse = gain >= other and all(a <= b for a, b in zip(ours, theirs, strict=True))
        return no_worse and (points[j] != points[i] or j < i)

    return [i for i in range(len(points)) if not any(beats(j, i) for j in range(len(points)) if j != i)]


def hypervolume(points: Sequence[tuple[float, float]], reference: tuple[float, float]) -> float:
    """The area that (cost, utility) points dominate, up to a reference of high cost and low utility.

    Example:
        >>> hypervolume([(1.0, 5.0), (2.0, 7.0)], (4.0, 0.0))
        19.0
    """
    worst_cost, worst_utility = reference
    area, best = 0.0, worst_utility
    inside = sorted((point for point in points if point[0] < worst_cost), key=lambda point: (point[0], -point[1]))
    for cost, utility in inside:
        if utility > best:
            area += (worst_cost - cost) * (utility - best)
            best = utility
    return area
