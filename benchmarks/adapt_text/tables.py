"""The tables and figures of an adapt benchmark, from accuracies, chosen sizes and measured latencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apportion.numerics.cvar import cvar

TIGHT = 0.3  # budgets up to here are the tight half
OURS = "ours"
OWN = ("ours", "ours-cvar", "ours-two")  # ours and its relatives; all others are baselines
TAIL = 0.9
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Cells:
    """Accuracy of every episode by method, target, budget and side; its share of latency by the first three."""

    accuracy: Mapping[tuple[str, str, float, str], Array]
    latency: Mapping[tuple[str, str, float], Array]
    targets: tuple[str, ...]
    budgets: tuple[float, ...]
    sides: tuple[str, ...]

    @classmethod
    def of(cls, methods: Mapping[str, dict], measured: Mapping[str, dict]) -> Cells:
        rows = methods[OURS]["rows"]
        targets = tuple(dict.fromkeys(row["target"] for row in rows))
        budgets = tuple(dict.fromkeys(row["rho"] for row in rows if row["rho"] < 1))
        sides = tuple(dict.fromkeys(side for row in rows for side in row["side"]))
        table = [m for name, m in methods.items() if ":" not in name]
        least = {  # the episodes that all have judged, by target
            target: min(len(row["accuracy"]) for m in table for row in m["rows"] if row["target"] == target)
            for target in targets
        }
        accuracy, latency = {}, {}
        for name, method in methods.items():
            for row in method["rows"]:
                target, rho, count = row["target"], row["rho"], least[row["target"]]
                side_N = np.array(row["side"][:count])
                for side in sides:
                    accuracy[name, target, rho, side] = np.array(row["accuracy"][:count])[side_N == side]
                known = measured.get(target, {})
                ratios = [known.get(" ".join(map(str, sizes)), [np.nan])[0] for sizes in row["sizes"]]
                latency[name, target, rho] = np.array([ratios[i] for i in row["chosen"][:count]])
        return cls(accuracy, latency, targets, budgets, sides)

    def all(self, name: str, rho: float, side: str, count: int | None = None) -> Array:
        """All episodes of a budget and side, or the first so many; every one was judged for one target, in turn."""
        each = None if count is None else count // len(self.targets)
        return np.concatenate([self.accuracy[name, target, rho, side][:each] for target in self.targets])

    def ahead(self, name: str, other: str, rho: float, *sides: str) -> tuple[float, float]:
        """How far a method is ahead of another on the same episodes, mean of sides, and half the 95 % interval."""
        means, squares = [], []
        for side in sides:
            pairs = [(self.accuracy[name, t, rho, side], self.accuracy[other, t, rho, side]) for t in self.targets]
            difference = np.concatenate([a[: len(b)] - b[: len(a)] for a, b in pairs])
            means.append(float(difference.mean()))
            squares.append(float(difference.var(ddof=1)) / len(difference))
        return float(np.mean(means)), 1.96 * sum(squares) ** 0.5 / len(sides)


def print_tables(
    methods: Mapping[str, dict],
    measured: Mapping[str, dict],
    int8: Mapping[str, dict],
    promises: list[dict],
) -> dict[str, float]:
    """Prints all that is there; returns the figures."""
    cells = Cells.of(methods, measured)
    table = [name for name in methods if ":" not in name]
    baselines = [name for name in table if name not in OWN]
    for side in cells.sides:
        accuracy_table(cells, methods, table, side)
    ahead_table(cells, baselines)
    variant_table(cells, [name for name in methods if ":" in name])
    int8_table(cells, int8)
    feasible, used = feasibility_table(cells, OURS)
    moved = [target for target in cells.targets if "ours-two" in methods and target not in trained_for(methods)]
    print("\nthe target left out of training, sizes chosen by a profile of a few points")
    carried, _ = feasibility_table(cells, "ours-two", moved) if moved else (np.nan, np.nan)
    promise_table(promises)
    wins, losses = frontier(cells, baselines, [cells.sides[:2]])
    wins_by_side, losses_by_side = frontier(cells, baselines, [(side,) for side in cells.sides[:2]])
    area = {name: frontier_area(cells, name) for name in (OURS, *baselines)}
    tails = {name: tail_mean(cells, name) for name in (OURS, *baselines)}
    figures = {
        "targets": len(cells.targets),
        "episodes": sum(len(cells.all(OURS, cells.budgets[0], side)) for side in cells.sides),
        "feasibility": feasible,
        "utilisation": used,
        "feasibility_gap": max(0.0, 0.95 - feasible),
        "frontier_wins_tight": wins,
        "frontier_losses": losses,
        "frontier_wins_tight_by_side": wins_by_side,
        "frontier_losses_by_side": losses_by_side,
        "area_ratio_best_baseline": area[OURS] / max(area[name] for name in baselines),
        "feasibility_adjusted_accuracy": adjusted(cells, OURS),
        "cvar_gain": tails[OURS] - max(tails[name] for name in baselines),
        "transfer_feasibility": carried,
    }
    kept = [row for row in promises if not row["refused"]]
    if kept:
        figures["specialise_forward_passes"] = float(np.median([row["forward_passes"] for row in kept]))
        figures["promises_kept"] = float(np.mean([row["verified"] for row in kept]))
    shown = {name: value if isinstance(value, int) else round(float(value), 4) for name, value in figures.items()}
    return {name: None if value != value else value for name, value in shown.items()}


def accuracy_table(cells: Cells, methods: Mapping[str, dict], names: list[str], side: str) -> None:
    count = len(cells.all(OURS, cells.budgets[0], side))
    print(
        f"\n{side}, {count} episodes over {len(cells.targets)} targets, %; budgets are shares of the whole's latency\n"
    )
    print("| method | steps | " + " | ".join(f"{rho:g}" for rho in (*cells.budgets, 1.0)) + " | worst tenth |")
    print("|---" * (len(cells.budgets) + 4) + "|")
    for name in names:
        means = [cells.all(name, rho, side).mean() for rho in (*cells.budgets, 1.0)]
        tail = np.mean([1 - cvar((1 - cells.all(name, rho, side)).tolist(), TAIL) for rho in cells.budgets])
        shown = " | ".join(f"{100 * mean:.1f}" for mean in means)
        print(f"| {name} | {methods[name]['steps']} | {shown} | {100 * tail:.1f} |")


def ahead_table(cells: Cells, baselines: list[str]) -> None:
    print("\nhow far ours is ahead of each, points on the same episodes, both sides, ± half of the 95 % interval\n")
    print("| method | " + " | ".join(f"{rho:g}" for rho in cells.budgets) + " |")
    print("|---" * (len(cells.budgets) + 1) + "|")
    for name in baselines:
        shown = []
        for rho in cells.budgets:
            mean, half = cells.ahead(OURS, name, rho, *cells.sides[:2])
            shown.append(f"{100 * mean:+.1f} ± {100 * half:.1f}")
        print(f"| {name} | " + " | ".join(shown) + " |")


def variant_table(cells: Cells, names: list[str]) -> None:
    if not names:
        return
    print(f"\n{OURS} with one thing changed, points against it on the same episodes\n")
    chosen = [rho for rho in (0.15, 0.3, 0.7, 1.0) if rho in (*cells.budgets, 1.0)]
    heads = [f"{side} {rho:g}" for side in cells.sides[:2] for rho in chosen]
    print("| changed | " + " | ".join(heads) + " |\n" + "|---" * (len(heads) + 1) + "|")
    for name in names:
        found = [cells.ahead(name, OURS, rho, side) for side in cells.sides[:2] for rho in chosen]
        shown = " | ".join(f"{100 * value:+.1f} ± {100 * half:.1f}" for value, half in found)
        print(f"| {name.partition(':')[2]} | {shown} |")


def int8_table(cells: Cells, int8: Mapping[str, dict]) -> None:
    if not int8:
        return
    count = len(next(iter(int8.values()))["id"])
    print(f"\nthe whole frozen network in int8, and ours at a budget of its latency, first {count} episodes, %\n")
    print("| target | latency | " + " | ".join(f"int8 {side} | ours {side}" for side in ("id", "ood")) + " |")
    print("|---" * 6 + "|")
    for target, row in int8.items():
        shown = []
        for side in ("id", "ood"):
            ours = [cells.all(OURS, rho, side, len(row[side])).mean() for rho in cells.budgets]
            at = np.interp(np.log(row["ratio"]), np.log(cells.budgets), ours)
            shown.append(f"{100 * np.mean(row[side]):.1f} | {100 * at:.1f}")
        print(f"| {target} | {row['ratio']:.2f} | " + " | ".join(shown) + " |")


def feasibility_table(cells: Cells, name: str, targets: list[str] | None = None) -> tuple[float, float]:
    """Prints how much of each budget is used, and returns the share of budgets that hold and the mean use."""
    print(f"\nshare of each budget that {name} takes, as measured; over 100 % breaks it\n")
    print("| target | " + " | ".join(f"{rho:g}" for rho in cells.budgets) + " | held |")
    print("|---" * (len(cells.budgets) + 2) + "|")
    feasible, used = [], []
    for target in targets or cells.targets:
        share = [cells.latency[name, target, rho] / rho for rho in cells.budgets]
        held = [float(np.mean(s <= 1)) for s in share]
        feasible += held
        used += [float(s.mean()) for s in share]
        print(f"| {target} | " + " | ".join(f"{s.mean():.0%}" for s in share) + f" | {np.mean(held):.0%} |")
    return float(np.mean(feasible)), float(np.mean(used))


def promise_table(promises: list[dict]) -> None:
    if not promises:
        return
    print("\nspecialised at random budgets by the command, then verified in fresh processes\n")
    print("| task | target | budget | used | met | verified | support passes |\n" + "|---" * 7 + "|")
    for row in promises:
        start = f"| {row['side']}: {row['domain']} | {row['target']} | {row['budget']} | "
        if row["refused"]:
            print(start + "| refused | | |")
            continue
        yes = ["yes" if row[key] else "no" for key in ("met", "verified")]
        print(f"{start}{row['utilisation']:.0%} | {' | '.join(yes)} | {row['forward_passes']:.1f} |")


def frontier(cells: Cells, baselines: list[str], views: list[tuple[str, ...]]) -> tuple[float, float]:
    """Shares of budgets, each seen from some sides: ahead of every baseline in the tight half; clearly behind one."""
    wins, losses, tight = 0, 0, 0
    for rho in cells.budgets:
        for sides in views:
            found = [cells.ahead(OURS, name, rho, *sides) for name in baselines]
            losses += any(mean < -half for mean, half in found)
            if rho <= TIGHT:
                tight += 1
                wins += min(mean for mean, _ in found) > 0
    return wins / tight, losses / (len(views) * len(cells.budgets))


def frontier_area(cells: Cells, name: str) -> float:
    """Area under accuracy over the logarithm of the budget."""
    areas = [
        np.trapezoid([cells.all(name, rho, side).mean() for rho in cells.budgets], np.log(cells.budgets))
        for side in cells.sides[:2]
    ]
    return float(np.mean(areas))


def tail_mean(cells: Cells, name: str) -> float:
    """Mean accuracy of the worst tenth of the episodes, over budgets and sides."""
    return float(
        np.mean(
            [
                1 - cvar((1 - cells.all(name, rho, side)).tolist(), TAIL)
                for rho in cells.budgets
                for side in cells.sides[:2]
            ]
        )
    )


def adjusted(cells: Cells, name: str) -> float:
    """Accuracy with a zero where the budget is broken."""
    found = []
    for target in cells.targets:
        for rho in cells.budgets:
            held = float(np.mean(cells.latency[name, target, rho] <= rho))
            found += [held * cells.accuracy[name, target, rho, side].mean() for side in cells.sides[:2]]
    return float(np.mean(found))


def trained_for(methods: Mapping[str, dict]) -> tuple[str, ...]:
    """The targets that the method with one left out was trained for."""
    return tuple(methods["ours-two"]["targets"])
