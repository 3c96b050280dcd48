"""Several objectives: a local Pareto set when utilities are several, and a front of anchors when costs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apportion.core.knob import Setting
from apportion.methods.search.evidence import Evidence
from apportion.methods.search.select import Draw


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


def nondominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of (cost, utility) points that no other beats: none costs less or the same for more utility.

    Of equal points the first stays.

    Example:
        >>> nondominated([(1.0, 5.0), (2.0, 5.0), (3.0, 9.0), (3.0, 9.0)])
        [0, 2]
    """
    kept = []
    for i, (cost, utility) in enumerate(points):
        beaten = any(
            (other_cost <= cost and other_utility >= utility)
            and (other_cost < cost or other_utility > utility or j < i)
            for j, (other_cost, other_utility) in enumerate(points)
            if j != i
        )
        if not beaten:
            kept.append(i)
    return kept


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
