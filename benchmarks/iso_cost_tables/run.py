"""Is search at equal device cost better than normalising, penalising, rejecting, and the field's optimisers?

    .venv/bin/python benchmarks/iso_cost_tables/run.py [--quick]

NAS-Bench-201 with the recorded trainings of three data sets and the recorded latencies of twelve devices. Every seed
draws an anchor architecture; its measured latency on the device, plus or minus 5 %, is what all methods may spend. All
methods see the same noisy evaluations (same seed, architecture and repetition: same value) and the same costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from peers import Purse, optuna_search, regularised_evolution
from scipy.stats import spearmanr

from apportion.core.knob import Setting
from apportion.methods.search.anchors import recompensate, starts_in_band
from apportion.methods.search.band import Band
from apportion.methods.search.baselines import penalised, random_local
from apportion.methods.search.evidence import Evidence, known_sigma
from apportion.methods.search.loop import Found, Search, SearchConfig
from apportion.methods.search.mutate import Neighbour, mutate
from apportion.methods.search.neighbours import IsoCost, Uncompensated
from apportion.methods.search.pareto import hypervolume
from apportion.methods.search.proxy import FULL, Journal, Request, Sampler
from apportion.methods.search.spaces.nasbench201 import DATASETS, Nasbench201, TableCost, TableProxy
from apportion.numerics.multiple import binomial_upper
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
DEVICES = (
    "1080ti_1",
    "1080ti_256",
    "2080ti_32",
    "titan_rtx_256",
    "titanx_32",
    "gold_6226",
    "gold_6240",
    "silver_4114",
    "pixel2",
    "pixel3",
    "essential_ph_1",
    "raspi4",
)
TAU, CONFIDENCE, EVALUATIONS = 0.05, 0.95, 200
CURVE = (25, 50, 100, 150, 200)
NUM_STARTS, NUM_COMPENSATIONS, CLIMB_SHARE = 20, 8, 0.9  # chosen on the anchors of seeds 100 to 102, c100
PEERS = ("TPE", "NSGA-II", "regularised evolution")
OURS = "iso-cost"


class Problem:
    """One device, data set and seed: the anchor, the band, the costs and the noisy evaluations."""

    def __init__(self, bench: Bench, device: str, data: str, seed: int, noise: str = "pooled") -> None:
        self.bench, self.space, self.device, self.seed = bench, bench.space, device, seed
        self.proxy = bench.proxy(data, seed, noise)
        self.sigma = bench.proxy(data, 0, "pooled").sigma
        self.truth = self.proxy.truth
        self.anchor = bench.anchor(seed)
        self.key = f"latency@{device}"
        self.cost = bench.cost(device)
        self.budget = (1 + TAU) * self.latency(self.anchor)
        self.band = Band.around(self.cost(self.anchor), TAU)
        latency = self.space.column(device)
        self.best = float(self.truth[self.space.kept & (latency <= self.budget)].max())
        inside = self.space.kept & (latency <= self.budget) & (latency >= (1 - TAU) * self.latency(self.anchor))
        self.best_in_band = float(self.truth[inside].max())

    def latency(self, arch: Setting) -> float:
        return self.cost(arch)[self.key].value

    def over(self, arch: Setting) -> float:
        return self.latency(arch) / self.budget - 1

    def f(self, arch: Setting) -> float:
        return float(self.truth[self.space.row[arch]])

    def regret(self, arch: Setting | None) -> float:
        """To the best within the budget; a result over the budget can't be used, so the anchor stays."""
        return self.best - self.f(arch if arch is not None and self.over(arch) <= 1e-9 else self.anchor)

    def sampler(self, limit: int | None) -> Sampler:
        return Sampler(self.proxy, Journal(), max_evaluations=limit)

    def config(self, limit: int | None, **options: object) -> SearchConfig:
        """With few evaluations most go to finding, without a limit all that is needed goes to the claim."""
        share = 0.5 if limit is None else CLIMB_SHARE
        wanted = {"epsilon": 2 * self.sigma, "confidence": CONFIDENCE, "climb_share": share, "num_climbs": 2} | options
        return SearchConfig(**wanted)

    def near(self) -> IsoCost:
        return IsoCost(self.space, self.band, self.cost, num=NUM_COMPENSATIONS)

    def starts(self, band: Band, cost: TableCost) -> list[Setting]:
        """The anchor and random architectures that the method may use."""
        found = starts_in_band(self.space, band, cost, NUM_STARTS, random.Random(self.seed))
        return list(dict.fromkeys([self.anchor, *found]))[:NUM_STARTS]

    def run(
        self, limit: int | None, near: IsoCost | Uncompensated, band: Band, cost: TableCost, **options: object
    ) -> Found:
        search = Search(self.space, self.sampler(limit), known_sigma(self.sigma), self.config(limit, **options))
        return search.run(near, self.starts(band, cost))

    def iso(self, limit: int | None, **options: object) -> Found:
        return self.run(limit, self.near(), self.band, self.cost, **options)

    def counted(self, name: str, limit: int) -> Setting:
        """The same search with parameters or FLOPs in place of the device."""
        cost = self.bench.cost(name)
        band = Band.around(cost(self.anchor), TAU)
        return self.run(limit, IsoCost(self.space, band, cost, num=NUM_COMPENSATIONS), band, cost).arch

    def penalty(self, limit: int) -> Setting:
        return penalised(
            self.space,
            self.sampler(limit),
            known_sigma(self.sigma),
            self.config(limit),
            Uncompensated(self.space, None, self.cost),
            self.starts(self.band, self.cost),
            cost=self.latency,
            budget=self.budget,
        ).arch

    def rejecting(self, limit: int) -> Setting:
        band = Band.around(self.cost(self.anchor), TAU, one_sided=True)
        return self.run(limit, Uncompensated(self.space, band, self.cost), band, self.cost).arch

    def wandering(self, limit: int) -> Setting:
        evidence = Evidence(known_sigma(self.sigma), 1 - CONFIDENCE)
        near = IsoCost(self.space, self.band, self.cost)
        return random_local(self.sampler(limit), evidence, near, self.space.layers, self.anchor, self.seed)

    def purse(self, limit: int) -> Purse:
        return Purse(lambda arch, replicate: self.proxy.evaluate(Request(arch, FULL, replicate)), limit)

    def methods(self) -> dict[str, Callable[[int], Setting | None]]:
        return {
            OURS: lambda limit: self.iso(limit).arch,
            "parameter-normalised": lambda limit: self.counted("params", limit),
            "FLOP-normalised": lambda limit: self.counted("flops", limit),
            "cost penalty, tuned": self.penalty,
            "reject above budget": self.rejecting,
            "random local": self.wandering,
            "TPE": lambda limit: optuna_search("tpe", self.space, self.purse(limit), self.over, self.seed),
            "NSGA-II": lambda limit: optuna_search("nsga2", self.space, self.purse(limit), self.over, self.seed),
            "regularised evolution": lambda limit: regularised_evolution(
                self.space, self.purse(limit), self.over, self.seed
            ),
        }

    def claim_true(self, found: Found) -> bool:
        """Whether no neighbour is better by more than claimed, by the recorded means."""
        around = self.near().around(found.arch, self.space.layers)
        best = max((self.f(arch) for arch in around.archs), default=-math.inf)
        return self.f(found.arch) >= best - found.claim.epsilon and self.band.holds(self.cost(found.arch))


