"""The first three experiments of the Knob-Meter-Rule paper, on a trained ResNet-20 (that of compress_vs_peers).

    .venv/bin/python benchmarks/kmr_experiments/run.py [--quick]

Costs are counted (FLOPs, parameters, bytes), so the tables don't depend on the machine; nothing is trained. Accuracy is
on test images that no run chose with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from apportion.core.budget import Budget
from apportion.core.knob import Knob
from apportion.core.ledger import Ledger, Row
from apportion.core.loop import Result, budgeted_loop
from apportion.core.meter import Meter
from apportion.core.policy import Greedy, Policy, RankedBy, Scheduled
from apportion.methods.compress.bench import static_meters
from apportion.methods.compress.bound import composition, fit_bound
from apportion.methods.compress.importance import order_by_importance
from apportion.methods.compress.judge import LIKENESS, Judge
from apportion.methods.compress.policies.composed import Backtracking
from apportion.methods.compress.policies.exact import Exact
from apportion.methods.compress.policies.learned import Learned, train
from apportion.methods.compress.policies.priced import Priced
from apportion.methods.compress.prune import PREFIX as PRUNE
from apportion.methods.compress.prune import Prune, prune_knobs
from apportion.methods.compress.quantise import PREFIX as QUANTISE
from apportion.methods.compress.quantise import Quantise, quantise_knob
from apportion.models.cut import slice_network
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.tasks.quality import Accuracy
from apportion.testing.summary import Summary

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers.cases import CASES

HERE = Path(__file__).parent
SHARES = (0.8, 0.65, 0.5, 0.4)
EARLIER = ("magnitude", "fisher", "activation")  # orders of importance of the runs that others learn from
FLOOR = 0.95


class Lab:
    """The trained network, its parts in an order of importance, and the loop on them."""

    def __init__(self) -> None:
        self.case = CASES["resnet20"]
        self.network = self.case.network
        self.parts = Partition.of(self.network)
        self.accuracy = Accuracy(self.network, self.case.splits.training, self.case.splits.selection)
        self.judge = Judge(self.network, self.accuracy, self.case.splits.selection)
        self.meters: dict[str, Meter[Network]] = {**static_meters(), **self.judge.meters()}
        self.baseline = {key: meter.read(self.network) for key, meter in self.meters.items()}
        self._ordered: dict[str, Partition] = {}

    def ordered(self, importance: str) -> Partition:
        if importance not in self._ordered:
            calibration = self.case.splits.calibration
            self._ordered[importance] = order_by_importance(self.network, self.parts, importance, calibration)
        return self._ordered[importance]

    def run(
        self, budget: str, policy: Policy, *, importance: str = "taylor", quantise: bool = False, **options: object
    ) -> tuple[Result[Network], list[Row]]:
        partition = self.ordered(importance)
        knobs: list[Knob] = prune_knobs(partition) + ([quantise_knob()] if quantise else [])
        calibration = self.case.splits.calibration
        ledger = Ledger()
        result = budgeted_loop(
            self.network,
            knobs=knobs,
            rules={PRUNE: Prune(partition, calibration), QUANTISE: Quantise(calibration)},
            meters=self.meters,
            budget=Budget.parse(budget).resolve(self.baseline),
            policy=policy,
            ledger=ledger,
            **options,
        )
        return result, list(ledger)

    def tested(self, network: Network) -> float:
        return self.case.meter.read(network).value


def monotone_pruning(lab: Lab) -> dict[str, float]:
    """Experiment 1: more pruning never costs more, and the loop ends within as many steps as the knobs have values."""
    partition = lab.ordered("taylor")
    rises = pairs = 0
    for module in partition:
        params = [
            lab.meters["params"].read(slice_network(lab.network, partition, partition.keep({module.name: size}))).value
            for size in module.sizes(8)
        ]
        pairs += len(params) - 1
        rises += sum(low >= high for low, high in itertools.pairwise(params))
    result, rows = lab.run("params<=10%", Scheduled())
    moves = [row for row in rows if row.kind == "move"]
    costs = [row.readings["params"].value for row in rows if row.accepted]
    bound = sum(len(knob.values) - 1 for knob in prune_knobs(partition))
    row = {
        "steps of single knobs": pairs,
        "that did not lower the parameters": rises,
        "moves of the loop": len(moves),
        "N": bound,
        "accepted costs that rose": sum(after > before for before, after in itertools.pairwise(costs)),
        "parameters left": round(costs[-1] / costs[0], 4),
    }
    print("\n| experiment 1: monotone pruning | |\n|---|---|")
    for name, value in row.items():
        print(f"| {name} | {value} |")
    assert result.met
    return row


def policies(lab: Lab, shares: Sequence[float]) -> dict[str, dict]:
    """Experiment 2: policies at equal budgets, how far each is from the exact one, and the bound on composed losses."""
    earlier = [
        lab.run(f"flops<={share:.0%}", RankedBy(Greedy(), LIKENESS), importance=importance)[1]
        for importance in EARLIER
        for share in shares
    ]
    ranker = train(earlier, LIKENESS)
    arms: Mapping[str, Policy] = {
        "exact": RankedBy(Exact(), LIKENESS),
        "priced": RankedBy(Priced(), LIKENESS),
        "greedy": RankedBy(Greedy(), LIKENESS),
        "learned": RankedBy(Learned(ranker), LIKENESS),
        "scheduled": Scheduled(),
    }
    told: dict[str, dict] = {}
    own: list[list[Row]] = []
    for name, policy in arms.items():
        found = [lab.run(f"flops<={share:.0%}", policy) for share in shares]
        told[name] = {
            "accuracy": [round(lab.tested(result.model), 4) for result, _ in found],
            "loss": [round(-result.readings[LIKENESS].value, 4) for result, _ in found],
            "readings": round(float(np.mean([len(rows) for _, rows in found])), 1),
        }
        own += [rows for _, rows in found] if name == "greedy" else []
    for row in told.values():
        gaps = [mine - best for mine, best in zip(row["loss"], told["exact"]["loss"], strict=True)]
        row["over exact"] = round(float(np.mean(gaps)), 4)
    print("\n| experiment 2, accuracy at | " + " | ".join(f"{s:.0%} FLOPs" for s in shares), end="")
    print(" | mean loss over exact, nats | rows read |\n|---|" + "---|" * (len(shares) + 2))
    for name, row in told.items():
        cells = " | ".join(f"{value:.1%}" for value in row["accuracy"])
        print(f"| {name} | {cells} | {row['over exact']:+.3f} | {row['readings']:.0f} |")
    explained = ranker.held_out_r2
    print(f"\nlearned from {ranker.num_runs} runs of other orders; explains {explained:.0%} of the variance left out")
    runs = [composition(rows, "flops", LIKENESS) for rows in (*earlier, *own)]
    bound = fit_bound(runs, alpha=0.1)
    print(
        f"bound on composed losses from {bound.num_runs} greedy runs: {bound.num_exceeded} of {bound.num_left_out} "
        f"exceed that of the others ({bound.violation_rate:.0%}, stated 10%); {bound.num_over_additive} lost more "
        f"than the plain sum; margin {bound.margin:.2f}"
    )
    told["bound"] = {"violation_rate": round(bound.violation_rate, 4), "runs": bound.num_runs, "margin": bound.margin}
    told["learned"]["held_out_r2"] = explained
    return told


def composed(lab: Lab, shares: Sequence[float]) -> dict[str, dict]:
    """Experiment 3: prune, then quantise, under a floor: as the paper writes it, asked again, and with backtracking."""
    stages = Scheduled(("prune.*", "quantise"))
    floor = FLOOR * lab.baseline["quality"].value
    methods = (Scheduled(("prune.*",)), Scheduled(("quantise",)))
    arms = {
        "Algorithm 1 as written": (stages, True),
        "policy asked again": (stages, False),
        "backtracking": (Backtracking(methods, floor), True),
    }
    told = {}
    print(f"\n| experiment 3, floor {FLOOR:.0%} | " + " | ".join(f"size ≤ {s:.0%}" for s in shares) + " |")
    print("|---|" + "---|" * len(shares))
    for name, (policy, break_on_reject) in arms.items():
        cells = []
        for share in shares:
            result, _ = lab.run(
                f"size<={share:.0%}", policy, quantise=True, quality_floor=floor, break_on_reject=break_on_reject
            )
            left = result.readings["size"].value / lab.baseline["size"].value
            cells.append({"met": result.met, "outcome": result.outcome.value, "size": round(left, 4)})
        told[name] = cells
        print(f"| {name} | " + " | ".join(f"{c['outcome']} at {c['size']:.0%}" for c in cells) + " |")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three budgets instead of four")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    summary = Summary(HERE)
    lab = Lab()
    shares = SHARES[:3] if quick else SHARES
    first = monotone_pruning(lab)
    second = policies(lab, shares)
    third = composed(lab, (0.6, 0.4, 0.25, 0.2))
    figures = {
        "monotone_violations": first["that did not lower the parameters"] + first["accepted costs that rose"],
        "loop_steps": first["moves of the loop"],
        "loop_steps_bound": first["N"],
        "bound_violation_rate": second["bound"]["violation_rate"],
        **{f"{name}_over_exact_nats": row["over exact"] for name, row in second.items() if "over exact" in row},
        "met_as_written": sum(cell["met"] for cell in third["Algorithm 1 as written"]),
        "met_backtracking": sum(cell["met"] for cell in third["backtracking"]),
    }
    print(f"\n{json.dumps(figures, indent=1)}")
    summary.write(figures, quick=quick, policies=second, composed=third)


if __name__ == "__main__":
    main()
