"""Do primal-dual steps, prices, per-module budgets and rounding keep what theory says, where answers are known?

    .venv/bin/python benchmarks/adapt_theory/run.py [--quick]

Random convex surrogates with known optima: residuals of the optimality conditions against the number of steps, points
of the frontier by price against those by budget, the two-module instance against its closed form, and modules chosen by
relaxing and rounding against the integer program.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from apportion.methods.adapt.surrogate import Separation, random_surrogate
from apportion.numerics.knapsack import Knapsack, round_within
from apportion.numerics.multipliers import Multipliers
from apportion.numerics.primal_dual import primal_dual
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
WIDTH = 0.1  # over which the kinks of the costs are rounded off, so that a gradient exists everywhere
STEPS = (100, 316, 1000, 3162, 10000)
PRICES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8)
LIMIT = 10.0
MULTIPLIERS = {
    "plain": {},
    "gains (5, 1)": {"pi": (5.0, 1.0)},
    "damped by 0.9 after 20 with slack": {"window": 20, "damping": 0.9},
}


def slope(xs, ys) -> float:
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def residuals(num_runs: int, **options) -> list[dict[str, float]]:
    """Means over instances and seeds of each residual, and how far the loss is from the optimum's."""
    instances = [random_surrogate(np.random.default_rng(seed), width=WIDTH) for seed in range(num_runs)]
    exact = [instance.solve() for instance in instances]
    rows = []
    for num_steps in STEPS:
        told = []
        for seed, (instance, best) in enumerate(zip(instances, exact, strict=True)):
            prices = Multipliers((instance.num_levels + 1,), 1 / math.sqrt(num_steps), LIMIT, **options)
            found = primal_dual(instance, num_steps, np.random.default_rng(1000 + seed), multipliers=prices)
            one = found.residuals
            gap = abs(instance.loss(found.point_D) - best.loss)
            price = abs(found.multiplier_K[-1] - best.price)
            told.append((one.stationarity, one.feasibility, one.complementarity, one.worst, gap, price))
        names = ("stationarity", "feasibility", "complementarity", "worst", "loss", "price")
        rows.append({"steps": num_steps, **dict(zip(names, np.mean(told, axis=0).tolist(), strict=True))})
    return rows


def frontier() -> list[dict[str, float]]:
    """Every price's point, and the point that a budget equal to its latency gives."""
    instance = random_surrogate(np.random.default_rng(0), width=WIDTH)
    rows = []
    for point in instance.trace(PRICES):
        again = replace(instance, budget=point.latency).solve()
        rows.append(
            {
                "price": point.price,
                "latency": point.latency,
                "loss": point.loss,
                "loss_by_budget": again.loss,
                "price_by_budget": again.price,
            }
        )
    return rows


def separation(num_steps: int) -> list[dict[str, object]]:
    """What one level for all loses: closed form, convex solver, and primal-dual steps."""
    cases = ((10.0, 1.0, 4.0, 1.0), (10.0, 1.0, 1.0, 1.0), (10.0, 1.0, 10.0, 1.0), (100.0, 1.0, 4.0, 1.0))
    rows = []
    for a1, a2, c1, c2 in cases:
        made = Separation((a1, a2), (c1, c2), 0.5 * (c1 + c2))
        alike = made.loss(made.one_level())
        scaled = replace(made, worth=(1.0, a2 / a1)).surrogate()  # steps want slopes of about one
        found = primal_dual(scaled, num_steps, np.random.default_rng(0))
        rows.append(
            {
                "worth": [a1, a2],
                "cost": [c1, c2],
                "levels": [round(level, 4) for level in made.per_module().tolist()],
                "one_level_loss": alike,
                "gap": made.gap(),
                "gap_solver": alike - made.surrogate().solve().loss,
                "gap_steps": alike - a1 * scaled.loss(found.point_D),
                "violation_steps": found.residuals.feasibility,
            }
        )
    return rows