class Bench:
    """The tables, read once."""

    def __init__(self) -> None:
        self.space = Nasbench201()
        self._costs: dict[str, TableCost] = {}
        self._proxies: dict[tuple[str, int, str], TableProxy] = {}

    def cost(self, name: str) -> TableCost:
        if name not in self._costs:
            self._costs[name] = TableCost(self.space, [name])
        return self._costs[name]

    def proxy(self, data: str, seed: int, noise: str) -> TableProxy:
        if (data, seed, noise) not in self._proxies:
            proxy = TableProxy(self.space, data, seed, noise)
            if (data, 0, "pooled") in self._proxies:  # the tables are the same for every seed
                first = self._proxies[data, 0, "pooled"]
                for name in ("runs", "truth", "residuals", "sigma"):
                    proxy.__dict__[name] = getattr(first, name)
            self._proxies[data, seed, noise] = proxy
        return self._proxies[data, seed, noise]

    def anchor(self, seed: int) -> Setting:
        """A random architecture of middling size, the same on every device."""
        params = self.space.column("params")
        low, high = np.quantile(params, [0.3, 0.8])
        rng = random.Random(f"anchor {seed}")
        while True:
            arch = self.space.random(rng)
            if low <= params[self.space.row[arch]] <= high and self.proxy("c100", 0, "pooled").truth[
                self.space.row[arch]
            ] > np.quantile(self.proxy("c100", 0, "pooled").truth, 0.25):
                return arch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three devices, one data set, three seeds")
    quick = parser.parse_args().quick
    devices, datasets, num_seeds = (DEVICES[:3], DATASETS[1:2], 3) if quick else (DEVICES, DATASETS, 8)
    summary = Summary(HERE)
    bench = Bench()
    problems = [
        Problem(bench, device, data, seed)
        for device, data, seed in itertools.product(devices, datasets, range(num_seeds))
    ]
    regrets = compare(problems)
    curve = {limit: [p.regret(p.iso(limit).arch) for p in problems] for limit in CURVE[:-1]}
    curve[EVALUATIONS] = regrets[OURS]["regret"]
    claims = check_claims(bench, devices, datasets, num_seeds)
    ranks = rank_correlation(bench, devices, num_seeds)
    volumes = hypervolumes(bench, devices, num_seeds)
    matrix = transfer_matrix(bench, devices, num_seeds)
    figures = print_all(regrets, curve, claims, ranks, volumes, matrix, devices)
    summary.write(
        figures,
        packages=("optuna", "numpy"),
        quick=quick,
        regret={name: describe(rows) for name, rows in regrets.items()},
        curve={str(limit): round(float(np.mean(values)), 4) for limit, values in curve.items()},
        claims=claims,
        rank_correlation=ranks,
        hypervolume=volumes,
        transfer=matrix,
    )


