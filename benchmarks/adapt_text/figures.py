"""The figures of an adapt benchmark: budgets held and used, the frontier, its area, the tail of the episodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from cells import FLOAT, OURS, WHOLE, Cells, Pair

from apportion.numerics.cvar import cvar

TIGHT = 0.3  # budgets up to here are the tight half
TAIL = 0.9


def held_and_used(cells: Cells, name: str, targets: tuple[str, ...] = ()) -> tuple[float, float, float]:
    """The share of episodes whose sizes keep the budget on the clock, and the mean share that they take.

    It is taken of what they can take, which is the budget or the whole network in the precision that was chosen, and of
    the budget itself.
    """
    rows = [(rho, cells.rows[name, t, rho]) for rho in cells.budgets for t in targets or cells.targets]
    known = [(rho, row.latency_N, row.most_N, ~np.isnan(row.latency_N)) for rho, row in rows]
    some = [(latency_N[had_N], most_N[had_N], rho) for rho, latency_N, most_N, had_N in known if had_N.any()]
    if not some:
        return float("nan"), float("nan"), float("nan")
    return (
        float(np.mean([(latency_N <= rho).mean() for latency_N, _, rho in some])),
        float(np.mean([(latency_N / most_N.clip(max=rho)).mean() for latency_N, most_N, rho in some])),
        float(np.mean([(latency_N / rho).mean() for latency_N, _, rho in some])),
    )


def clearly_broken(cells: Cells, name: str) -> float:
    """The share of episodes whose sizes take more than the budget by more than the error of measuring them."""
    rows = [(rho, cells.rows[name, target, rho]) for rho in cells.budgets for target in cells.targets]
    least = [(row.latency_N - 1.96 * row.error_N, rho) for rho, row in rows]
    known = [(least_N[~np.isnan(least_N)], rho) for least_N, rho in least]
    return float(np.mean([(least_N > rho).mean() for least_N, rho in known if len(least_N)] or [np.nan]))


def adjusted(cells: Cells, name: str) -> float:
    """Mean accuracy over budgets, sides and targets with a zero for every episode whose budget is broken."""
    found = []
    for rho in cells.budgets:
        for row in (row for side in cells.main for row in cells.each(name, rho, side)):
            known_N = ~np.isnan(row.latency_N)
            found += [np.mean((row.accuracy_N * (row.latency_N <= rho))[known_N])] if known_N.any() else []
    return float(np.mean(found)) if found else float("nan")


def tail(cells: Cells, name: str, rho: float, side: str) -> float:
    """Mean accuracy of the worst tenth of the episodes."""
    return 1 - cvar((1 - cells.all(name, rho, side)).tolist(), TAIL)


def tail_mean(cells: Cells, name: str) -> float:
    return float(np.mean([tail(cells, name, rho, side) for rho in cells.budgets for side in cells.main]))


def areas(cells: Cells, name: str) -> Pair:
    """Mean accuracy over the logarithm of measured latency, ours and a method's, from where both begin to the whole."""
    found = []
    for target in cells.targets:
        for side in cells.main:
            ours, other = cells.curve(OURS, target, side), cells.curve(name, target, side)
            start = max(ours.smallest, other.smallest)
            if start < WHOLE:
                found.append((ours.mean_from(start), other.mean_from(start)))
    if not found:
        return float("nan"), float("nan")
    left, right = np.mean(found, axis=0)
    return float(left), float(right)


def area_at_budget(cells: Cells, name: str) -> float:
    """Area under accuracy over the logarithm of the budget."""
    means = [np.mean([cells.all(name, rho, side).mean() for side in cells.main]) for rho in cells.budgets]
    return float(np.trapezoid(means, np.log(cells.budgets)))


def best_baseline(cells: Cells) -> str:
    """The baseline with the largest area under its frontier against ours; by budgets where nothing was measured."""
    ratios = {name: np.divide(*areas(cells, name)) for name in cells.baselines}
    known = {name: ratio for name, ratio in ratios.items() if not np.isnan(ratio)}
    if not known:
        return max(cells.baselines, key=lambda name: area_at_budget(cells, name))
    return min(known, key=known.__getitem__)


