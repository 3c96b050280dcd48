"""What does a side branch cost, and when is one resident backbone cheaper than a merged network for every task?

.venv/bin/python benchmarks/adapt_shared/run.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from apportion.device.child import time_in_turns
from apportion.device.measure import Shape
from apportion.device.target import find_target
from apportion.methods.adapt.groups import Groups, bundles
from apportion.methods.adapt.shared import SharedTasks
from apportion.methods.adapt.shared_clock import SharedClock
from apportion.methods.adapt.shared_sweep import calibrate_shared, sweep_shared
from apportion.models import Partition, load
from apportion.models.network import Network, read_out
from apportion.numerics.stats import quantile
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
TOKENS = 64
SEED = 2  # of the budgets and values that the cost model is judged on
SHARES = {"every branch closed": 0.0, "10 % open": 0.1, "50 % open": 0.5, "all open": 1.0}
FIRST = "one group of every module open"
PLAIN = "plain backbone"
Steps = dict[str, Callable[[], Any]]


def resident(network: Network, groups: Groups) -> SharedTasks:
    """A backbone with a made-up delta, since what a branch costs does not hang on the numbers in it."""
    stacks, generator = bundles(network, groups), torch.Generator().manual_seed(0)
    for bundle in stacks:
        torch.nn.init.normal_(bundle.delta, std=1e-3, generator=generator)
    return SharedTasks(network, groups, stacks, torch.full((1, groups.count), 0.5), max_plans=64)


def add(shared: SharedTasks, name: str, open_G: Tensor) -> str:
    shared.add(name, torch.ones(1))
    shared.open(name, open_G)
    return name


def first_groups(groups: Groups, share: float) -> Tensor:
    """The first groups of every module, at least one where the share is above zero."""
    module_G, rank_G = groups.module_G(), groups.rank_G()
    size_G = torch.tensor([groups.size(module) for module in groups.partition])[module_G]
    return rank_G < (share * size_G).ceil()


def own_groups(groups: Groups, share: float, number: int) -> Tensor:
    """As many groups of every module for each task as ``first_groups``, going on where the task before left off."""
    module_G, rank_G = groups.module_G(), groups.rank_G()
    size_G = torch.tensor([groups.size(module) for module in groups.partition])[module_G]
    width_G = (share * size_G).ceil()
    return (rank_G - number * width_G) % size_G < width_G


def timed(steps: Steps, seconds: float) -> dict[str, tuple[float, float]]:
    """Median latency and its standard error, by step, taken in turns."""
    found = time_in_turns(steps, seconds=seconds, tolerance=0.005)["candidates"]
    return {name: (row["median_ms"], row["stderr_ms"]) for name, row in found.items()}


def plain_step(network: Network, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    plain = network.replace(module=copy.deepcopy(network.module))

    @torch.inference_mode()
    def step() -> Tensor:
        return read_out(plain, inputs)

    return step


def branches(network: Network, groups: Groups, seconds: float) -> dict[str, tuple[float, float]]:
    """One task, one example."""
    steps: Steps = {PLAIN: plain_step(network, dict(network.inputs))}
    opens = {name: first_groups(groups, share) for name, share in SHARES.items()}
    opens[FIRST] = groups.rank_G() == 0
    with resident(network, groups) as shared:
        for name, open_G in opens.items():
            add(shared, name, open_G)
            steps[name] = lambda name=name: shared.embed(network.inputs, name)
        return timed(steps, seconds)


def mixed(network: Network, groups: Groups, num_tasks: int, seconds: float) -> dict[str, tuple[float, float]]:
    """A batch of as many examples: of one task, or of a task each, on one backbone and on merged networks.

    Tasks have the same groups open, as a budget for all of them has it, or each its own.
    """
    inputs = {name: tensor.repeat(num_tasks, 1) for name, tensor in network.inputs.items()}
    singles = [plain_step(network, dict(network.inputs)) for _ in range(num_tasks)]
    steps: Steps = {
        f"{num_tasks}: plain backbone, one pass": plain_step(network, inputs),
        f"{num_tasks}: merged networks, a pass each": lambda: [single() for single in singles],
    }
    with resident(network, groups) as shared:
        for share in (0.1, 1.0):
            open_G = first_groups(groups, share)
            tasks = [add(shared, f"{share}/{number}", open_G) for number in range(num_tasks)]
            if share < 1:
                steps[f"{num_tasks}: shared, one task, {share:.0%} open"] = lambda one=tasks[0]: shared.embed(
                    inputs, one
                )
            steps[f"{num_tasks}: shared, a task each, {share:.0%} open"] = lambda all_=tasks: shared.embed(inputs, all_)
        own = [add(shared, f"own/{number}", own_groups(groups, 0.1, number)) for number in range(num_tasks)]
        run_ratio = float(shared.running(own).float().mean())
        steps[f"{num_tasks}: shared, a task each, 10% open, each its own ({run_ratio:.0%} run)"] = lambda: shared.embed(
            inputs, own
        )
        return timed(steps, seconds)


def memory(network: Network, groups: Groups, num_tasks: int) -> tuple[float, float]:
    """Megabytes of tasks on one backbone after a batch of all of them with half the groups open, and merged."""
    inputs = {name: tensor.repeat(num_tasks, 1) for name, tensor in network.inputs.items()}
    with resident(network, groups) as shared:
        shared.embed(inputs, [add(shared, str(n), first_groups(groups, 0.5)) for n in range(num_tasks)])
        size = shared.size_bytes()
    return sum(size.values()) / 1e6, num_tasks * size["backbone"] / 1e6


def cost_model(network: Network, groups: Groups, num_held: int, quick: bool) -> dict[str, float]:
    """Error and coverage on what budgets open for random values, in another session than the fit's."""
    target, shape = find_target("torch-cpu-1t"), Shape(tokens=TOKENS)
    profile = calibrate_shared(network, groups, target, shape, num_fit=8 if quick else 24)
    clock, rng = SharedClock.of(profile, network, groups), random.Random(SEED)
    generator = torch.Generator().manual_seed(SEED)
    whole_ms = clock.upper_ms(torch.ones(groups.count, dtype=torch.bool))
    budgets = [rng.uniform(clock.floor_ms(), whole_ms) for _ in range(num_held)]
    picked = [clock.choose(torch.rand(groups.count, generator=generator) ** 3, budget) for budget in budgets]
    swept = sweep_shared(network, groups, [one.open_G for one in picked], target, shape)
    scale = profile.baseline.value / swept.baseline.value
    measured = [swept.samples[index].latency_ms * scale for index in range(num_held)]
    errors = [abs(one.predicted_ms / real - 1) for one, real in zip(picked, measured, strict=True)]
    return {
        "held_out": num_held,
        "error_median": median(errors),
        "error_p95": quantile(errors, 0.95),
        "coverage": sum(real <= one.upper_ms for one, real in zip(picked, measured, strict=True)) / num_held,
        "budgets_kept": sum(real <= budget for budget, real in zip(budgets, measured, strict=True)) / num_held,
        "utilisation": median(real / budget for budget, real in zip(budgets, measured, strict=True)),
        "margin": clock.floor_ms() / profile.cost.law.intercept_ms - 1,
        "intercept_ratio": profile.cost.law.intercept_ms / profile.baseline.value,
        "calibration_s": profile.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tasks and configurations")
    quick = parser.parse_args().quick
    summary = Summary(HERE)
    torch.set_num_threads(1)
    network = load("minilm", tokens=TOKENS)
    groups = Groups(Partition.of(network))
    figures: dict[str, float] = {}
    print("| MiniLM, 1 thread, 64 tokens, torch eager | latency, ratio to the plain backbone |\n|---|---|")

    def show(found: dict[str, tuple[float, float]], base: str) -> None:
        for name, (value_ms, stderr_ms) in found.items():
            ratio = value_ms / found[base][0]
            figures["_".join(re.findall(r"\w+", name))] = ratio
            print(f"| {name} | {ratio:.2f} ± {stderr_ms / found[base][0]:.2f} ({value_ms:.1f} ms) |")

    show(branches(network, groups, 1 if quick else 6), PLAIN)
    counts = (2,) if quick else (4, 16)
    for num_tasks in counts:
        base = f"{num_tasks}: plain backbone, one pass"
        show(mixed(network, groups, num_tasks, 1 if quick else 6), base)
    print("\n| tasks | MB on one backbone | MB merged |\n|---|---|---|")
    for num_tasks in sorted({1, 2, *counts}):
        shared_mb, merged_mb = memory(network, groups, num_tasks)
        figures |= {f"shared_mb_{num_tasks}": shared_mb, f"merged_mb_{num_tasks}": merged_mb}
        print(f"| {num_tasks} | {shared_mb:.0f} | {merged_mb:.0f} |")
    found = cost_model(network, groups, 4 if quick else 30, quick)
    figures |= found
    print("\n| the cost model on what budgets open | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.3g} |")
    rounded = {name: round(value, 4) for name, value in figures.items()}
    summary.write(rounded, packages=("torch", "transformers"), quick=quick)


if __name__ == "__main__":
    main()