def knapsacks(num_instances: int) -> list[dict[str, object]]:
    """Share of the optimum that rounding loses, over random modules whose values do or don't follow their costs."""
    rows = []
    for kind, sizes in (("unrelated", (10, 30, 100)), ("related", (10, 30, 100)), ("equal", (10,))):
        for size in sizes:
            rng = np.random.default_rng(size)
            losses, slack, excess = [], [], 0
            for _ in range(num_instances):
                cost_L = rng.uniform(0.1, 1.0, size)
                noise_L = rng.uniform(0.1, 1.0, size)
                value_L = {"unrelated": noise_L, "related": cost_L + 0.1 * noise_L, "equal": cost_L}[kind]
                problem = Knapsack(value_L, cost_L, 0.5 * float(cost_L.sum()))
                best, relaxed = problem.value(problem.exact()), problem.relaxed()
                rounded = round_within(problem, relaxed)
                losses.append(max(0.0, 1 - problem.value(rounded) / best))
                slack.append(problem.value(relaxed) / best - 1)
                excess += not problem.fits(rounded)
            rows.append(
                {
                    "values": kind,
                    "modules": size,
                    "mean": float(np.mean(losses)),
                    "p95": float(np.quantile(losses, 0.95)),
                    "max": float(np.max(losses)),
                    "optimal": float(np.mean(np.array(losses) < 1e-9)),
                    "relaxed_above": float(np.mean(slack)),
                    "over_budget": excess,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    quick = parser.parse_args().quick
    summary = Summary(HERE)
    num_runs = 2 if quick else 10
    grown = {label: residuals(num_runs, **options) for label, options in MULTIPLIERS.items()}
    names = ("stationarity", "feasibility", "complementarity", "worst", "loss", "price")
    slopes = {
        label: {name: slope([row["steps"] for row in rows], [max(row[name], 1e-9) for row in rows]) for name in names}
        for label, rows in grown.items()
    }
    print(
        "| multipliers | steps T | stationarity | feasibility | complementarity | ε-KKT | loss off by | price off by |"
    )
    print("|---" * 8 + "|")
    for label, rows in grown.items():
        for row in rows:
            print(f"| {label} | {row['steps']} | " + " | ".join(f"{row[name]:.4f}" for name in names) + " |")
        told = " | ".join(f"{slopes[label][name]:.2f}" for name in names)
        print(f"| {label} | slope (theory -0.5) | {told} |")
    points = frontier()
    print("\n| price of latency | latency | loss | loss by budget | price by budget |\n|---|---|---|---|---|")
    for row in points:
        print("| " + " | ".join(f"{row[name]:.4f}" for name in row) + " |")
    split = separation(4000 if quick else 10000)
    print("\n| worth a | cost c | best levels | loss of one level | it loses: closed form | solver | steps | over by |")
    print("|---" * 8 + "|")
    for row in split:
        cells = [", ".join(f"{value:g}" for value in row[name]) for name in ("worth", "cost", "levels")]
        cells += [
            f"{row[name]:.4f}" for name in ("one_level_loss", "gap", "gap_solver", "gap_steps", "violation_steps")
        ]
        print(f"| {' | '.join(cells)} |")
    packed = knapsacks(20 if quick else 200)
    print(
        "\n| values and costs | modules | rounding loses: mean | 95 % | worst | optimal | relaxed above | over budget |"
    )
    print("|---" * 8 + "|")
    for row in packed:
        shares = " | ".join(f"{row[name]:.2%}" for name in ("mean", "p95", "max", "optimal", "relaxed_above"))
        print(f"| {row['values']} | {row['modules']} | {shares} | {row['over_budget']} |")
    figures = {
        "slope_kkt": slopes["plain"]["worst"],
        "slope_kkt_gains": slopes["gains (5, 1)"]["worst"],
        "feasibility_damped": grown["damped by 0.9 after 20 with slack"][-1]["feasibility"],
        "feasibility_plain": grown["plain"][-1]["feasibility"],
        "pareto_loss_difference": max(abs(row["loss"] - row["loss_by_budget"]) for row in points),
        "pareto_price_difference": max(abs(row["price_by_budget"] / row["price"] - 1) for row in points),
        "separation_difference": max(abs(row["gap"] - row["gap_solver"]) for row in split),
        "knapsack_gap_mean": float(np.mean([row["mean"] for row in packed])),
        "knapsack_gap_worst": max(row["max"] for row in packed),
        "knapsack_over_budget": sum(row["over_budget"] for row in packed),
    }
    figures = {name: round(value, 6) for name, value in figures.items()}
    print(json.dumps(figures, indent=1))
    summary.write(
        figures,
        packages=("numpy", "scipy", "cvxpy"),
        quick=quick,
        residuals=grown,
        slopes=slopes,
        frontier=points,
        separation=split,
        knapsack=packed,
    )


if __name__ == "__main__":
    main()