def domination(cells: Cells, name: str) -> tuple[int, int, int, int]:
    """Budgets of each side at equal latency: ours clearly ahead, neither, clearly behind, no point to compare."""
    counts = [0, 0, 0, 0]
    for rho in cells.budgets:
        for side in cells.main:
            found = cells.ahead(OURS, name, rho, side)
            counts[3 if found is None else 0 if found[0] > found[1] else 2 if found[0] < -found[1] else 1] += 1
    return counts[0], counts[1], counts[2], counts[3]


def frontier(
    cells: Cells,
    ahead: Callable[..., Pair | None],
    views: list[tuple[str, ...]],
    name: str = OURS,
    others: tuple[str, ...] | None = None,
) -> Pair:
    """Shares of budgets, each seen from some sides: ahead of every baseline in the tight half; clearly behind one.

    A baseline without a point to compare is not one that ours is ahead of, unless it can't keep the budget at all.
    """
    wins, losses, tight = 0, 0, 0
    others = cells.baselines if others is None else others
    for rho in cells.budgets:
        for sides in views:
            found = {other: ahead(name, other, rho, *sides) for other in others}
            losses += any(pair[0] < -pair[1] for pair in found.values() if pair is not None)
            if rho <= TIGHT:
                tight += 1
                wins += all(cells.cannot(other, rho) if p is None else p[0] > 0 for other, p in found.items())
    return wins / tight, losses / (len(views) * len(cells.budgets))


def all_figures(cells: Cells, carried: float, promises: list[dict]) -> dict[str, float | int | None]:
    """The figures of ``summary.json``; ``carried`` is the share of budgets held on targets left out of training."""
    feasible, used, used_of_budget = held_and_used(cells, OURS)
    both, each = [cells.main], [(side,) for side in cells.main]
    best = best_baseline(cells)
    ours, other = areas(cells, best)
    wins, losses = frontier(cells, cells.ahead, both)
    wins_by_side, losses_by_side = frontier(cells, cells.ahead, each)
    wins_at_budget, losses_at_budget = frontier(cells, cells.ahead_at_budget, both)
    in_float = tuple(name for name in cells.baselines if name not in cells.rounded)
    alike = {  # with the precision of ours taken away, or given to others
        "float": (FLOAT, in_float) if FLOAT in cells.table else None,
        "int8": (OURS, cells.rounded) if cells.rounded else None,
    }
    figures = {
        "targets": len(cells.targets),
        "episodes": sum(len(cells.all(OURS, cells.budgets[0], side)) for side in cells.sides),
        "feasibility": feasible,
        "utilisation": used,
        "utilisation_of_budget": used_of_budget,
        "feasibility_clearly_broken": clearly_broken(cells, OURS),
        "feasibility_gap": 1 - feasible,  # what is predicted keeps every budget: sizes are rounded until it does
        "frontier_wins_tight": wins,
        "frontier_losses": losses,
        "frontier_wins_tight_by_side": wins_by_side,
        "frontier_losses_by_side": losses_by_side,
        "frontier_wins_tight_at_budget": wins_at_budget,
        "frontier_losses_at_budget": losses_at_budget,
        "area_ratio_best_baseline": ours / other,
        "area_ratio_best_baseline_at_budget": area_at_budget(cells, OURS)
        / max(area_at_budget(cells, name) for name in cells.baselines),
        "feasibility_adjusted_accuracy": adjusted(cells, OURS),
        "cvar_gain": tail_mean(cells, OURS) - max(tail_mean(cells, name) for name in cells.baselines),
        "transfer_feasibility": carried,
    }
    for precision, pair in alike.items():
        if pair is not None:
            wins, losses = frontier(cells, cells.ahead, both, *pair)
            figures |= {f"frontier_wins_tight_in_{precision}": wins, f"frontier_losses_in_{precision}": losses}
    kept = [row for row in promises if not row["refused"]]
    if kept:
        figures["specialise_forward_passes"] = float(np.median([row["forward_passes"] for row in kept]))
        figures["promises_kept"] = float(np.mean([row["verified"] for row in kept]))
    shown = {name: value if isinstance(value, int) else round(float(value), 4) for name, value in figures.items()}
    return {name: None if value != value else value for name, value in shown.items()}
