"""Does the number of evaluations grow as L m sigma^2 / epsilon^2, and do claims fail less often than delta?

    .venv/bin/python benchmarks/iso_cost_theory/run.py [--quick]

Synthetic layers whose utilities are known. Growth is measured where nothing is better than anything (the worst case:
every neighbour has to be told apart from the incumbent within epsilon). Failures are counted where one operation per
layer is better by 1.01 epsilon, so that stopping too early makes a false claim.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import numpy as np

from apportion.core.knob import Setting
from apportion.core.meter import Reading
from apportion.methods.search.band import Band
from apportion.methods.search.evidence import known_sigma
from apportion.methods.search.loop import Found, Search, SearchConfig
from apportion.methods.search.neighbours import IsoCost
from apportion.methods.search.proxy import Journal, Request, Sampler
from apportion.methods.search.space import Ladder, Proposal, Rung
from apportion.numerics.multiple import binomial_upper
from apportion.numerics.radius import (
    bernstein_radius,
    fixed_radius,
    mixture_radius,
    stitched_radius,
    student_radius,
    union_radius,
)
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
DELTA = 0.1


class Flat:
    """``num_layers`` layers with ``num_rivals`` other operations each, all at the same cost."""

    name = "flat"

    def __init__(self, num_layers: int, num_rivals: int) -> None:
        self.layers = tuple(f"layer{index}" for index in range(num_layers))
        self.ops = tuple(range(num_rivals + 1))

    def start(self) -> Setting:
        return Setting(dict.fromkeys(self.layers, 0))

    def check(self, arch: Setting) -> None: ...

    def proposals(self, arch: Setting, layer: str) -> list[Proposal]:
        return [Proposal(layer, {layer: op}) for op in self.ops if op != arch[layer]]

    def ladders(self, arch: Setting, layer: str) -> list[Ladder]:
        return [Ladder((Rung(arch, 0.0),), ordered=True)]

    def random(self, rng: random.Random) -> Setting:
        return Setting({layer: rng.choice(self.ops) for layer in self.layers})


class Noisy:
    """``gain`` for every layer whose operation is the last, plus normal noise."""

    def __init__(self, space: Flat, gain: float, sigma: float, seed: int) -> None:
        self.space, self.gain, self.sigma, self.rng = space, gain, sigma, random.Random(seed)

    def utility(self, arch: Setting) -> float:
        return self.gain * sum(arch[layer] == self.space.ops[-1] for layer in self.space.layers)

    def evaluate(self, request: Request) -> float:
        return self.utility(request.arch) + self.rng.gauss(0, self.sigma)


def search(
    *, num_layers=3, num_rivals=3, sigma=1.0, epsilon=1.0, gain=0.0, seed=0, radius=None, **options
) -> tuple[Found, Noisy]:
    space = Flat(num_layers, num_rivals)
    proxy = Noisy(space, gain, sigma, seed)
    band = Band.around({"cost": Reading(value=1.0, unit="ms")}, 0.1)
    near = IsoCost(space, band, lambda arch: {"cost": Reading(value=1.0, unit="ms")})
    config = SearchConfig(epsilon=epsilon, confidence=1 - DELTA, climb=False, **options)
    # the mixture boundary is tightest where radii are about to settle the question
    best_at = max(1, math.ceil(32 * sigma**2 / epsilon**2 * math.log(2 / DELTA)))
    made = radius or known_sigma(sigma, "mixture", best_at)
    return Search(space, Sampler(proxy, Journal()), made, config).run(near, [space.start()]), proxy


def evaluations(num_runs: int, **options) -> float:
    return float(np.mean([search(seed=seed, **options)[0].num_evaluations for seed in range(num_runs)]))


def slope(xs, ys) -> float:
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def growth(num_runs: int, schedule: str) -> dict[str, dict]:
    ranges = {
        "inverse_eps": ("epsilon", (2.0, 1.4, 1.0, 0.7, 0.5)),
        "sigma": ("sigma", (0.5, 0.7, 1.0, 1.4, 2.0)),
        "layers": ("num_layers", (2, 4, 8, 16)),
        "rivals": ("num_rivals", (2, 4, 8, 16)),
    }
    if schedule == "per-layer":
        ranges = {"inverse_eps": ("epsilon", (2.0, 1.4, 1.0)), "layers": ("num_layers", (2, 4, 8))}
    told = {}
    for name, (option, values) in ranges.items():
        base = {"epsilon": 2.0} if schedule == "per-layer" and option != "epsilon" else {}
        counts = [evaluations(num_runs, schedule=schedule, **{**base, option: value}) for value in values]
        xs = [1 / value for value in values] if name == "inverse_eps" else values
        told[name] = {"values": list(values), "evaluations": [round(c, 1) for c in counts], "slope": slope(xs, counts)}
    return told


def failures(num_runs: int, **options) -> dict[str, float]:
    false, counts = 0, []
    for seed in range(num_runs):
        found, proxy = search(num_layers=2, num_rivals=2, gain=1.01, seed=seed, **options)
        best = max(
            proxy.utility(proposal.apply(found.arch))
            for layer in proxy.space.layers
            for proposal in proxy.space.proposals(found.arch, layer)
        )
        false += best - proxy.utility(found.arch) > found.claim.epsilon + 1e-12
        counts.append(found.num_evaluations)
    return {
        "runs": num_runs,
        "rate": false / num_runs,
        "rate_upper": binomial_upper(false, num_runs, 0.95),
        "evaluations": float(np.mean(counts)),
    }


def ever_missed(num_streams: int, num_samples: int = 1000) -> dict[str, float]:
    """Share of streams of normal samples whose running mean leaves the interval at some count."""
    stream = np.random.default_rng(0).normal(size=(num_streams, num_samples))
    counts = np.arange(1, num_samples + 1)
    mean = np.abs(np.cumsum(stream, axis=1) / counts)
    radii = {
        "fixed count (the paper's), not anytime": fixed_radius,
        "union over counts": union_radius,
        "stitched": stitched_radius,
        "normal mixture, best at 16": mixture_radius,
    }
    return {
        name: float((mean > np.array([radius(n, 1.0, DELTA) for n in counts.tolist()])).any(axis=1).mean())
        for name, radius in radii.items()
    }


def widths() -> dict[str, list[float]]:
    counts = (2, 4, 16, 64, 256, 1024)
    radii = {
        "fixed count (the paper's), not anytime": lambda n: fixed_radius(n, 1.0, DELTA),
        "union over counts": lambda n: union_radius(n, 1.0, DELTA),
        "stitched": lambda n: stitched_radius(n, 1.0, DELTA),
        "normal mixture, best at 16": lambda n: mixture_radius(n, 1.0, DELTA, 16),
        "normal mixture, best at 256": lambda n: mixture_radius(n, 1.0, DELTA, 256),
        "Student mixture (sigma unknown), s = sigma": lambda n: student_radius(n, 1.0, DELTA, 16),
        "empirical Bernstein, width 6 sigma": lambda n: bernstein_radius(n, 1.0, 6.0, DELTA),
    }
    return {"samples": list(counts)} | {
        name: [radius(n) * math.sqrt(n) for n in counts] for name, radius in radii.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs")
    quick = parser.parse_args().quick
    summary = Summary(HERE)
    table = widths()
    print(f"| radius times sqrt(n), sigma 1, delta {DELTA} | " + " | ".join(f"n={n}" for n in table["samples"]) + " |")
    print("|---|" + "---|" * len(table["samples"]))
    for name, row in table.items():
        if name != "samples":
            print(f"| {name} | " + " | ".join("inf" if math.isinf(v) else f"{v:.2f}" for v in row) + " |")
    print("\n| evaluations against | values | mean evaluations | slope | theory |\n|---|---|---|---|---|")
    theory = {"inverse_eps": "2", "sigma": "2", "layers": "1", "rivals": "1"}
    paper = {"inverse_eps": "2", "layers": "3 (the paper says 1)"}
    grown = {schedule: growth(2 if quick else 12, schedule) for schedule in ("pooled", "per-layer")}
    for schedule, rows in grown.items():
        for name, row in rows.items():
            print(
                f"| {schedule}: {name.replace('_', ' ')} | {', '.join(map(str, row['values']))} | "
                f"{', '.join(f'{c:.0f}' for c in row['evaluations'])} | {row['slope']:.2f} | "
                f"{(theory if schedule == 'pooled' else paper)[name]} |"
            )
    num_runs = 100 if quick else 1000
    cases = {
        "normal mixture (default)": {},
        "stitched": {"radius": known_sigma(1.0, "stitched")},
        "union": {"radius": known_sigma(1.0, "union")},
        "successive elimination": {"rule": "elimination"},
        "fixed count, no union over arms (not valid)": {"radius": lambda n, v, d: fixed_radius(n, 1.0, DELTA)},
    }
    print(f"\n| claims at delta {DELTA} | false | at most (95 %) | mean evaluations |\n|---|---|---|---|")
    failed = {}
    for name, options in cases.items():
        failed[name] = row = failures(num_runs, **options)
        print(f"| {name} | {row['rate']:.1%} | {row['rate_upper']:.1%} | {row['evaluations']:.0f} |")
    missed = ever_missed(500 if quick else 5000)
    print(f"\n| intervals at delta {DELTA}, looked at after each of 1000 samples | ever missed |\n|---|---|")
    for name, share in missed.items():
        print(f"| {name} | {share:.1%} |")
    figures = {
        "slope_inverse_eps": round(grown["pooled"]["inverse_eps"]["slope"], 4),
        "failure_rate": round(failed["normal mixture (default)"]["rate"], 4),
        "delta": DELTA,
        "slope_layers": round(grown["pooled"]["layers"]["slope"], 4),
        "slope_layers_paper_schedule": round(grown["per-layer"]["layers"]["slope"], 4),
        "interval_miss_rate": round(missed["normal mixture, best at 16"], 4),
        "interval_miss_rate_fixed_count": round(missed["fixed count (the paper's), not anytime"], 4),
    }
    print(json.dumps(figures, indent=1))
    summary.write(
        figures,
        packages=("numpy",),
        quick=quick,
        widths={name: [None if math.isinf(v) else round(v, 4) for v in row] for name, row in table.items()},
        growth=grown,
        failures=failed,
        ever_missed=missed,
    )


if __name__ == "__main__":
    main()