def compare(problems: list[Problem]) -> dict[str, dict[str, list[float]]]:
    """Regret, cost and time of every method on every problem, methods in turns."""
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, problem in enumerate(problems):
        for name, method in problem.methods().items():
            began = time.perf_counter()
            arch = method(EVALUATIONS)
            rows[name]["seconds"].append(time.perf_counter() - began)
            rows[name]["regret"].append(problem.regret(arch))
            over = math.inf if arch is None else problem.over(arch)
            rows[name]["within_budget"].append(float(over <= 1e-9))
            rows[name]["in_band"].append(float(arch is not None and problem.band.holds(problem.cost(arch))))
        if number % 24 == 23:
            print(f"  {number + 1} of {len(problems)} problems", flush=True)
    return rows


def describe(rows: dict[str, list[float]]) -> dict[str, float]:
    low, high = bootstrap(rows["regret"])
    return {
        "regret": round(float(np.mean(rows["regret"])), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "median": round(float(np.median(rows["regret"])), 4),
        "within_budget": round(float(np.mean(rows["within_budget"])), 4),
        "in_band": round(float(np.mean(rows["in_band"])), 4),
        "seconds": round(float(np.mean(rows["seconds"])), 4),
    }


def bootstrap(values: list[float]) -> tuple[float, float]:
    """A 95 % interval of the mean."""
    rng = np.random.default_rng(0)
    means = np.array(values)[rng.integers(len(values), size=(2000, len(values)))].mean(axis=1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def check_claims(bench: Bench, devices, datasets, num_seeds: int) -> dict[str, dict[str, float]]:
    """Searches to the end, and how many of their claims are true."""
    told = {}
    cases = {
        "pooled": {},
        "whole budget of 200": {"limit": EVALUATIONS},
        "whole neighbourhood at once": {"scope": "neighbourhood"},
        "successive elimination": {"rule": "elimination"},
        "uniform": {"rule": "uniform"},
        "each cell's own noise": {"noise": "own"},
    }
    for name, case in cases.items():
        options = dict(case)
        limit, noise = options.pop("limit", None), options.pop("noise", "pooled")
        true, evaluations, epsilons, asked = [], [], [], []
        for device, data, seed in itertools.product(devices, datasets, range(num_seeds)):
            problem = Problem(bench, device, data, seed, noise)
            found = problem.iso(limit, **options)
            if math.isinf(found.claim.epsilon):
                continue  # nothing was claimed
            true.append(problem.claim_true(found))
            evaluations.append(found.num_evaluations)
            epsilons.append(found.claim.epsilon / problem.sigma)
            asked.append(found.claim.as_asked)
        told[name] = {
            "claims": len(true),
            "true_share": round(float(np.mean(true)), 4) if true else None,
            "true_share_lower": round(1 - binomial_upper(len(true) - sum(true), len(true), 0.95), 4) if true else None,
            "as_asked": round(float(np.mean(asked)), 4) if asked else None,
            "evaluations": round(float(np.mean(evaluations)), 1) if evaluations else None,
            "epsilon_sigmas": round(float(np.mean(epsilons)), 2) if epsilons else None,
        }
    return told


def rank_correlation(bench: Bench, devices, num_seeds: int) -> dict[str, float]:
    """How alike proposals rank when compensated by parameters and by device, and where the former end on the device."""
    agreements, inside = [], []
    for device, seed in itertools.product(devices, range(num_seeds)):
        problem = Problem(bench, device, "c100", seed)
        params = bench.cost("params")
        band = Band.around(params(problem.anchor), TAU)
        pairs = []
        for layer in bench.space.layers:
            for proposal in bench.space.proposals(problem.anchor, layer):
                ours = mutate(bench.space, problem.anchor, proposal, problem.band, problem.cost)
                theirs = mutate(bench.space, problem.anchor, proposal, band, params)
                if isinstance(theirs, list):
                    inside.append(problem.band.holds(problem.cost(theirs[0].arch)))
                    if isinstance(ours, list):
                        pairs.append((problem.f(ours[0].arch), problem.f(theirs[0].arch)))
        if len({a for a, _ in pairs}) > 2 and len({b for _, b in pairs}) > 2:
            agreements.append(float(spearmanr([a for a, _ in pairs], [b for _, b in pairs])[0]))
    return {
        "spearman": round(float(np.mean(agreements)), 4),
        "param_normalised_in_device_band": round(float(np.mean(inside)), 4),
    }


def hypervolumes(bench: Bench, devices, num_seeds: int) -> dict[str, float]:
    """Area under the front over five anchors, relative to that of the best architectures of the table."""
    shares: dict[str, list[float]] = defaultdict(list)
    for device, seed in itertools.product(devices, range(min(3, num_seeds))):
        latency, truth = bench.space.column(device), bench.proxy("c100", 0, "pooled").truth
        kept = bench.space.kept
        reference = (float(np.quantile(latency[kept], 0.95)) * (1 + TAU), float(np.quantile(truth[kept], 0.1)))
        front = [(float(c), float(u)) for c, u in zip(latency[kept], truth[kept], strict=True)]
        whole = hypervolume(front, reference)
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for quantile in (0.15, 0.35, 0.55, 0.75, 0.95):
            value = float(np.quantile(latency[kept], quantile))
            row = int(np.argmin(np.where(kept, np.abs(latency - value), np.inf)))
            problem = Problem(bench, device, "c100", seed)
            problem.anchor = bench.space.archs[row]
            problem.budget = (1 + TAU) * problem.latency(problem.anchor)
            problem.band = Band.around(problem.cost(problem.anchor), TAU)
            best = problem.space.kept & (latency <= problem.budget)
            best &= latency >= (1 - TAU) * problem.latency(problem.anchor)
            top = int(np.argmax(np.where(best, truth, -np.inf)))
            points["the best of each band"].append((float(latency[top]), float(truth[top])))
            for name in (OURS, "parameter-normalised", "reject above budget", "regularised evolution"):
                arch = problem.methods()[name](EVALUATIONS // 2)
                arch = arch if arch is not None and problem.over(arch) <= 1e-9 else problem.anchor
                points[name].append((problem.latency(arch), problem.f(arch)))
        for name, found in points.items():
            shares[name].append(hypervolume(found, reference) / whole)
    return {name: round(float(np.mean(values)), 4) for name, values in shares.items()}


def transfer_matrix(bench: Bench, devices, num_seeds: int) -> dict[str, dict[str, float | None]]:
    """Gain kept when a solution of the row's device is compensated again on the column's, over the native gain."""
    kept: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in range(num_seeds):
        native = {}
        for device in devices:
            problem = Problem(bench, device, "c100", seed)
            native[device] = (problem, problem.iso(EVALUATIONS).arch)
        for source, target in itertools.product(devices, devices):
            problem, own = native[target]
            moved = recompensate(bench.space, native[source][1], problem.band, problem.cost)
            gain = problem.f(own) - problem.f(problem.anchor)
            if gain > problem.sigma:
                got = problem.f(moved.arch) - problem.f(problem.anchor) if isinstance(moved, Neighbour) else 0.0
                kept[source, target].append(got / gain)
    return {
        source: {
            target: round(float(np.mean(kept[source, target])), 3) if kept[source, target] else None
            for target in devices
        }
        for source in devices
    }


def print_all(regrets, curve, claims, ranks, volumes, matrix, devices) -> dict[str, float]:
    described = {name: describe(rows) for name, rows in regrets.items()}
    print(f"\n| {EVALUATIONS} evaluations | mean regret, % points | 95 % interval | median | within budget | in band |")
    print("|---|---|---|---|---|---|")
    for name, row in sorted(described.items(), key=lambda pair: pair[1]["regret"]):
        print(
            f"| {name} | {row['regret']:.2f} | {row['low']:.2f} to {row['high']:.2f} | {row['median']:.2f} | "
            f"{row['within_budget']:.0%} | {row['in_band']:.0%} |"
        )
    print("\n| evaluations | " + " | ".join(str(limit) for limit in curve) + " |\n|---|" + "---|" * len(curve))
    print("| iso-cost, mean regret | " + " | ".join(f"{np.mean(values):.2f}" for values in curve.values()) + " |")
    print("\n| claims | made | true | at least (95 %) | as asked | evaluations | epsilon, in sigma |")
    print("|---|---|---|---|---|---|---|")
    for name, row in claims.items():
        if row["claims"]:
            print(
                f"| {name} | {row['claims']} | {row['true_share']:.1%} | {row['true_share_lower']:.1%} | "
                f"{row['as_asked']:.0%} | {row['evaluations']:.0f} | {row['epsilon_sigmas']:.2f} |"
            )
    print(
        f"\nproposals compensated by parameters and by device rank alike with Spearman {ranks['spearman']:.2f}; of the "
        f"former {ranks['param_normalised_in_device_band']:.0%} lie in the device's band"
    )
    print("\n| hypervolume over five anchors, share of the table's front | |\n|---|---|")
    for name, value in volumes.items():
        print(f"| {name} | {value:.3f} |")
    print("\n| gain kept, from / to | " + " | ".join(devices) + " |\n|---|" + "---|" * len(devices))
    for source, row in matrix.items():
        print(f"| {source} | " + " | ".join("" if row[t] is None else f"{row[t]:.2f}" for t in devices) + " |")
    best = min(PEERS, key=lambda name: described[name]["regret"])
    goal = described[best]["regret"]
    reached = next((limit for limit in CURVE if float(np.mean(curve[limit])) <= goal), None)
    done = claims["pooled"]
    figures = {
        "devices": len(devices),
        "regret_ratio_best_peer": round(described[OURS]["regret"] / goal, 4),
        "regret_ratio_param_norm": round(described[OURS]["regret"] / described["parameter-normalised"]["regret"], 4),
        "claim_true_share": done["true_share"],
        "stated_confidence": CONFIDENCE,
        "evaluations_ratio_best_peer": None if reached is None else round(reached / EVALUATIONS, 4),
    }
    print(f"\nbest peer: {best}\n{json.dumps(figures, indent=1)}")
    return figures


if __name__ == "__main__":
    main()
