"""Calibrating shared mode: sets of open groups are timed beside the plain backbone, in fresh processes.

Run as ``python -m apportion.methods.adapt.shared_sweep`` with a job on standard input it is that process. What a branch
costs does not hang on the numbers in it, so a process makes up its own delta.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from apportion.core.folder import write_whole
from apportion.core.meter import Reading
from apportion.cost.bound import UpperBound, num_needed
from apportion.cost.calibrate import ALPHA, bounding_among
from apportion.cost.model import CostModel
from apportion.cost.parts import View
from apportion.cost.profile import Profile
from apportion.cost.sample import CostError, Sample
from apportion.cost.sweep import WHOLE, Swept, shared_error
from apportion.cost.view import choose_options
from apportion.device.build import cache_folder
from apportion.device.child import time_in_turns
from apportion.device.measure import Session, Shape, Timing
from apportion.device.process import Limits, run_child
from apportion.device.target import Target, machine
from apportion.device.turn import turn
from apportion.errors import MeasureError, TargetError
from apportion.methods.adapt.groups import Groups, bundles
from apportion.methods.adapt.shared import SharedTasks, cost_shares
from apportion.methods.adapt.shared_clock import SharedClock, branch_signatures
from apportion.methods.adapt.shared_draw import anchor_opens, draw_opens, draw_picks
from apportion.models.load import load
from apportion.models.network import Network, read_out
from apportion.models.partition import Partition

NUM_FIT = 24
NUM_FIRST = 18  # random sets that the preliminary fit has beside the anchors
CHUNK = 30  # sets of open groups that a process holds gathered beside each other
PROCESSES = 2
MIXED = 4  # tasks in a batch that is large enough


def calibrate_shared(
    network: Network,
    groups: Groups,
    target: Target,
    shape: Shape,
    *,
    seed: int = 0,
    num_fit: int = NUM_FIT,
    num_bound: int | None = None,
    on_share: Callable[[float], None] | None = None,
) -> Profile:
    """The profile of shared mode: a law fitted to some sets of open groups and bounded with others.

    A preliminary fit, in one process, tells what budgets would open. The bound is calibrated on such sets alone, and
    half of what the law is fitted to are such, too, the rest random. All are then timed together: what the clock did in
    the preliminary process is used for nothing else.

    Args:
        target: torch eager on the CPU; side branches run nowhere else.
        shape: of the batch that the latency is about.
        num_bound: sets to calibrate the bound on; by default as few as 95 % needs, and a fifth more.
        on_share: told the share of the work done after the preliminary fit.
    """
    began = time.perf_counter()
    num_bound = num_needed(ALPHA) * 6 // 5 if num_bound is None else num_bound
    anchors, signature_of = anchor_opens(groups), branch_signatures(network, groups)

    def profile(swept: Swept, cost: CostModel) -> Profile:
        return Profile(
            model=network.origin.ref,
            target=target,
            shape=shape,
            baseline=swept.baseline,
            floor_ms=swept.samples[len(anchors) - 2].latency_ms,
            cost=cost,
            view=View(),
            seed=seed,
            seconds=time.perf_counter() - began,
            machine=machine(),
            failures={},
        )

    first = [*anchors, *draw_opens(groups, NUM_FIRST, seed)]
    swept = sweep_shared(network, groups, first, target, shape, processes=1)
    law = fit_law_shared(list(swept.samples.values()), signature_of)
    exact = replace(law, bound=UpperBound(ALPHA, (0.0,), (0,)))  # budgets are drawn, so no margin is missed
    clock = SharedClock.of(profile(swept, exact), network, groups)
    picks = draw_picks(clock, num_bound + num_fit // 2, seed)
    to_fit = [*draw_opens(groups, num_fit - num_fit // 2, seed + 1), *picks[num_bound:]]
    random.Random(seed).shuffle(to_fit)
    fitting, bounds = iter(to_fit), iter(picks[:num_bound])
    bounding = bounding_among(len(anchors), num_fit, num_bound)
    places = range(len(anchors), len(anchors) + num_fit + num_bound)
    opens = [*anchors, *(next(bounds if place in bounding else fitting) for place in places)]
    swept = sweep_shared(network, groups, opens, target, shape, on_share=on_share)
    return profile(swept, fit_shared(swept, signature_of, bounding))


def fit_law_shared(samples: Sequence[Sample], signature_of: Mapping[str, str]) -> CostModel:
    """The law without a bound, and without a residual, so that more work never costs less."""
    options = choose_options(samples, signature_of)
    return CostModel.fit(samples, signature_of, knots=options.knots, ridge=options.ridge, residual="off")


def fit_shared(swept: Swept, signature_of: Mapping[str, str], bounding: frozenset[int]) -> CostModel:
    """Fits the law to all samples but those that bound it."""
    to_fit = [sample for index, sample in swept.samples.items() if index not in bounding]
    to_bound = [sample for index, sample in swept.samples.items() if index in bounding]
    return fit_law_shared(to_fit, signature_of).bounded(to_bound, ALPHA, drift=swept.drift)


def sweep_shared(
    network: Network,
    groups: Groups,
    opens: Sequence[Tensor],
    target: Target,
    shape: Shape,
    *,
    processes: int = PROCESSES,
    seconds_each: float = 0.25,
    on_share: Callable[[float], None] | None = None,
) -> Swept:
    """Latency of every set of open groups, as its ratio to the plain backbone in the same process times the baseline.

    Raises:
        TargetError: the target is not torch eager on the CPU.
        MeasureError: a process died.
    """
    if (target.runtime, target.precision, target.device) != ("torch", "fp32", "cpu"):
        raise TargetError(
            f"side branches don't run on {target.name}; shared mode is priced on torch-cpu-1t and its like"
        )
    if network.origin.factory is not None:
        raise CostError(f"{network.origin.ref} comes from a factory; save it and load the folder, then calibrate")
    modules = {m.name: {"order": list(m.order), "multiple": m.multiple} for m in groups.partition}
    chunks = [range(start, min(start + CHUNK, len(opens))) for start in range(0, len(opens), CHUNK)]
    parts, module_G = list(branch_signatures(network, groups)), groups.module_G()
    ratios: dict[int, Reading] = {}
    wholes, drifts = [], []
    for done, chunk in enumerate(chunks):
        job = {
            "ref": network.origin.ref,
            "shape": asdict(shape),
            "threads": target.threads,
            "modules": modules,
            "opens": {str(index): opens[index].nonzero()[:, 0].tolist() for index in chunk},
            "seconds": seconds_each * (len(chunk) + 1),
        }
        runs = [_run(job, target) for _ in range(processes)]
        session = Session({name: tuple(Timing(**run[name]) for run in runs) for name in runs[0]}, {})
        wholes.append(session.latency(WHOLE))
        ratios |= {index: session.ratio(str(index), to=WHOLE) for index in chunk}
        drifts.append(shared_error(session, [str(index) for index in chunk]))
        if on_share is not None:
            on_share((done + 1) / len(chunks))
    value_ms = fmean(reading.value for reading in wholes)
    stderr_ms = sum(reading.stderr**2 for reading in wholes) ** 0.5 / len(wholes)
    samples = {}
    for index, ratio in ratios.items():
        shares = dict(zip(parts, cost_shares(opens[index], module_G).tolist(), strict=True))
        samples[index] = Sample(shares, ratio.value * value_ms, ratio.stderr * value_ms)
    count = sum(reading.count for reading in wholes)
    baseline = Reading(value=value_ms, unit="ms", stderr=stderr_ms, count=count)
    return Swept(samples, {}, baseline, fmean(drift**2 for drift in drifts) ** 0.5)


def _run(job: dict[str, Any], target: Target) -> dict[str, dict[str, Any]]:
    ended = run_child(job, target.environment, Limits(), child=__spec__.name)
    if ended.result is None:
        assert ended.failure is not None
        raise MeasureError(f"side branches could not be measured: {ended.failure.kind}: {ended.failure.message}")
    found: dict[str, dict[str, Any]] = ended.result["candidates"]
    return found


def steps_of(network: Network, groups: Groups, opens: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """What is timed: the plain backbone, and one that holds tasks with every set of open groups, mixed in a batch."""
    plain = network.replace(module=copy.deepcopy(network.module))
    stacks = bundles(network, groups)
    generator = torch.Generator().manual_seed(0)
    for bundle in stacks:
        torch.nn.init.normal_(bundle.delta, std=1e-3, generator=generator)  # type: ignore[arg-type]
    shared = SharedTasks(network, groups, stacks, torch.full((1, groups.count), 0.5), max_plans=len(opens))
    batch = len(next(iter(network.inputs.values())))

    @torch.inference_mode()
    def whole() -> Tensor:
        return read_out(plain, network.inputs)

    def step(names: list[str]) -> Callable[[], Tensor]:
        return lambda: shared.embed(network.inputs, names)

    steps: dict[str, Callable[[], Tensor]] = {WHOLE: whole}
    for name, open_G in opens.items():
        tasks = [f"{name}/{number}" for number in range(min(batch, MIXED))]
        for task in tasks:
            shared.add(task, torch.ones(1))
            shared.open(task, open_G)
        steps[name] = step([tasks[n % len(tasks)] for n in range(batch)])
    return steps


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    network = load(job["ref"], **job["shape"])
    partition = Partition.of(network)
    modules = tuple(
        replace(m, order=tuple(job["modules"][m.name]["order"]), multiple=job["modules"][m.name]["multiple"])
        for m in partition
    )
    groups = Groups(replace(partition, modules=modules))
    opens = {
        name: torch.zeros(groups.count, dtype=torch.bool).index_fill_(0, torch.tensor(some, dtype=torch.long), True)
        for name, some in job["opens"].items()
    }
    steps = steps_of(network, groups, opens)
    with turn(cache_folder()):
        timed = time_in_turns(steps, seconds=job["seconds"], tolerance=0.01)
    write_whole(Path(job["result"]), json.dumps(timed).encode())


if __name__ == "__main__":
    main()
