"""The adapt benchmark in minutes on two cores: few domains, few steps, few episodes, one target.

It trains ours and a baseline with one gate for all modules by the commands, judges both on the same episodes at two
budgets, measures the sizes that were chosen, and makes and verifies one model. It shows that every stage runs; with so
few steps and episodes its accuracies say nothing about methods.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from judge import SHAPE
from promises import apportion, write_support
from suite import SUITES

from apportion.cost.parts import Parts
from apportion.cost.sweep import sweep
from apportion.device.measure import Shape
from apportion.device.probe import working_target
from apportion.methods.adapt.adapt import Learned, read_learned
from apportion.methods.adapt.episodes import frozen_means
from apportion.methods.adapt.folder import AdaptFolder
from apportion.methods.adapt.pool import Pool, read_pool
from apportion.methods.adapt.solve import solve
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Episode, Part, Sampler
from apportion.tasks.heads import class_means, cosines
from apportion.tasks.protocol import load_protocol, read_protocol

TARGET = "ort-cpu-1t"
METHODS = {"ours": "learned", "global": "uniform"}
BUDGETS = (0.25, 0.5)
STEPS = 2
EPISODES = 2  # of each side
PROTOCOLS = {
    "text": """
train = [{domain = "clinc150/home", splits = ["train"]}, {domain = "clinc150/travel", splits = ["train"]}]
id = [{domain = "clinc150/home", splits = ["test"]}, {domain = "clinc150/travel", splits = ["test"]}]
ood = [{domain = "snips"}]
""",
    "vision": """
train = [{domain = "grocery", folds = [0, 1, 2, 3]}]
id = [{domain = "grocery", folds = [4]}]
ood = [{domain = "sign_digits"}]
""",
}


def run_quick(suite: str) -> dict[str, float]:
    """Prints a table, and returns the figures; the runs lie in ``build/adapt_quick`` and are made anew."""
    began, model = time.perf_counter(), SUITES[suite][0]
    folder = Path(__file__).parents[2] / "build" / "adapt_quick" / f"{suite}-{time.time_ns()}"
    folder.mkdir(parents=True)
    tasks = folder / "tasks.toml"
    tasks.write_text(f'name = "quick"\n{PROTOCOLS[suite]}')
    profile: list[str] = []
    for name, allocation in METHODS.items():
        settings = ["--steps", str(STEPS), "--episodes", "1", "--allocation", allocation, "-o", str(folder / name)]
        apportion("adapt", model, "--tasks", str(tasks), "--targets", TARGET, *profile, *settings)
        profile = profile or ["--profile", str(AdaptFolder(folder / name).profile(TARGET))]
        print(f"{name}: trained after {time.perf_counter() - began:.0f} s", flush=True)
    learned = {name: read_learned(folder / name) for name in METHODS}
    loaded = load_protocol(read_protocol(tasks), load_domain)
    domains = {domain.name: domain for side in ("id", "ood") for domain in getattr(loaded, side)}
    network = learned["ours"].family.network
    pools = {name: read_pool(network, domain) for name, domain in domains.items()}
    samplers = {side: Sampler(getattr(loaded, side), SHAPE, seed=77) for side in ("id", "ood")}
    episodes = [(side, sampler.episode(n)) for side, sampler in samplers.items() for n in range(EPISODES)]
    used, held = [], []
    print("\n| method | budget | id, % | ood, % | used |\n" + "|---" * 5 + "|")
    for name, one in learned.items():
        for rho in BUDGETS:
            right: dict[str, list[float]] = {"id": [], "ood": []}
            chosen = {}
            for side, episode in episodes:
                accuracy, sizes = judge(one, *shrink(pools[episode.domain], episode), rho)
                right[side].append(accuracy)
                chosen[tuple(sizes.values())] = sizes
            shares = [latency / rho for latency in measure_ratios(one, list(chosen.values()))]
            used += shares if name == "ours" else []
            held += [share <= 1 for share in shares] if name == "ours" else []
            told = [f"{100 * np.mean(right[side]):.0f}" for side in right]
            print(f"| {name} | {rho:.0%} | {' | '.join(told)} | {np.mean(shares):.0%} |", flush=True)
    verified = verify_one(folder, domains, episodes[0][1])
    seconds = time.perf_counter() - began
    print(
        f"\none model made at {BUDGETS[1]:.0%} of the latency, verified: {'yes' if verified else 'no'}; {seconds:.0f} s"
    )
    return {
        "feasibility": round(float(np.mean(held)), 4),
        "utilisation": round(float(np.mean(used)), 4),
        "promises_kept": float(verified),
        "seconds": round(seconds, 1),
    }


def shrink(pool: Pool, episode: Episode) -> tuple[Pool, Episode]:
    """The rows of an episode alone, so that no others are computed."""
    row_N = np.concatenate([episode.support.row_N, episode.query.row_N])
    count, place = len(episode.support.row_N), torch.from_numpy(row_N)
    small = Pool(
        pool.name,
        {name: tensor[place] for name, tensor in pool.inputs.items()},
        None if pool.length_N is None else pool.length_N[place],
    )
    support = Part(row_N=np.arange(count), label_N=episode.support.label_N)
    query = Part(row_N=np.arange(count, len(row_N)), label_N=episode.query.label_N)
    return small, replace(episode, support=support, query=query)


@torch.no_grad()
def judge(learned: Learned, pool: Pool, episode: Episode, rho: float) -> tuple[float, dict[str, int]]:
    """Accuracy by class means of the network for a budget, sliced, and its sizes."""
    family, clock = learned.family, learned.family.clocks[TARGET]
    alpha_M = family.plan(frozen_means(pool.on(family.network, "cpu"), episode), rho, TARGET).alpha_M
    value_L = learned.values(rho) if learned.config.allocation == "learned" else None
    sizes = solve(family, alpha_M, rho * clock.whole_ms, clock, value_L, num_steps=0).sizes
    feature_NF = pool.on(family.sliced(alpha_M, sizes), "cpu").feature_NF
    support_S, query_Q = torch.from_numpy(episode.support.row_N), torch.from_numpy(episode.query.row_N)
    mean_WF = class_means(feature_NF[support_S], torch.from_numpy(episode.support.label_N), episode.ways)
    right_Q = cosines(feature_NF[query_Q], mean_WF).argmax(-1).numpy() == episode.query.label_N
    return float(right_Q.mean()), sizes


def measure_ratios(learned: Learned, sizes: list[dict[str, int]]) -> list[float]:
    """Latency of every choice of sizes as a share of the whole network's, measured now."""
    family = learned.family
    parts = Parts.of(family.network, family.partition)
    swept = sweep(family.network, parts, sizes, working_target(TARGET), Shape(batch=1, tokens=32))
    return [sample.latency_ms / swept.baseline.value for sample in swept.samples.values()]


def verify_one(folder: Path, domains: dict, episode: Episode) -> bool:
    """Makes a model of ours by the command and verifies it in a fresh process."""
    support = write_support(domains[episode.domain], episode, folder)
    where = ["--support", str(support), "--budget", f"{BUDGETS[1]:.0%}", "--target", TARGET, "-o", str(folder / "made")]
    if apportion("specialize", str(folder / "ours"), *where) is None:
        return False
    again = apportion("verify", str(folder / "made"))
    return again is not None and bool(again["met"])
